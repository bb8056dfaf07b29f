import itertools

import pytest

from data.prepare import Row
from eval.evaluate import EvalConfig, choose, evaluate
from eval.speed import ratio
from specdec.drafters.none import Plain

ROWS = [Row(f"{d}{i}", d, [5 + i, 6]) for d in ("a", "b") for i in range(4)]


def test_choice_is_spread_and_own_domains_come_first():
    chosen = choose(ROWS, ["b"], EvalConfig(own=2, transfer=1))
    assert [row.id for row in chosen] == ["b0", "b2", "a0"]
    assert len(choose(ROWS, ["b"], EvalConfig(own=None, transfer=None))) == 8
    assert len(choose(ROWS, ["b"], EvalConfig(own=99, transfer=0))) == 4


def test_records_are_kept_and_continued(target, tmp_path):
    config = EvalConfig(max_new_tokens=5)
    first = list(itertools.islice(evaluate(target, Plain(), ROWS[:3], config, tmp_path), 2))
    assert all(r["identical_to_plain"] and r["identical_to_transformers"] for r in first)
    again = list(evaluate(target, Plain(), ROWS[:3], config, tmp_path))
    assert again[:2] == first
    assert len(again) == 3


def test_ratio_is_per_prompt():
    r = ratio([2.0, 4.0, 9.0], [1.0, 1.0, 3.0])
    assert (r.median, r.low, r.high) == (3.0, 2.5, 3.5)
    assert ratio([2.0], [1.0]).median == pytest.approx(2.0)
