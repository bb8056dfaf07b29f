import itertools

import pytest
from makers import DRAFTERS

from data.rows import Row
from eval.evaluate import CHOICES, COSTS, EvalConfig, choose, evaluate, settle
from eval.speed import ratio
from specdec import UserError
from specdec.cost import CostTable, Plan
from specdec.drafters.none import Plain
from specdec.planned import Planned

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
    assert [r["answer"] for r in again[:2]] == [r["answer"] for r in first]
    assert [len(r["rounds"]) for r in again[:2]] == [len(r["rounds"]) for r in first]
    assert [r["seconds"] for r in again[:2]] == [r["seconds"] for r in first], "finished prompts are not decoded again"
    assert len(again) == 3


def test_ratio_is_per_prompt():
    r = ratio([2.0, 4.0, 9.0], [1.0, 1.0, 3.0])
    assert (r.median, r.low, r.high) == (3.0, 2.5, 3.5)
    assert ratio([2.0], [1.0]).median == pytest.approx(2.0)


def test_a_plan_is_chosen_once_and_found_again(target, tmp_path):
    config = EvalConfig(max_new_tokens=12, calibrate=2)
    whole = DRAFTERS["eagle-dynamic"](target).tree
    first = settle(target, DRAFTERS["eagle-dynamic"](target), ROWS[:3], ROWS[3:5], config, tmp_path)
    assert not first.plan.off
    assert first.drafter.tree == whole.limited(first.plan.nodes, first.plan.depth)
    assert first.considered[0].speedup == max(choice.speedup for choice in first.considered)
    written = {name: (tmp_path / name).read_bytes() for name in (CHOICES, COSTS)}
    again = settle(target, DRAFTERS["eagle-dynamic"](target), ROWS[:3], ROWS[3:5], config, tmp_path)
    assert again.plan == first.plan
    assert written == {name: (tmp_path / name).read_bytes() for name in (CHOICES, COSTS)}


def test_costs_of_another_machine_are_measured_again(target, tmp_path):
    config = EvalConfig(max_new_tokens=12, plan="tree")
    settle(target, DRAFTERS["eagle-chain"](target), ROWS[:3], ROWS[:2], config, tmp_path)
    table = CostTable.load(tmp_path / COSTS)
    CostTable(table.entries, table.fingerprint | {"processor": "another"}).save(tmp_path / COSTS)
    setting = settle(target, DRAFTERS["eagle-chain"](target), ROWS[:3], ROWS[:2], config, tmp_path)
    assert setting.costs.fingerprint["processor"] == table.fingerprint["processor"]
    assert setting.plan == Plan(5, 4)
    assert setting.drafter.tree.depth == 4


def test_the_controller_can_be_asked_for(target, tmp_path):
    setting = settle(
        target, DRAFTERS["eagle-dynamic"](target), ROWS[:3], ROWS[:2], EvalConfig(plan="adaptive"), tmp_path
    )
    assert setting.plan is None
    assert isinstance(setting.drafter, Planned)
    records = list(evaluate(target, setting.drafter, ROWS[:2], EvalConfig(max_new_tokens=20), tmp_path))
    assert all(r["identical_to_plain"] and r["identical_to_transformers"] for r in records)


def test_an_unknown_plan_is_named():
    with pytest.raises(UserError, match=r"eval.plan: 'adaptiv' is not one of .* Did you mean 'adaptive'"):
        EvalConfig(plan="adaptiv")
