"""The online controller: the plan that commits most tokens per second, from what was accepted lately.

Falls back to plain decoding where nothing pays, looks again now and then, and recovers (algorithms §4.4). It is kept
between requests: what one taught serves the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.cost import CostTable, Plan, Profile, choices, plans
from specdec.errors import UserError
from specdec.planned import Plannable, Planned


@dataclass(frozen=True)
class AdaptiveConfig:
    """How fast it learns and how often it looks at what it does not use."""

    first: int = 4
    """Rounds with the whole tree before anything is decided."""
    memory: float = 0.98
    """Weight of what is known when a round is added: 0.98 remembers some 50 rounds."""
    explore: int = 40
    """While a plan is in use: rounds between two with the whole tree."""
    longest_pause: int = 256
    """While off: rounds between two looks, doubling from 8 up to this."""
    margin: float = 1.03
    """A plan gives way only to one that is expected to be this many times faster, plain decoding included."""

    def __post_init__(self) -> None:
        if self.first < 1 or self.explore < 2 or self.longest_pause < 8:
            raise UserError("adaptive: first must be 1 or more, explore 2 or more, longest_pause 8 or more")
        if not 0 < self.memory <= 1 or self.margin < 1:
            raise UserError("adaptive: memory must be in (0, 1] and margin 1 or more")


class Controller:
    """Chooses each round's plan. `plan` is the one in use; the whole tree is tried at times to see what else there is.

    While off, a look remembers less of the past, so that a drafter that has become useful is noticed.
    """

    def __init__(self, drafter: Plannable, table: CostTable, config: AdaptiveConfig | None = None) -> None:
        self.config, self.table = config or AdaptiveConfig(), table
        self.candidates = plans(drafter.tree)
        self.whole = max(self.candidates, key=lambda plan: (plan.depth, plan.nodes))
        self.profile = Profile(drafter.tree.most_nodes, drafter.tree.longest)
        self.plan = self.whole
        self._size = (1, 1)
        self._looks = self.config.first
        self._wait, self._pause = 0, 8

    def next(self, rows: int, context: int) -> Plan:
        self._size = (rows, context)
        if self._looks:
            self._looks -= 1
            return self.whole
        if self._wait == 0:
            self._wait = self._pause if self.plan.off else self.config.explore
            if self.plan.off:
                self._pause = min(2 * self._pause, self.config.longest_pause)
            return self.whole
        self._wait -= 1
        return self.plan

    def learn(self, plan: Plan, depths: list[list[int]], paths: list[list[int]]) -> None:
        memory = (0.7 if self.plan.off else self.config.memory) ** (1 / len(paths))
        for row, path in zip(depths, paths, strict=True):
            self.profile.add(plan, row, path, memory)
        if self._looks:
            return
        costs = self.table.at(*self._size)
        best = choices(self.candidates, costs, self.profile)[0]
        if best.speedup < self.config.margin * costs.speedup(self.plan, self.profile.tokens(self.plan)):
            return
        if self.plan.off:
            self._wait = self.config.explore
        elif best.plan.off:
            self._pause = self._wait = 8
        self.plan = best.plan


def adaptive(drafter: Plannable, table: CostTable, config: AdaptiveConfig | None = None) -> Planned:
    """The drafter under an online controller; its tree is the largest that is ever proposed."""
    return Planned(drafter, Controller(drafter, table, config))
