"""A drafter whose plan may change from round to round, and the measurement of what plans cost.

Exact whatever the planner decides: a plan is fixed before the round's first draft token is known, from what earlier
rounds accepted (algorithms §4.2).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from specdec.cost import OFF, Costs, CostTable, Plan, hardware, plans
from specdec.decode import stream
from specdec.drafter import Context, Drafter
from specdec.drafters.none import Plain
from specdec.sampling import Sampling
from specdec.search import TreeConfig
from specdec.stopping import Limits
from specdec.target import Tap, Target
from specdec.tree import PAD, TokenTree


class Plannable(Drafter, Protocol):
    """A drafter that proposes what its `tree` says, which may change between rounds down from what it was at reset."""

    tree: TreeConfig


class Planner(Protocol):
    """Decides what each round proposes."""

    def next(self, rows: int, context: int) -> Plan:
        """The plan of the coming round: rows in the batch, longest text."""
        ...

    def learn(self, plan: Plan, depths: list[list[int]], paths: list[list[int]]) -> None:
        """What became of the last round: each row's tree, as depths of its nodes, and the nodes accepted."""
        ...


class Planned:
    """`drafter` under `planner`. While the plan is off the drafter is not called; the features it misses are kept for
    it."""

    def __init__(self, drafter: Plannable, planner: Planner) -> None:
        self.drafter, self.planner = drafter, planner
        self.taps: tuple[Tap, ...] = drafter.taps
        self.tree = drafter.tree  # the largest there is
        self._held: list[tuple[Tensor, Tensor]] = []
        self._last: tuple[Plan, TokenTree, Tensor] | None = None

    @property
    def nodes(self) -> int:
        return self.tree.most_nodes

    def reset(self, rows: int, capacity: int) -> None:
        self._held, self._last = [], None
        self.drafter.tree = self.tree
        self.drafter.reset(rows, capacity)

    def renew(self, rows: Tensor) -> None:
        for _, counts in self._held:
            counts[rows] = 0
        self._last = None  # one round goes unlearned
        self.drafter.renew(rows)

    def select(self, rows: Tensor) -> None:
        self._held = [(features[rows], counts[rows]) for features, counts in self._held]
        if self._last is not None:
            plan, tree, lengths = self._last
            self._last = plan, TokenTree(tree.tokens[rows], tree.parents[rows]), lengths[rows]
        self.drafter.select(rows)

    def propose(self, context: Context, sampling: Sampling, generator: torch.Generator | None) -> TokenTree:
        lengths = context.lengths.tolist()
        if self._last is not None and self._last[0].depth:
            plan, tree, _ = self._last
            depths = tree.depths().masked_fill(tree.parents == PAD, -1).tolist()
            self.planner.learn(plan, depths, self._accepted(context))
        if context.features is not None:
            self._held.append((context.features, context.counts.clone()))
            if len(self._held) > 8:  # padded to the longest of each round: put together they are less
                whole = self._whole(context)
                self._held = [(cast(Tensor, whole.features), whole.counts)]
        plan = self.planner.next(len(lengths), max(lengths))
        if plan.off:
            self._last = OFF, TokenTree.chain(context.pending()[:, None]), context.lengths
            return self._last[1]
        self.drafter.tree = self.tree.limited(plan.nodes, plan.depth)
        tree = self.drafter.propose(self._whole(context), sampling, generator)
        self.drafter.tree = self.tree
        self._held = []
        self._last = plan, tree, context.lengths
        return tree

    def _accepted(self, context: Context) -> list[list[int]]:
        """The nodes of the last tree along each row's text since; the last token of a round is the target's own."""
        assert self._last is not None
        _, tree, before = self._last
        found = []
        for tokens, parents, text, first, length in zip(
            tree.tokens.tolist(),
            tree.parents.tolist(),
            context.tokens.tolist(),
            before.tolist(),
            context.lengths.tolist(),
            strict=True,
        ):
            path, at = [], 0
            for token in text[first : length - 1]:
                at = next(n for n in range(at + 1, len(tokens)) if parents[n] == at and tokens[n] == token)
                path.append(at)
            found.append(path)
        return found

    def _whole(self, context: Context) -> Context:
        """The context with all features since the drafter was last called."""
        if len(self._held) < 2:
            return context
        counts = torch.stack([counts for _, counts in self._held]).sum(0)
        first = self._held[0][0]
        rows = torch.arange(len(counts), device=counts.device)[:, None]
        room = sum(features.shape[1] for features, _ in self._held)
        whole = first.new_zeros(first.shape[0], room, *first.shape[2:])
        start = torch.zeros_like(counts)
        for features, some in self._held:  # right-padded pieces: the next one overwrites what lies past the count
            whole[rows, start[:, None] + torch.arange(features.shape[1], device=counts.device)] = features
            start = start + some
        return dataclasses.replace(context, features=whole[:, : int(counts.max())], counts=counts)


