import pytest
import torch
from tiny import EOS

from data.artifact import open_stage
from data.distill import DistillConfig, distill, read_texts
from data.prepare import Row
from specdec import Limits, generate
from specdec.drafters.none import Plain

ROWS = [Row(f"r{i}", "d", [3 + i, 40, 50 + i][: 1 + i % 3]) for i in range(7)]
CONFIG = DistillConfig(temperatures=[0.0, 1.0], max_new_tokens=12, batch_size=2, shard_size=3)


def run(target, folder, config=CONFIG, taps=(1, "final"), progress=lambda *_: None):
    stage = open_stage(folder, "distill", {}, {})
    distill(config, target, ROWS, taps, 5, stage, progress)
    return stage, read_texts(folder)


def test_greedy_answers_are_the_targets_own_ids(target, tmp_path):
    stage, texts = run(target, tmp_path / "d")
    assert stage.counts["answers"] == len(texts) == 14
    expected = [generate(target, Plain(), [r.prompt], Limits(12, (EOS,)))[0].tokens for r in ROWS]
    found = [text.tokens.tolist() for text in texts]
    for row, answer in zip(ROWS, expected, strict=True):
        assert row.prompt + answer in found


def test_features_are_those_of_the_text(target, tmp_path):
    _, texts = run(target, tmp_path / "d")
    for text in texts:
        expected = target.features(text.tokens[None], (1, "final"))[0]
        assert len(text.features) == len(text.tokens) - 1
        assert torch.allclose(text.features.double(), expected[: len(text.features)], rtol=2e-3, atol=2e-3)


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


def test_progress_counts_answers_and_tokens_as_they_end(target, tmp_path):
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
