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

Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(p [n, V], log_q [n, V], label [n]) -> (value [n], its slope along the logits behind log_q [n, V]).

label: the text's own token as a column, -1 where it has none.
"""


@dataclass(frozen=True)
class Total:
    """A sum over rows and how many rows it is over; divided once per step, over all micro-batches and ranks."""

    sum: Tensor
    count: Tensor

    def __add__(self, other: Total) -> Total:
        return Total(self.sum + other.sum, self.count + other.count)

    def mean(self) -> Tensor:
        return self.sum / self.count.clamp(min=1)


def kl(p: Tensor, log_q: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p ‖ q) in nats; slope q - p."""
    value = torch.special.xlogy(p, p).sum(-1) - (p * log_q).sum(-1)
    return value, log_q.exp().sub_(p)


def reverse_kl(p: Tensor, log_q: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q ‖ p) in nats, log p no lower than that of fp32's smallest normal number; slope q ∘ (r - Σ q r), r the log
    ratio."""
    q, ratio = log_q.exp(), log_q - p.clamp(min=torch.finfo(torch.float32).tiny).log()
    value = (q * ratio).sum(-1)
    return value, ratio.sub_(value[:, None]).mul_(q)


def jsd(beta: float) -> Loss:
    """Generalised Jensen-Shannon β·KL(p ‖ m) + (1 - β)·KL(q ‖ m), m = βp + (1 - β)q (GKD 2306.13649 §2)."""

    def loss(p: Tensor, log_q: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        q = log_q.exp()
        log_m = (beta * p + (1 - beta) * q).clamp(min=torch.finfo(torch.float32).tiny).log()
        ratio = log_q - log_m
        own = (q * ratio).sum(-1)
        value = beta * (torch.special.xlogy(p, p) - p * log_m).sum(-1) + (1 - beta) * own
        # What m's own change brings cancels: Σ (βp/m + (1 - β)q/m) dm = Σ dm = (1 - β) Σ dq = 0.
        return value, ratio.sub_(own[:, None]).mul_(q).mul_(1 - beta)

    return loss


def total_variation(p: Tensor, log_q: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """½ Σ |p - q|; slope q ∘ (s - Σ q s) with s = ½ sign(q - p)."""
    q = log_q.exp()
    difference = q - p
    value = 0.5 * difference.abs().sum(-1)
    side = difference.sign_().mul_(0.5)
    return value, side.sub_((q * side).sum(-1, keepdim=True)).mul_(q)


def log_acceptance(p: Tensor, log_q: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """-log α with α = Σ min(p, q) = 1 - TV: total variation's slope over α (2602.23881)."""
    distance, slope = total_variation(p, log_q, label)
    alpha = (1.0 - distance).clamp(min=1e-6)
    return -alpha.log(), slope.div_(alpha[:, None])