class _Rota:
    """Every plan in turn, BLOCK rounds each: what else the machine does falls on all alike, and what a change of shape
    costs (the first round of a block) on none."""

    def __init__(self, rota: Sequence[Plan]) -> None:
        self.rota, self.turn = rota, 0

    def at(self, turn: int) -> Plan:
        return self.rota[turn // BLOCK % len(self.rota)]

    def next(self, rows: int, context: int) -> Plan:  # noqa: ARG002
        self.turn += 1
        return self.at(self.turn - 1)

    def learn(self, plan: Plan, depths: list[list[int]], paths: list[list[int]]) -> None:
        """Only time is of interest."""


BLOCK = 4


def rota_of(tree: TreeConfig) -> list[Plan]:
    """Plans that have every node count and every depth of a tree's plans among them: reading depends on the one,
    drafting on the other."""
    sizes = [plan for plan in plans(tree) if not plan.off]
    rota: list[Plan] = []
    left = {plan.depth for plan in sizes}
    for nodes in sorted({plan.nodes for plan in sizes}):
        fitting = [plan for plan in sizes if plan.nodes == nodes]
        rota.append(max([plan for plan in fitting if plan.depth in left] or fitting))
        left.discard(rota[-1].depth)
    return rota + [max(plan for plan in sizes if plan.depth == depth) for depth in sorted(left)]


def measure(
    target: Target, drafter: Plannable, text: Sequence[int], rows: Sequence[int] = (1,), passes: int = 3
) -> CostTable:
    """Time rounds of every size, and plain ones, by decoding after `text` at each batch size; seconds are medians.

    The drafter's tree is the largest plan. Takes about 5 s for the demo on two cores.
    """
    rota = rota_of(drafter.tree)
    text = text[: max(1, target.window // 2)]  # rounds need room behind it
    entries = []
    for count in rows:
        read: dict[int, list[float]] = defaultdict(list)
        draft: dict[int, list[float]] = defaultdict(list)
        for _ in range(passes):
            for turn, (_, seconds) in enumerate(_rounds(target, Plain(), text, count, 4 * BLOCK)):
                if turn >= BLOCK:
                    read[1].append(seconds)
            planner = _Rota(rota)
            planned = Planned(drafter, planner)
            try:
                for turn, (drafting, reading) in enumerate(_rounds(target, planned, text, count, BLOCK * len(rota))):
                    if turn % BLOCK:
                        read[planner.at(turn).nodes].append(reading)
                        draft[planner.at(turn).depth].append(drafting)
            finally:
                drafter.tree = planned.tree
        medians = [{key: statistics.median(values) for key, values in sorted(d.items())} for d in (read, draft)]
        entries.append(Costs(count, len(text), medians[0], medians[1]))
    return CostTable(entries, hardware(target, drafter))


def _rounds(
    target: Target, drafter: Drafter, text: Sequence[int], rows: int, rounds: int
) -> Iterator[tuple[float, float]]:
    """Drafting and reading seconds of the first `rounds` rounds."""
    limits = Limits(max(2, min(target.window - len(text) - 1, rounds * drafter.nodes)))
    seen = 0
    for step in stream(target, drafter, [list(text)] * rows, limits):
        if step.row == 0 and step.round is not None and seen < rounds:
            seen += 1
            yield step.round.draft_seconds, step.round.read_seconds
        if seen == rounds:
            return
