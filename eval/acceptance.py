"""Acceptance figures from the rounds of a decode, each with its definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.decode import Round

DEFINITIONS = {
    "tau": "mean tokens emitted per round; the bonus token counts, the first token of the prompt's own reading and "
    "anything after a stop do not",
    "acceptance_rate": "accepted draft tokens / proposed draft tokens",
    "position": "entry k: of the rounds in which draft token k was reached, the share that accepted it",
    "speedup": "seconds of the baseline / seconds with the drafter on the same prompt, both runs in turn; median over "
    "prompts and the middle half",
    "predicted": "tau × t(1) / (t(N) + drafting): the speedup that the measured round times give for this tau; the "
    "prompt's own reading is not in it",
    "plan": "what would have gone fastest on these prompts by the same round times: this tree, a part of it, or off "
    "(plain decoding)",
}


@dataclass(frozen=True)
class Acceptance:
    """tau and rates as defined above; positions [K] conditional, reached [K] the rounds behind each."""

    rounds: int
    tau: float
    acceptance_rate: float
    positions: list[float]
    reached: list[int]


def acceptance(rounds: Sequence[Round]) -> Acceptance:
    """Figures over any number of rounds; NaN where there is none."""
    count = len(rounds)
    proposed = sum(r.proposed for r in rounds)
    depth = max((r.depth for r in rounds), default=0)
    # A stop inside the accepted run ends the round there, and near a limit less is proposed: not reached either way.
    reached = [sum(r.accepted >= k and r.emitted > k and r.depth > k for r in rounds) for k in range(depth)]
    passed = [sum(r.accepted > k for r in rounds) for k in range(depth)]
    return Acceptance(
        rounds=count,
        tau=sum(r.emitted for r in rounds) / count if count else float("nan"),
        acceptance_rate=sum(r.accepted for r in rounds) / proposed if proposed else float("nan"),
        positions=[a / b if b else float("nan") for a, b in zip(passed, reached, strict=True)],
        reached=reached,
    )
