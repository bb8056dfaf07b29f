import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from styles import template_tokenizer
from tiny import EOS, tiny_model

from data.artifact import open_stage
from data.chat import Template
from data.distill import DistillConfig, distill, keep_recorded
from data.rows import Row
from data.texts import read_texts
from data.walk import Walk, loops
from data.writer import Answer, Local
from specdec import Limits, Target, UserError, generate
from specdec.drafters.none import Plain

ROWS = [Row(f"r{i}", "d", [3 + i, 40, 50 + i][: 1 + i % 3]) for i in range(7)]
CONFIG = DistillConfig(temperatures=[0.0, 1.0], max_new_tokens=12, batch_size=2, shard_size=3)


def walker(target, longest=400):
    template = Template(target.tokenizer)
    return lambda row, temperature: Walk(row, temperature, template, longest, target.stop_tokens)


def run(target, folder, config=CONFIG, taps=(1, "final"), progress=lambda *_: None, rows=ROWS, writer=None):
    stage = open_stage(folder, "distill", {}, {})
    writer = writer or Local(target, config.max_new_tokens, config.batch_size, taps if config.features else ())
    distill(config, writer, rows, walker(target), 5, stage, progress)
    return stage, read_texts(folder)


def test_greedy_answers_are_the_targets_own_ids(target, tmp_path):
    stage, texts = run(target, tmp_path / "d")
    assert stage.counts["answers"] == stage.counts["texts"] == len(texts) == 14
    expected = [generate(target, Plain(), [r.prompt], Limits(12, (EOS,)))[0].tokens for r in ROWS]
    found = [text.tokens.tolist() for text in texts]
    for row, answer in zip(ROWS, expected, strict=True):
        assert row.prompt + answer in found
    for text in texts:
        ((start, end),) = text.spans
        assert end == len(text.tokens)
        assert text.tokens[:start].tolist() in [row.prompt for row in ROWS]


def test_features_are_those_of_the_text(target, tmp_path):
    _, texts = run(target, tmp_path / "d")
    for text in texts:
        expected = target.features(text.tokens[None], (1, "final"))[0]
        kept = text.stored()
        assert len(kept) == len(text.tokens) - 1
        assert torch.allclose(kept.double(), expected[: len(kept)], rtol=2e-3, atol=2e-3)


def test_features_can_be_left_out(target, tmp_path):
    config = DistillConfig(temperatures=[0.0], max_new_tokens=4, batch_size=4, features=False)
    assert all(text.features is None for text in run(target, tmp_path / "d", config)[1])


def test_an_interrupted_run_ends_with_the_same_texts(target, tmp_path):
    _, whole = run(target, tmp_path / "whole")
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 8:  # in the third shard
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(target, tmp_path / "cut", progress=interrupt)
    assert not (tmp_path / "cut/manifest.json").exists()
    written = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cut").glob("*.safetensors")}
    assert len(written) == 2
    _, resumed = run(target, tmp_path / "cut")
    assert [t.tokens.tolist() for t in resumed] == [t.tokens.tolist() for t in whole]
    assert all((tmp_path / "cut" / name).stat().st_mtime_ns == when for name, when in written.items())


def test_progress_counts_rows_and_tokens_as_they_end(target, tmp_path):
    seen = []
    stage, _ = run(target, tmp_path / "d", progress=lambda *values: seen.append(values))
    assert [answered for answered, _, _ in seen] == sorted(answered for answered, _, _ in seen)
    assert {total for _, total, _ in seen} == {14}
    assert seen[-1][0] == 14
    assert seen[-1][2] == stage.counts["answer_tokens"]
    assert len({answered for answered, _, _ in seen}) == 14


def test_a_token_limit_stops_early(target, tmp_path):
    config = DistillConfig(temperatures=[0.0], max_new_tokens=12, batch_size=2, shard_size=2, max_tokens=10)
    stage, _ = run(target, tmp_path / "d", config)
    assert 10 <= stage.counts["answer_tokens"] <= 10 + 24


# -- conversations ---------------------------------------------------------------------------------------------------


class Scripted:
    """A writer whose answers are given, by what the user said last; notes the prompts."""

    name = "scripted"

    def __init__(self, tokenizer, answers):
        self.tokenizer, self.answers, self.prompts = tokenizer, answers, []

    def answer(self, requests, seed, advance):  # noqa: ARG002
        out = []
        for number, request in enumerate(requests):
            self.prompts.append(self.tokenizer.decode(request.prompt))
            question = self.prompts[-1].rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
            answer = self.answers[question]
            if not isinstance(answer, Answer):
                answer = Answer(self.tokenizer(answer, add_special_tokens=False)["input_ids"], "stop")
            out.append(answer)
            advance(number + 1, 0)
        return out


