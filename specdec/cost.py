"""What a round costs and what it brings: the plan with the most tokens per second, or none.

A plan is how much of a drafter's tree is proposed: its first nodes, down to some depth. Seconds are measured, per batch
size and context; what is accepted is counted, per node and depth. rate = (1 + expected accepted) / (drafting +
reading), against 1 / reading one token (algorithms §4.1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdec.fast import processor
from specdec.search import TreeConfig
from specdec.target import Target

NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Node budgets that are tried for static and dynamic trees, root included."""


@dataclass(frozen=True, order=True)
class Plan:
    """Read the first `nodes` nodes of the drafter's tree, root included, at most `depth` draft tokens deep."""

    nodes: int = 1
    depth: int = 0

    @property
    def off(self) -> bool:
        """Nothing is drafted: plain decoding."""
        return self.depth == 0

    def __str__(self) -> str:
        if self.off:
            return "off"
        return f"{self.nodes} nodes, {self.depth} deep"


OFF = Plan()


def plans(tree: TreeConfig) -> list[Plan]:
    """Off and every part of a tree that could be worth reading, smallest first."""
    found = {OFF}
    for depth in range(1, tree.longest + 1):
        whole = tree.limited(tree.most_nodes, depth)
        budgets = [n for n in NODES if depth < n < whole.most_nodes and tree.kind != "chain"]
        parts = [whole, *(tree.limited(nodes, depth) for nodes in budgets)]
        # The first nodes of a static tree may not reach so deep: that is then a smaller plan, found once.
        found |= {Plan(part.most_nodes, part.longest) for part in parts}
    return sorted(found)


@dataclass(frozen=True)
class Costs:
    """Seconds at one batch size and context. read: of a round of so many nodes, drafting apart; draft: of drafting a
    tree so deep."""

    rows: int
    context: int
    read: dict[int, float]
    draft: dict[int, float]

    def reading(self, nodes: int) -> float:
        """Between measured counts a straight line; never more than a larger count, which one could pad to."""
        known = sorted(self.read)
        above = next((n for n in known if n >= nodes), known[-1])
        below = max((n for n in known if n <= nodes), default=known[0])
        line = self.read[above]
        if below < above:
            line = self.read[below] + (self.read[above] - self.read[below]) * (nodes - below) / (above - below)
        elif nodes > above:
            line = self.read[above] * nodes / above
        return min([line, *(self.read[n] for n in known if n >= nodes)])

    def drafting(self, depth: int) -> float:
        """0 for no depth; past the deepest measured one in proportion."""
        if depth == 0:
            return 0.0
        deepest = max(self.draft)
        return self.draft[depth] if depth in self.draft else self.draft[deepest] * depth / deepest

    def seconds(self, plan: Plan) -> float:
        """Of a whole round."""
        return self.drafting(plan.depth) + self.reading(plan.nodes)

    def speedup(self, plan: Plan, tokens: float) -> float:
        """Over plain decoding, when a round emits so many tokens."""
        return tokens * self.reading(1) / self.seconds(plan)


@dataclass(frozen=True)
class CostTable:
    """Costs at the batch sizes and contexts measured, on the machine that `fingerprint` describes."""

    entries: list[Costs]
    fingerprint: dict[str, Any] = field(default_factory=dict)

    def at(self, rows: int, context: int) -> Costs:
        """The nearest entry, batch size first, both as ratios."""

        def distance(entry: Costs) -> tuple[float, float]:
            return abs(math.log(rows / entry.rows)), abs(math.log(max(1, context) / max(1, entry.context)))

        return min(self.entries, key=distance)

    def save(self, path: Path) -> None:
        entries = [{**asdict(e), "read": list(e.read.items()), "draft": list(e.draft.items())} for e in self.entries]
        path.write_text(json.dumps({"fingerprint": self.fingerprint, "entries": entries}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> CostTable:
        content = json.loads(path.read_text())
        entries = [
            Costs(**{**e, "read": {int(n): s for n, s in e["read"]}, "draft": {int(d): s for d, s in e["draft"]}})
            for e in content["entries"]
        ]
        return cls(entries, content["fingerprint"])


def hardware(target: Target, drafter: Any) -> dict[str, Any]:
    """What measured costs are valid for: the machine, the libraries and the two models."""
    device = target.device
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    config = target.model.config
    return {
        "processor": chip,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "target": [type(target.model).__name__, config.num_hidden_layers, target.width, target.vocab_size],
        "dtype": str(target.model.dtype),
        "fast": target.packed.kind if target.packed else "off",
        "drafter": type(drafter).__name__,
        "tree": asdict(drafter.tree),
    }


class Profile:
    """Mean accepted draft tokens of every part of a tree: accepted[n][d] of its first n nodes, cut to d deep.

    One round tells of smaller parts too: its nodes lie in the order in which they would be dropped, whatever the depth,
    so that a part's nodes are the first n of those that are no deeper than d. A whole static tree or chain holds all of
    its parts; a part that was cut to few nodes may lack some that a shallower part has, and tells nothing of that one.
    A dynamic tree lacks some too, and for those parts even the whole tree's rounds count less than there would be.
    """

    def __init__(self, nodes: int, depth: int) -> None:
        self.hits = [[0.0] * (depth + 1) for _ in range(nodes + 1)]
        self.tries = [[0.0] * (depth + 1) for _ in range(nodes + 1)]

    def add(self, plan: Plan, depths: Sequence[int], path: Sequence[int], memory: float = 1.0) -> None:
        """A round of `plan`: the depth of each node of its tree, and the places of the accepted ones (root left out).

        What is known of the plan and of smaller ones then weighs `memory` of itself.
        """
        whole = plan.nodes == len(self.hits) - 1
        for depth in range(1, plan.depth + 1):
            ranks = [sum(0 <= other <= depth for other in depths[:node]) for node in path[:depth]]
            held = plan.nodes if whole or depth == plan.depth else sum(0 <= other <= depth for other in depths)
            for nodes in range(2, min(plan.nodes, held) + 1):
                self.tries[nodes][depth] = memory * self.tries[nodes][depth] + 1
                accepted = sum(rank < nodes for rank in ranks)
                self.hits[nodes][depth] = memory * self.hits[nodes][depth] + accepted

    def tokens(self, plan: Plan) -> float:
        """Expected tokens of a round, the target's own included; 1 for what was never tried."""
        tries = self.tries[plan.nodes][plan.depth]
        return 1.0 + (self.hits[plan.nodes][plan.depth] / tries if tries else 0.0)


@dataclass(frozen=True)
class Choice:
    """A plan, the tokens a round of it brings, and its speedup over plain decoding, both as expected."""

    plan: Plan
    tokens: float
    speedup: float

    def __str__(self) -> str:
        if self.plan.off:
            return "off"
        return f"{self.plan} ({self.tokens:.2f} tokens a round, {self.speedup:.2f}x)"


def choices(candidates: Sequence[Plan], costs: Costs, profile: Profile) -> list[Choice]:
    """Every plan with what is expected of it, best first; on a tie the smaller plan."""
    found = []
    for plan in candidates:
        tokens = profile.tokens(plan)
        found.append(Choice(plan, tokens, costs.speedup(plan, tokens)))
    return sorted(found, key=lambda choice: (-choice.speedup, choice.plan))
