"""Distances between the target's distribution p and the drafter's q, one value per supervised row, and their slopes.

Names and formulas: algorithms §6.5. Acceptance of a drawn token is α = Σ min(p, q) (Leviathan 2211.17192), so total
variation is exactly 1 - α; the LK hybrid starts as KL and ends as TV as α rises (2602.23881). Slopes along the logits
are written down rather than left to autograd: with a few rows at a time nothing of size rows × vocabulary ever leaves
the cache (as the fused cross-entropies of training libraries do).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.errors import UserError, nearest
from specdec.fast import product

Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(p [n, V], log_q [n, V]) -> (value [n], its slope along the logits behind log_q [n, V])."""


@dataclass(frozen=True)
class Total:
    """A sum over rows and how many rows it is over; divided once per step, over all micro-batches and ranks."""

    sum: Tensor
    count: Tensor

    def __add__(self, other: Total) -> Total:
        return Total(self.sum + other.sum, self.count + other.count)

    def mean(self) -> Tensor:
        return self.sum / self.count.clamp(min=1)


def kl(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p ‖ q) in nats; slope q - p."""
    value = torch.special.xlogy(p, p).sum(-1) - (p * log_q).sum(-1)
    return value, log_q.exp().sub_(p)


def total_variation(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """½ Σ |p - q|; slope q ∘ (s - Σ q s) with s = ½ sign(q - p)."""
    q = log_q.exp()
    difference = q - p
    value = 0.5 * difference.abs().sum(-1)
    side = difference.sign_().mul_(0.5)
    return value, side.sub_((q * side).sum(-1, keepdim=True)).mul_(q)


def lk_hybrid(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """λ·KL + (1 - λ)·TV with λ = exp(-3α), α taken as a constant."""
    (one, one_slope), (other, other_slope) = kl(p, log_q), total_variation(p, log_q)
    weight = torch.exp(-3.0 * (1.0 - other))
    slope = one_slope.mul_(weight[:, None]).add_(other_slope.mul_(1.0 - weight[:, None]))
    return weight * one + (1.0 - weight) * other, slope


LOSSES: dict[str, Loss] = {"kl": kl, "tv": total_variation, "lk_hybrid": lk_hybrid}


def loss_named(name: str) -> Loss:
    """Raises UserError for a loss that does not exist."""
    if name not in LOSSES:
        raise UserError(f"drafter.objective.loss: '{name}' is not one of {', '.join(LOSSES)}.{nearest(name, LOSSES)}")
    return LOSSES[name]


CHUNK = 192  # rows: three matrices of that many rows and a few thousand tokens fit a processor's cache


def head_loss(
    hidden: Tensor, head: Tensor, weights: Tensor, teacher: Callable[[slice], Tensor], loss: Loss
) -> tuple[Tensor, Tensor]:
    """Σ weights · loss(teacher, softmax(hidden @ head.T)), and per row whether the likeliest tokens agree.

    hidden [n, D], head [V, D], weights [n]; teacher gives the distribution over V of a slice of rows. The logits of all
    rows are never held at once, neither here nor in the backward pass.
    """
    total, agree = _HeadLoss.apply(hidden, head, weights, teacher, loss)
    return total, agree


class _HeadLoss(torch.autograd.Function):
    """The total is linear in what flows back, so gradients are complete when the forward pass ends."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, weights: Tensor, teacher: Callable[[slice], Tensor], loss: Loss
    ) -> tuple[Tensor, Tensor]:
        to_hidden, to_head = torch.zeros_like(hidden), torch.zeros_like(head)
        agree = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        total = weights.new_zeros(())
        for start in range(0, len(hidden), CHUNK):
            piece = slice(start, start + CHUNK)
            logits = product(hidden[piece], head)
            log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            p = teacher(piece).to(log_q.dtype)
            value, slope = loss(p, log_q)
            total += (value * weights[piece]).sum()
            agree[piece] = log_q.argmax(-1) == p.argmax(-1)
            slope = slope.mul_(weights[piece, None]).to(head.dtype)
            to_hidden[piece] = product(slope, head.t())
            to_head += product(slope.t(), hidden[piece].t())
        ctx.save_for_backward(to_hidden, to_head)
        ctx.mark_non_differentiable(agree)
        return total, agree

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        to_hidden, to_head = ctx.saved_tensors
        return to_hidden * gradient, to_head * gradient, None, None, None
