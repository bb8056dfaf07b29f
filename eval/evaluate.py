"""evaluate: decode held-out prompts with the drafter, plain, and with transformers; keep every round.

Records are appended prompt by prompt, so an interrupted evaluation goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.artifact import write_text
from data.prepare import Row
from eval.lossless import divergence
from eval.speed import timed
from specdec.drafter import Drafter
from specdec.errors import UserError
from specdec.stopping import Limits
from specdec.target import Target

RECORDS = "rounds.jsonl"


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

    def __post_init__(self) -> None:
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
                "rounds": [[r.proposed, r.accepted, r.emitted, r.depth] for r in run.generation.rounds],
            }
            known[row.id] = record
            write_text(path, "".join(json.dumps(known[r.id]) + "\n" for r in rows if r.id in known))
        yield record


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    return {record["id"]: record for record in map(json.loads, path.read_text().splitlines())}
