import json

import pytest

from eval.evaluate import Setting
from eval.report import as_markdown, as_text, summarise, table, verdict, write_report
from specdec.cost import Costs, CostTable, Plan
from specdec.drafters.none import Plain

COSTS = CostTable([Costs(1, 10, {1: 20.0, 4: 24.0}, {1: 2.0, 2: 3.0, 3: 4.0})])
SETTING = Setting(Plain(), Plan(4, 3), COSTS, [])


def record(domain, same=True):
    return {
        "domain": domain,
        "tokens": 6,
        "identical_to_plain": same,
        "identical_to_transformers": True,
        "seconds": {"drafter": 1.0, "plain": 2.0, "transformers": 3.0},
        "prompt_tokens": 9,
        "rounds": [[3, 1, 2, 3, [0, 1, 2, 3], [1], 4.0, 24.0], [3, 3, 4, 3, [0, 1, 2, 3], [1, 2, 3], 4.0, 24.0]],
        "gap": None if same else 0.5,
    }


def test_trained_domains_first_and_ratios_as_measured(tmp_path):
    summary = summarise([record("a"), record("z"), record("z")], ["z"], SETTING)
    assert list(summary["domains"]) == ["z", "a"]
    z = summary["domains"]["z"]
    assert z["tau"] == 3.0
    assert z["speedup_over_plain"]["median"] == 2.0
    assert z["speedup_over_transformers"]["median"] == 3.0
    assert z["predicted_speedup"] == pytest.approx(3 * 20 / 28)
    assert z["plan"] == "4 nodes, 3 deep"
    rows = table(summary)
    assert rows[2][0] == "a (transfer)"
    assert "2.00x" in as_text(rows)
    assert as_markdown(rows).count("\n") == 3
    write_report(tmp_path, summary, "t", {"seed": "0"})
    assert json.loads((tmp_path / "report.json").read_text())["identical"] is True
    assert "all 3 prompts" in (tmp_path / "report.md").read_text()


def test_a_difference_is_never_hidden():
    text = verdict(summarise([record("a"), record("a", same=False)], ["a"], SETTING))
    assert text.startswith("NOT LOSSLESS")
    assert "1 of 2" in text


def test_where_speculation_does_not_pay_the_plan_is_off():
    useless = record("a") | {"rounds": [[3, 0, 1, 3, [0, 1, 2, 3], [], 4.0, 24.0]] * 4}
    domain = summarise([useless], ["a"], SETTING)["domains"]["a"]
    assert domain["plan"] == "off"
    assert domain["predicted_speedup"] == pytest.approx(20 / 28)
    shallow = record("a") | {"rounds": [[3, 1, 2, 3, [0, 1, 2, 3], [1], 4.0, 24.0]] * 4}
    assert summarise([shallow], ["a"], SETTING)["domains"]["a"]["plan"] == "2 nodes, 1 deep"
