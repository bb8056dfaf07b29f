"""evaluate: choose what is proposed in a round, then decode held-out prompts with the drafter, plain, and with
transformers; keep every round.

Records are appended prompt by prompt, so an interrupted evaluation goes on where it was, with the same plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.artifact import write_text
from data.rows import Row
from eval.lossless import divergence
from eval.ranks import measured_tree
from eval.speed import timed
from specdec.controller import adaptive
from specdec.cost import Choice, CostTable, Plan, Profile, choices, hardware, plans
from specdec.decode import generate
from specdec.drafter import Drafter
from specdec.errors import UserError, nearest
from specdec.planned import Plannable, measure
from specdec.search import TreeConfig
from specdec.stopping import Limits
from specdec.target import Target

RECORDS, COSTS, CHOICES, TREE = "rounds.jsonl", "costs.json", "choices.json", "tree.json"
RANKED = 12
"""Prompts from which a static tree is measured."""
PLANS = ("auto", "tree", "adaptive")


@dataclass(frozen=True)
class EvalConfig:
    """conf/eval/*.yaml: what is measured."""

    name: str = "quick"
    """Folder under evaluate/."""
    own: int | None = 10
    """Held-out prompts of each trained domain; null takes all."""
    transfer: int | None = 2
    """Held-out prompts of each other domain; null takes all."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    plan: str = "auto"
    """auto: the part of drafter.tree that was measured to pay most; tree: drafter.tree as it is; adaptive: the online
    controller, which may change it every round."""
    calibrate: int = 4
    """auto: held-out prompts of the trained domains from which acceptance is taken; others than the measured ones where
    there are any."""

    def __post_init__(self) -> None:
        if self.plan not in PLANS:
            raise UserError(f"eval.plan: '{self.plan}' is not one of {', '.join(PLANS)}.{nearest(self.plan, PLANS)}")
        if self.calibrate < 1:
            raise UserError(f"eval.calibrate must be 1 or more, got {self.calibrate}")
        if self.own is not None and self.own < 1:
            raise UserError(f"eval.own must be 1 or more, or null for all, got {self.own}")
        if self.max_new_tokens < 2 or (self.transfer is not None and self.transfer < 0):
            raise UserError("eval.max_new_tokens must be 2 or more and eval.transfer 0 or more, or null for all")


def choose(rows: list[Row], own_domains: list[str], config: EvalConfig) -> list[Row]:
    """The prompts an evaluation decodes: spread evenly over each domain's list, the same in every run."""
    chosen: list[Row] = []
    for domain in sorted({row.domain for row in rows}, key=lambda d: (d not in own_domains, d)):
        members = [row for row in rows if row.domain == domain]
        count = config.own if domain in own_domains else config.transfer
        if count is None or count >= len(members):
            chosen += members
        else:
            chosen += [members[i * len(members) // count] for i in range(count)]
    if not chosen:
        raise UserError(f"eval: there are no held-out prompts of {', '.join(own_domains)}, and eval.transfer is 0")
    return chosen


@dataclass(frozen=True)
class Setting:
    """How the drafter decodes: the drafter under its plan, the plan (None: changes online), what rounds cost, and what
    was chosen from."""

    drafter: Drafter
    plan: Plan | None
    costs: CostTable
    considered: list[Choice]


def settle(
    target: Target, drafter: Plannable, held_out: list[Row], measured: list[Row], config: EvalConfig, folder: Path
) -> Setting:
    """Measure what rounds cost and choose the plan; both are kept in `folder` and found there by a resumed run.

    held_out: the prompts of the trained domains. measured: what will be decoded.

    A chosen plan is never off, so that there is something to measure: the report says where off is better.
    """
    pool = [row for row in held_out if row not in measured] or held_out
    if drafter.tree.unmeasured:
        drafter.tree = _tree(target, drafter, [row.prompt for row in pool], config, folder / TREE)
    text = sorted(measured, key=lambda row: len(row.prompt))[len(measured) // 2].prompt
    costs = _costs(target, drafter, text, folder / COSTS)
    whole = Plan(drafter.tree.most_nodes, drafter.tree.longest)
    if config.plan == "adaptive":
        return Setting(adaptive(drafter, costs), None, costs, [])
    if config.plan == "tree":
        return Setting(drafter, whole, costs, [])
    path = folder / CHOICES
    if not path.is_file():
        profile = Profile(whole.nodes, whole.depth)
        limits = Limits(config.max_new_tokens, target.stop_tokens)
        for row in pool[: config.calibrate]:
            for one in generate(target, drafter, [row.prompt], limits)[0].rounds:
                profile.add(whole, one.depths, one.path)
        found = choices(plans(drafter.tree), costs.at(1, len(text)), profile)
        write_text(path, json.dumps([[c.plan.nodes, c.plan.depth, c.tokens, c.speedup] for c in found]) + "\n")
    considered = [Choice(Plan(n, d), tokens, speedup) for n, d, tokens, speedup in json.loads(path.read_text())]
    plan = next(choice.plan for choice in considered if not choice.plan.off)
    drafter.tree = drafter.tree.limited(plan.nodes, plan.depth)
    return Setting(drafter, plan, costs, considered)


def _tree(target: Target, drafter: Plannable, prompts: list[list[int]], config: EvalConfig, path: Path) -> TreeConfig:
    """A static tree that the fit did not measure."""
    if not path.is_file():
        tree, _ = measured_tree(target, drafter, prompts[:RANKED], drafter.tree, config.max_new_tokens)
        write_text(path, json.dumps(tree.paths) + "\n")
    return replace(drafter.tree, paths=json.loads(path.read_text()))


def _costs(target: Target, drafter: Plannable, text: list[int], path: Path) -> CostTable:
    if path.is_file():
        known = CostTable.load(path)
        if known.fingerprint == hardware(target, drafter):
            return known
    table = measure(target, drafter, text)
    table.save(path)
    return table


def evaluate(
    target: Target, drafter: Drafter, rows: list[Row], config: EvalConfig, folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield one record per row, those of an earlier, interrupted run first."""
    path = folder / RECORDS
    known = _read(path)
    limits = Limits(config.max_new_tokens, target.stop_tokens)
    if len(known) < len(rows):
        warm = Limits(8, target.stop_tokens)
        for turn in range(3):  # first calls pay for allocation
            timed(target, drafter, rows[0].prompt, warm, turn)
    for number, row in enumerate(rows):
        record = known.get(row.id)
        if record is None:
            run = timed(target, drafter, row.prompt, limits, number)
            plain = divergence(target, row.prompt, run.tokens["plain"], run.tokens["drafter"])
            stock = divergence(target, row.prompt, run.tokens["transformers"], run.tokens["drafter"])
            gaps = [one.gap for one in (plain, stock) if one is not None]
            record = {
                "id": row.id,
                "domain": row.domain,
                "prompt_tokens": len(row.prompt),
                "tokens": len(run.tokens["drafter"]),
                "finish": run.generation.finish,
                "identical_to_plain": plain is None,
                "identical_to_transformers": stock is None,
                "gap": max(gaps) if gaps else None,
                "seconds": run.seconds,
                "answer": run.tokens["drafter"],
                "rounds": [list(vars(r).values()) for r in run.generation.rounds],
            }
            known[row.id] = record
            write_text(path, "".join(json.dumps(known[r.id]) + "\n" for r in rows if r.id in known))
        yield record


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    return {record["id"]: record for record in map(json.loads, path.read_text().splitlines())}