def styled(style):
    tokenizer = template_tokenizer(style)
    model = tiny_model(vocab_size=320, eos_token_id=tokenizer.eos_token_id)
    return Target(model, tokenizer, "tiny")


def conversation(target, *questions):
    messages = [t for q in questions for t in ({"role": "user", "content": q}, {"role": "assistant"})][:-1]
    return Row("c", "d", Template(target.tokenizer).prompt(messages[:1]), messages)


ONCE = DistillConfig(temperatures=[0.0], shard_size=4)


def test_a_conversation_is_walked_with_the_writers_own_answers(tmp_path):
    target = styled("smollm2")
    writer = Scripted(target.tokenizer, {"a": "One<|im_end|>", "b": "Two<|im_end|>", "c": "Three<|im_end|>"})
    stage, (text,) = run(target, tmp_path / "d", ONCE, rows=[conversation(target, "a", "b", "c")], writer=writer)
    assert [target.tokenizer.decode(text.tokens[a:b]) for a, b in text.spans] == [
        "One<|im_end|>",
        "Two<|im_end|>",
        "Three<|im_end|>",
    ]
    assert "One" in writer.prompts[1]
    assert "Two" in writer.prompts[2]
    assert stage.counts["answers"] == 3
    (record,) = map(json.loads, (tmp_path / "d/shard-00000.jsonl").read_text().splitlines())
    assert record["writer"] == "scripted"
    assert record["answers"] == ["One<|im_end|>", "Two<|im_end|>", "Three<|im_end|>"]


def test_each_text_is_what_serving_reads_plus_what_was_written(tmp_path):
    """Also where the template drops the reasoning of earlier turns."""
    target = styled("qwen3")
    said = ["<think>\nhm\n</think>\n\nOne<|im_end|>", "<think>\nso\n</think>\n\nTwo<|im_end|>"]
    writer = Scripted(target.tokenizer, dict(zip("ab", said, strict=True)))
    _, texts = run(target, tmp_path / "d", ONCE, rows=[conversation(target, "a", "b")], writer=writer)
    decode = target.tokenizer.decode
    assert [decode(text.tokens[a:b]) for text in texts for a, b in text.spans] == said
    assert [decode(text.tokens[:a]) for text in texts for a, _ in text.spans] == writer.prompts
    assert len(texts) == 2
    assert "hm" not in writer.prompts[1]


def test_walked_by_the_target_itself(tmp_path):
    target = styled("smollm2")
    row = conversation(target, "a", "b", "c")
    config = DistillConfig(temperatures=[0.0], max_new_tokens=6)
    stage, texts = run(target, tmp_path / "d", config, rows=[row])
    assert stage.counts["answers"] == 3
    spans = [(text, *span) for text in texts for span in text.spans]
    for text, start, end in spans:  # every answer is the target's greedy one after what stands before it
        prompt = text.tokens[:start].tolist()
        limits = Limits(6, target.stop_tokens)
        assert generate(target, Plain(), [prompt], limits)[0].tokens == text.tokens[start:end].tolist()
    for text in texts:
        kept = text.stored()
        expected = target.features(text.tokens[None], (1, "final"))[0]
        assert torch.allclose(kept.double(), expected[: len(kept)], rtol=2e-3, atol=2e-3)
        assert len(kept) >= text.spans[-1][1] - 1


def test_a_walk_ends_early_where_it_must_and_says_so(tmp_path):
    target = styled("smollm2")
    refused = Answer([], "refused", reason="too long for the server")
    writer = Scripted(target.tokenizer, {"a": "word " * 90, "c": refused, "e": "x<|im_end|>"})
    rows = [conversation(target, "a", "b"), conversation(target, "c", "d"), conversation(target, "e")]
    stage, texts = run(target, tmp_path / "d", ONCE, rows=rows, writer=writer)
    assert (stage.counts["cut_short"], stage.counts["refused"], len(texts)) == (1, 1, 2)
    cuts = [json.loads(line).get("cut") for line in (tmp_path / "d/shard-00000.jsonl").read_text().splitlines()]
    assert any("next prompt has" in (cut or "") for cut in cuts)
    assert "too long for the server" in cuts


def test_a_writer_that_refuses_everything_stops_the_run(tmp_path):
    target = styled("smollm2")
    writer = Scripted(target.tokenizer, {"a": Answer([], "refused", reason="temperature above 2")})
    with pytest.raises(UserError, match="refused all 1 prompts of a shard: temperature above 2"):
        run(target, tmp_path / "d", ONCE, rows=[conversation(target, "a")], writer=writer)
    assert not list((tmp_path / "d").glob("shard*"))


