"""From per-prompt records to report.json, report.md and the table a run ends with."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.artifact import write_text
from eval.acceptance import DEFINITIONS, acceptance
from eval.evaluate import Setting
from eval.speed import MODES, ratio
from specdec.cost import OFF, Choice, Costs, Plan, Profile, choices
from specdec.decode import Round

SCHEMA = 2
NEAR_TIE = 0.25  # of two logits in half precision: a few units in the last place


def summarise(
    records: list[dict[str, Any]], own: list[str], setting: Setting, half_precision: bool = False
) -> dict[str, Any]:
    """One entry per domain, the trained ones first, from the records of evaluate()."""
    domains = sorted({r["domain"] for r in records}, key=lambda d: (d not in own, d))
    return {
        "schema": SCHEMA,
        "definitions": DEFINITIONS,
        "domains": {d: _domain([r for r in records if r["domain"] == d], d in own, setting) for d in domains},
        "identical": all(map(_same, records)),
        "largest_gap": max((r["gap"] for r in records if r["gap"] is not None), default=None),
        "half_precision": half_precision,
        "prompts": len(records),
        "plan": "adaptive" if setting.plan is None else str(setting.plan),
        "considered": [asdict(choice) for choice in setting.considered],
        "round_seconds": [
            {"rows": c.rows, "context": c.context, "read_by_nodes": c.read, "draft_by_depth": c.draft}
            for c in setting.costs.entries
        ],
    }


def _domain(records: list[dict[str, Any]], trained: bool, setting: Setting) -> dict[str, Any]:
    rounds = [Round(*entry) for record in records for entry in record["rounds"]]
    costs = setting.costs.at(1, statistics.median_low(record["prompt_tokens"] for record in records))
    best = _best(rounds, setting.plan, costs) if setting.plan and rounds else None
    seconds = {mode: [record["seconds"][mode] for record in records] for mode in MODES}
    tokens = sum(record["tokens"] for record in records)
    found = acceptance(rounds)
    return {
        "trained_on": trained,
        "prompts": len(records),
        "tokens": tokens,
        "rounds": found.rounds,
        "tau": _finite(found.tau),
        "acceptance_rate": _finite(found.acceptance_rate),
        "positions": [_finite(p) for p in found.positions],
        "reached": found.reached,
        "identical": sum(map(_same, records)),
        "identical_to_plain": sum(r["identical_to_plain"] for r in records),
        "identical_to_transformers": sum(r["identical_to_transformers"] for r in records),
        "speedup_over_plain": asdict(ratio(seconds["plain"], seconds["drafter"])),
        "speedup_over_transformers": asdict(ratio(seconds["transformers"], seconds["drafter"])),
        "predicted_speedup": costs.speedup(setting.plan, found.tau) if setting.plan and rounds else None,
        "best_plan": asdict(best) if best else None,
        "plan": str(best.plan) if best else "adaptive",
        "tokens_per_second": {mode: tokens / sum(seconds[mode]) for mode in MODES},
    }


def _best(rounds: list[Round], plan: Plan, costs: Costs) -> Choice:
    """What these rounds would have gone best with: a part of the plan they had, or plain decoding."""
    profile = Profile(plan.nodes, plan.depth)
    for one in rounds:
        profile.add(plan, one.depths, one.path)
    parts = [Plan(nodes, depth) for depth in range(1, plan.depth + 1) for nodes in range(depth + 1, plan.nodes + 1)]
    return choices([OFF, *parts], costs, profile)[0]


def table(summary: dict[str, Any]) -> list[list[str]]:
    """Header and one row per domain, as text."""
    rows = [
        [
            "domain",
            "prompts",
            "tau",
            "accepted",
            "by position",
            "identical",
            "vs plain",
            "predicted",
            "vs transformers",
            "plan",
        ]
    ]
    for name, d in summary["domains"].items():
        rows.append(
            [
                name if d["trained_on"] else f"{name} (transfer)",
                str(d["prompts"]),
                "-" if d["tau"] is None else f"{d['tau']:.2f}",
                "-" if d["acceptance_rate"] is None else f"{100 * d['acceptance_rate']:.0f} %",
                " ".join("-" if p is None else f"{p:.2f}".removeprefix("0") for p in d["positions"]),
                f"{d['identical']}/{d['prompts']}",
                _times(d["speedup_over_plain"]),
                "-" if d["predicted_speedup"] is None else f"{d['predicted_speedup']:.2f}x",
                _times(d["speedup_over_transformers"]),
                d["plan"],
            ]
        )
    return rows


def as_text(rows: list[list[str]]) -> str:
    """Aligned columns for a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def as_markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def verdict(summary: dict[str, Any]) -> str:
    """The sentence on losslessness that stands beside every speedup."""
    total = summary["prompts"]
    if summary["identical"]:
        same = "identical, token for token, to plain decoding and to model.generate"
        return f"Greedy output is {same} on all {total} prompts."
    same = sum(d["identical"] for d in summary["domains"].values())
    gap = summary["largest_gap"]
    if summary["half_precision"] and gap is not None and gap <= NEAR_TIE:
        return (
            f"Greedy output is identical on {same} of {total} prompts; the others part where the two best logits are "
            f"at most {gap:.2g} apart, which the rounding of half precision explains. Use float32 for identical text."
        )
    return (
        f"NOT LOSSLESS HERE: greedy output is identical on {same} of {total} prompts only (largest logit gap where "
        f"texts part: {gap}); see rounds.jsonl."
    )


def _same(record: dict[str, Any]) -> bool:
    return record["identical_to_plain"] and record["identical_to_transformers"]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_report(folder: Path, summary: dict[str, Any], title: str, facts: dict[str, str]) -> None:
    """report.json and report.md into `folder`."""
    write_text(folder / "report.json", json.dumps({**summary, "facts": facts}, indent=2) + "\n")
    lines = [f"# {title}", "", as_markdown(table(summary)), "", verdict(summary), "", "## Settings", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    lines += ["", "## Definitions", "", *[f"- **{key}**: {value}" for key, value in DEFINITIONS.items()], ""]
    write_text(folder / "report.md", "\n".join(lines))


def _times(entry: dict[str, float]) -> str:
    return f"{entry['median']:.2f}x ({entry['low']:.2f}-{entry['high']:.2f})"
