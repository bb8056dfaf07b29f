"""What objectives that predict several tokens ahead from one slot share: their loss, and what is measured beside it.

A step is one horizon: the rows its output matrix reads, and what they are held against. Slots whose label the drafter
cannot propose teach it nothing (EAGLE-3 drops these rows as well), but count as wrong in everything measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.align import Slots
from specdec.errors import UserError
from train.losses import Loss, Total, accepted_weights, head_loss, overlaps

WEIGHTINGS = ("decay", "accepted")


def known_weighting(name: str) -> None:
    """Raises UserError for one that does not exist."""
    if name not in WEIGHTINGS:
        raise UserError(f"drafter.objective.weighting: '{name}' is not one of {', '.join(WEIGHTINGS)}")


@dataclass(frozen=True)
class Step:
    """Predictions of one horizon.

    rows [n, D]: what the output matrix reads at the taught slots, in their order. final [n, D]: the target's state that
    scores each label. labels [n]: each label's place in the draft vocabulary. scored [B, T]: slots that are supervised;
    taught [B, T]: those of them that are learned. share: weight of a row.
    """

    rows: Tensor
    final: Tensor
    labels: Tensor
    scored: Tensor
    taught: Tensor
    share: float


def step_of(rows: Tensor, slots: Slots, taught: Tensor, place: Tensor, share: float) -> Step:
    """place [V]: each token's place in the draft vocabulary. rows are those of the taught slots."""
    return Step(rows, slots.teacher[taught], place[slots.labels[taught]], slots.scored, taught, share)


def steps_loss(
    groups: Sequence[tuple[Sequence[Step], Tensor]],
    teacher: Callable[[Tensor, Tensor], Tensor],
    loss: Loss,
    weighting: str = "decay",
) -> dict[str, Total]:
    """'loss' and the measures of all steps.

    groups: steps that share an output matrix [Vd, D], the first step first. teacher: (final [n, D], labels [n]) -> the
    law to learn [n, Vd]. weighting: decay, each row its step's share; accepted, what its acceptance adds to the
    accepted length besides.
    """
    steps = [step for some, _ in groups for step in some]
    wide = torch.promote_types(steps[0].rows.dtype, torch.float32)
    weights = [torch.full((len(step.rows),), step.share, dtype=wide, device=step.rows.device) for step in steps]
    if weighting == "accepted":
        alphas = [
            overlaps(step.rows, head, _slices(teacher, step.final, step.labels))
            for some, head in groups
            for step in some
        ]
        every = accepted_weights(_grid(steps, alphas).flatten(0, 1)).view(*steps[0].taught.shape, -1)
        weights = [
            own * every[..., i][step.taught].to(wide) for i, (own, step) in enumerate(zip(weights, steps, strict=True))
        ]
    total, agrees, shared, at = torch.zeros((), dtype=wide, device=steps[0].rows.device), [], [], 0
    for some, head in groups:
        final, labels = torch.cat([step.final for step in some]), torch.cat([step.labels for step in some])
        own = torch.cat(weights[at : at + len(some)])
        rows = torch.cat([step.rows for step in some])
        graded = head_loss(rows, head, own, labels, _slices(teacher, final, labels), loss)
        counts = [len(step.rows) for step in some]
        total = total + graded.total
        agrees += graded.agree.split(counts)
        shared += graded.overlap.split(counts)
        at += len(some)
    count = sum(len(step.rows) * step.share for step in steps)
    return {"loss": Total(total, _number(count, total)), **measured(steps, agrees, shared)}


def _slices(teacher: Callable[[Tensor, Tensor], Tensor], final: Tensor, labels: Tensor) -> Callable[[slice], Tensor]:
    return lambda piece: teacher(final[piece], labels[piece])


def measured(steps: Sequence[Step], agrees: Sequence[Tensor], shared: Sequence[Tensor]) -> dict[str, Total]:
    """accept_s: likeliest token the teacher's; expected_s: Σ min(p, q); tau: tokens of a round that begins at a slot,
    the first wrong step ends it, the target's own token counted; coverage: labels in the draft vocabulary.

    Teacher-forced, over all supervised slots; labels outside the vocabulary count as wrong.
    """
    totals: dict[str, Total] = {}
    for number, (step, agree, overlap) in enumerate(zip(steps, agrees, shared, strict=True), 1):
        count = _number(step.scored.sum(), overlap)
        totals[f"accept_{number}"] = Total(agree.sum().to(overlap.dtype), count)
        totals[f"expected_{number}"] = Total(overlap.sum(), count)
    right = _grid(steps, [agree.to(shared[0].dtype) for agree in agrees])
    starts = steps[0].scored
    totals["tau"] = Total((1 + right.cumprod(-1).sum(-1))[starts].sum(), _number(starts.sum(), right))
    scored, taught = (
        sum(int(mask.sum()) for mask in masks) for masks in zip(*((s.scored, s.taught) for s in steps), strict=True)
    )
    totals["coverage"] = Total(_number(taught, right), _number(scored, right))
    return totals


def _grid(steps: Sequence[Step], values: Sequence[Tensor]) -> Tensor:
    """Values of each step's taught slots as [B, T, S]; zero elsewhere."""
    grid = values[0].new_zeros(*steps[0].taught.shape, len(steps))
    for index, (step, value) in enumerate(zip(steps, values, strict=True)):
        grid[..., index][step.taught] = value
    return grid


def _number(value: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=like.device)