def test_a_resumed_run_with_another_writer_is_refused(tmp_path):
    target = styled("smollm2")
    rows = [conversation(target, "a"), conversation(target, "b")]
    config = DistillConfig(temperatures=[0.0], shard_size=1)
    writer = Scripted(target.tokenizer, {"a": "x<|im_end|>", "b": "y<|im_end|>"})

    run(target, tmp_path / "e", config, rows=rows, writer=writer)
    open_stage(tmp_path / "d", "distill", {}, {})
    shutil.copy(tmp_path / "e/shard-00000.safetensors", tmp_path / "d")
    writer.name = "another"
    with pytest.raises(UserError, match="was written by scripted, and now it is another"):
        run(target, tmp_path / "d", config, rows=rows, writer=writer)


def test_loops_are_counted_and_can_be_dropped(tmp_path):
    target = styled("smollm2")
    for drop in (False, True):
        writer = Scripted(target.tokenizer, {"a": "and so on " * 20 + "<|im_end|>", "b": "A plain answer.<|im_end|>"})
        config = DistillConfig(temperatures=[0.0], drop_loops=drop)
        rows = [conversation(target, "a"), conversation(target, "b")]
        stage, texts = run(target, tmp_path / str(drop), config, rows=rows, writer=writer)
        assert stage.counts["loops"] == 1
        assert stage.counts["answer_tokens"] == sum(text.supervised for text in texts)
        assert len(texts) == 2 - drop


def test_what_a_loop_is():
    fresh = random.Random(0).choices(range(100), k=200)
    assert not loops(fresh)
    assert not loops([])
    assert not loops([7] * 31)
    assert loops([7] * 32)
    assert loops(fresh + [1, 2, 3, 4, 5] * 7)
    assert loops(fresh + fresh[:50] * 3)
    assert not loops(fresh + fresh[:50] * 2)
    assert not loops([7] * 100 + fresh[:40])


def test_recorded_texts_become_shards(tmp_path):
    rows = [Row(f"r{i}", "d", [5, 6], texts=[[[5, 6, 7 + i, 8], [[2, 4]]]], writer="gpt") for i in range(5)]
    stage = open_stage(tmp_path / "d", "distill", {}, {})
    keep_recorded(DistillConfig(backend="recorded", shard_size=2), rows, stage, lambda *_: None)
    texts = read_texts(tmp_path / "d")
    assert [text.tokens.tolist() for text in texts] == [[5, 6, 7 + i, 8] for i in range(5)]
    assert {text.spans for text in texts} == {((2, 4),)}
    assert (stage.counts["writer"], stage.counts["answer_tokens"]) == ("recorded", 10)


# -- killed ----------------------------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:4]
from test_distill import killed_run
killed_run(Path(sys.argv[1]))
"""


def killed_run(folder: Path) -> None:
    """What the killed process does: greedy answers in small shards, slowly enough to be hit anywhere."""
    torch.set_num_threads(1)
    target = styled("smollm2")
    rows = [replace(conversation(target, f"{i}", "and?"), id=f"c{i}") for i in range(24)]
    config = DistillConfig(temperatures=[0.0], max_new_tokens=10, batch_size=4, shard_size=4)
    run(target, folder, config, rows=rows, progress=lambda *_: time.sleep(0.02))


def test_killed_at_any_moment_the_rows_are_those_of_an_undisturbed_run(tmp_path):
    here = Path(__file__)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "cut"), str(here.parent), str(here.parents[1])]
    environment = os.environ | {"PYTHONPATH": str(here.parents[2]), "OMP_NUM_THREADS": "1"}
    killed = 0
    for moment in random.sample(range(1, 40), 3):
        process = subprocess.Popen(command, env=environment)
        before = count = len(list((tmp_path / "cut").glob("*")))
        deadline = time.monotonic() + 60
        while process.poll() is None and count - before < 1 + moment % 4 and time.monotonic() < deadline:
            time.sleep(0.001 * moment)
            count = len(list((tmp_path / "cut").glob("*")))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    killed_run(tmp_path / "whole")
    cut, whole = ([t.tokens.tolist() for t in read_texts(tmp_path / name)] for name in ("cut", "whole"))
    assert cut == whole
    for name in ("cut", "whole"):
        ids = [json.loads(line)["id"] for p in (tmp_path / name).glob("*.jsonl") for line in p.open()]
        assert sorted(ids) == sorted(f"c{i}" for i in range(24))
