"""The bench runs every section on a tiny model and compares texts; its numbers are for people."""

from __future__ import annotations

import sys

import pytest
from tiny import tiny_model, tiny_tokenizer

from eval import bench
from eval.ratios import SECTIONS, Bench, truncated
from eval.speed import stock_answers, stock_generate
from specdec import Limits, Target, generate
from specdec.drafters.none import Plain

PROMPTS = [[5, 9, 17, 33], [40, 8], [77, 12, 5, 9, 17, 33], [6, 7, 8], [90], [11, 12, 13, 14], [20, 21]]
LIMITS = Limits(12, (1,))


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model(), tiny_tokenizer())


def test_every_section_prints_and_finds_the_texts_identical(target, capsys):
    made = Bench(target, PROMPTS, PROMPTS, PROMPTS, LIMITS, None, 3)
    for name in SECTIONS:
        getattr(made, name if name != "drafter" else "drafter_")()
    printed = capsys.readouterr().out
    assert "over model.generate" in printed
    assert "identical: True" in printed
    counts = [line.rsplit("identical text ", 1)[1] for line in printed.splitlines() if "identical text" in line]
    assert len(counts) >= 5
    assert all(count.split("/")[0] == count.split("/")[1] for count in counts)


def test_batches_of_generate_are_its_single_answers(target):
    alone = [stock_generate(target, prompt, LIMITS) for prompt in PROMPTS]
    assert stock_answers(target, PROMPTS, LIMITS, 3) == alone
    assert [g.tokens for g in generate(target, Plain(), PROMPTS, LIMITS)] == alone


def test_a_truncated_model_is_the_first_layers(target):
    short = truncated(target.model, 2)
    assert short.config.num_hidden_layers == 2
    weight = "model.layers.1.mlp.up_proj.weight"
    assert short.state_dict()[weight].equal(target.model.state_dict()[weight])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "plain,speed"], "--only: 'speed' is not one of reading, plain"),
        (["--run", "nowhere"], "--run: nowhere has no trained drafter"),
        (["--target", "package:no_such/thing.gguf"], "error: "),
    ],
)
def test_mistakes_end_in_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
