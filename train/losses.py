"""Distances between the target's distribution p and the drafter's q, one value per supervised row.

Names and formulas: algorithms §6.5. Acceptance of a drawn token is α = Σ min(p, q) (Leviathan 2211.17192), so total
variation is exactly 1 - α; the LK hybrid starts as KL and ends as TV as α rises (2602.23881).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import UserError, nearest


@dataclass(frozen=True)
class Total:
    """A sum over rows and how many rows it is over; divided once per step, over all micro-batches and ranks."""

    sum: Tensor
    count: Tensor

    def __add__(self, other: Total) -> Total:
        return Total(self.sum + other.sum, self.count + other.count)

    def mean(self) -> Tensor:
        return self.sum / self.count.clamp(min=1)


def kl(p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) in nats: p [n, V], log_q [n, V] -> [n]."""
    return torch.where(p > 0, p * (p.clamp(min=1e-30).log() - log_q), 0.0).sum(-1)


def total_variation(p: Tensor, log_q: Tensor) -> Tensor:
    """½ Σ |p - q| -> [n]."""
    return 0.5 * (p - log_q.exp()).abs().sum(-1)


def lk_hybrid(p: Tensor, log_q: Tensor) -> Tensor:
    """λ·KL + (1 - λ)·TV with λ = exp(-3α), α taken as a constant -> [n]."""
    variation = total_variation(p, log_q)
    weight = torch.exp(-3.0 * (1.0 - variation.detach()))
    return weight * kl(p, log_q) + (1.0 - weight) * variation


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl,
    "tv": total_variation,
    "lk_hybrid": lk_hybrid,
}


def loss_named(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Raises UserError for a loss that does not exist."""
    if name not in LOSSES:
        raise UserError(f"drafter.objective.loss: '{name}' is not one of {', '.join(LOSSES)}.{nearest(name, LOSSES)}")
    return LOSSES[name]
