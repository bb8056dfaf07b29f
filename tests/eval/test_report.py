import json

from eval.report import as_markdown, as_text, summarise, table, verdict, write_report


def record(domain, same=True):
    return {
        "domain": domain,
        "tokens": 6,
        "identical_to_plain": same,
        "identical_to_transformers": True,
        "seconds": {"drafter": 1.0, "plain": 2.0, "transformers": 3.0},
        "rounds": [[3, 1, 2, 3], [3, 3, 4, 3]],
        "gap": None if same else 0.5,
    }


def test_trained_domains_first_and_ratios_as_measured(tmp_path):
    summary = summarise([record("a"), record("z"), record("z")], ["z"])
    assert list(summary["domains"]) == ["z", "a"]
    z = summary["domains"]["z"]
    assert z["tau"] == 3.0
    assert z["speedup_over_plain"]["median"] == 2.0
    assert z["speedup_over_transformers"]["median"] == 3.0
    rows = table(summary)
    assert rows[2][0] == "a (transfer)"
    assert "2.00x" in as_text(rows)
    assert as_markdown(rows).count("\n") == 3
    write_report(tmp_path, summary, "t", {"seed": "0"})
    assert json.loads((tmp_path / "report.json").read_text())["identical"] is True
    assert "all 3 prompts" in (tmp_path / "report.md").read_text()


def test_a_difference_is_never_hidden():
    text = verdict(summarise([record("a"), record("a", same=False)], ["a"]))
    assert text.startswith("NOT LOSSLESS")
    assert "1 of 2" in text