def lk_hybrid(p: Tensor, log_q: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """λ·KL + (1 - λ)·TV with λ = exp(-3α), α taken as a constant."""
    (one, one_slope), (other, other_slope) = kl(p, log_q, label), total_variation(p, log_q, label)
    weight = torch.exp(-3.0 * (1.0 - other))
    slope = one_slope.mul_(weight[:, None]).add_(other_slope.mul_(1.0 - weight[:, None]))
    return weight * one + (1.0 - weight) * other, slope


def cross_entropy(_: Tensor, log_q: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """-log q(label), the token of the text (sequence-level distillation); nothing where it has no column."""
    known, at = label >= 0, label.clamp(min=0)[:, None]
    slope = log_q.exp().scatter_add_(-1, at, -torch.ones_like(log_q[:, :1]))
    return -log_q.gather(-1, at)[:, 0] * known, slope.mul_(known[:, None])


def top_cross_entropy(count: int) -> Loss:
    """-Σ p log q over the teacher's `count` likeliest tokens (HASS 2408.15766 §3.1); slope q·Σp - p over those."""

    def loss(p: Tensor, log_q: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        top = p.topk(min(count, p.shape[-1]), -1)
        value = -(top.values * log_q.gather(-1, top.indices)).sum(-1)
        slope = log_q.exp().mul_(top.values.sum(-1, keepdim=True))
        return value, slope.scatter_add_(-1, top.indices, -top.values)

    return loss


LOSSES: dict[str, Loss] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "log_acceptance": log_acceptance,
    "lk_hybrid": lk_hybrid,
    "ce": cross_entropy,
}
WITH_NUMBER: dict[str, Callable[[float], Loss]] = {"jsd": jsd, "top": lambda count: top_cross_entropy(int(count))}
"""Those that take a number: jsd:0.5 (β) and top:10 (tokens)."""


def loss_named(text: str) -> Loss:
    """A loss, or a weighted sum of some: 'kl', 'jsd:0.5', '0.1*ce+0.9*tv'. Raises UserError for what is none."""
    terms = [_term(part.strip(), text) for part in str(text).split("+")]
    if len(terms) == 1 and terms[0][0] == 1.0:
        return terms[0][1]

    def mixed(p: Tensor, log_q: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        (weight, first), *others = terms
        value, slope = first(p, log_q, label)
        value, slope = weight * value, slope.mul_(weight)
        for weight, loss in others:
            one, one_slope = loss(p, log_q, label)
            value, slope = value + weight * one, slope.add_(one_slope, alpha=weight)
        return value, slope

    return mixed


def _term(part: str, text: str) -> tuple[float, Loss]:
    factor, _, rest = part.rpartition("*")
    name, _, number = rest.partition(":")
    known = [*LOSSES, *WITH_NUMBER]
    where = f"drafter.objective.loss: {text!r}" if part != text else "drafter.objective.loss"
    if name not in known:
        raise UserError(f"{where}: '{name}' is not one of {', '.join(known)}.{nearest(name, known)}")
    try:
        weight = float(factor or 1.0)
        value = float(number) if number else None
    except ValueError:
        raise UserError(f"{where}: '{factor or number}' is not a number; e.g. 0.1*ce+0.9*tv or jsd:0.5") from None
    if not 0 < weight < torch.inf:
        raise UserError(f"{where}: weights must be above 0")
    if (value is not None) != (name in WITH_NUMBER):
        raise UserError(f"{where}: {name} takes {'a number, e.g. jsd:0.5 or top:10' if value is None else 'no number'}")
    if value is None:
        return weight, LOSSES[name]
    if (name == "jsd" and not 0 < value < 1) or (name == "top" and (value < 1 or value != int(value))):
        raise UserError(f"{where}: jsd takes a number between 0 and 1, top a whole number from 1")
    return weight, WITH_NUMBER[name](value)


def accepted_weights(alphas: Tensor) -> Tensor:
    """How much each step's acceptance matters to the accepted length: alphas [n, S] -> [n, S], without gradient.

    E[accepted] = Σ_j Π_{i≤j} α_i; its slope along α_m is Π_{i<m} α_i · S_m with S_m = 1 + α_{m+1} S_{m+1}.
    Divided by S, so that perfect steps weigh (S - m) / S (algorithms §6.5, "W_m surrogate").
    """
    alphas = alphas.detach()
    before = torch.cat([torch.ones_like(alphas[:, :1]), alphas], 1).cumprod(1)
    after = torch.ones_like(alphas)
    for step in range(alphas.shape[1] - 2, -1, -1):
        after[:, step] = 1.0 + alphas[:, step + 1] * after[:, step + 1]
    return before[:, : alphas.shape[1]] * after / alphas.shape[1]


CHUNK = 192  # rows: three matrices of that many rows and a few thousand tokens fit a processor's cache


@dataclass(frozen=True)
class Graded:
    """total: Σ weights · loss. Per row, without gradient: agree [n], whether the likeliest tokens are the same; overlap
    [n], Σ min(p, q)."""

    total: Tensor
    agree: Tensor
    overlap: Tensor


def head_loss(
    hidden: Tensor,
    head: Tensor,
    weights: Tensor,
    labels: Tensor,
    teacher: Callable[[slice], Tensor],
    loss: Loss,
) -> Graded:
    """Σ weights · loss(teacher, softmax(hidden @ head.T), labels).

    hidden [n, D], head [V, D], weights [n], labels [n]; teacher gives the distribution over V of a slice of rows. The
    logits of all rows are never held at once, neither here nor in the backward pass.
    """
    return Graded(*_HeadLoss.apply(hidden, head, weights, labels, teacher, loss))


@torch.no_grad()
def overlaps(hidden: Tensor, head: Tensor, teacher: Callable[[slice], Tensor]) -> Tensor:
    """Σ min(p, q) of each row: [n, D], [V, D] -> [n]."""
    found = []
    for start in range(0, len(hidden), CHUNK):
        piece = slice(start, start + CHUNK)
        logits = product(hidden[piece], head)
        q = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        found.append(torch.minimum(teacher(piece).to(q.dtype), q).sum(-1))
    return torch.cat(found) if found else hidden.new_zeros(0)


class _HeadLoss(torch.autograd.Function):
    """The total is linear in what flows back, so gradients are complete when the forward pass ends."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        weights: Tensor,
        labels: Tensor,
        teacher: Callable[[slice], Tensor],
        loss: Loss,
    ) -> tuple[Tensor, Tensor, Tensor]:
        to_hidden = torch.zeros_like(hidden)
        to_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        agree = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        overlap = torch.zeros_like(weights)
        total = weights.new_zeros(())
        for start in range(0, len(hidden), CHUNK):
            piece = slice(start, start + CHUNK)
            logits = product(hidden[piece], head)
            log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            p = teacher(piece).to(log_q.dtype)
            agree[piece] = log_q.argmax(-1) == p.argmax(-1)
            overlap[piece] = torch.minimum(p, log_q.exp()).sum(-1)
            value, slope = loss(p, log_q, labels[piece])
            total += (value * weights[piece]).sum()
            slope = slope.mul_(weights[piece, None]).to(head.dtype)
            to_hidden[piece] = product(slope, head.t())
            if to_head is not None:
                to_head += product(slope.t(), hidden[piece].t())
        ctx.save_for_backward(to_hidden, to_head)
        ctx.mark_non_differentiable(agree, overlap)
        return total, agree, overlap

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_head = ctx.saved_tensors
        return to_hidden * gradient, None if to_head is None else to_head * gradient, None, None, None, None
