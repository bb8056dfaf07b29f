"""How EAGLE is trained: unrolled as it will be used ("training-time test", 2503.01840 §3.2), with teacher forcing.

Step s predicts with horizon 2 + s; its attention is train/unrolled.py. Generation 3 learns the target's law alone, and
the gradient flows through the unroll. Generation 1 also learns the target's next final state: as in EAGLE-1 with one
step, as in HASS (2408.15766 §3) with several, no gradient between them and the teacher's likeliest tokens once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data.batches import Batch
from specdec.align import align, any_packed, positions_within, starts_within
from specdec.drafters.eagle import Eagle
from specdec.eagle_network import Attend
from specdec.errors import UserError
from specdec.target import Target
from specdec.vocab import places
from train.horizons import Step, known_weighting, step_of, steps_loss
from train.losses import Total, loss_named
from train.teacher import known_teacher, law
from train.unrolled import UnrolledAttention

NOISES = ("gaussian", "uniform")
HEAVY = 1 << 26
"""Numbers that a step holds for its backward pass from which on it is run twice instead."""


@dataclass(frozen=True)
class EagleObjectiveConfig:
    """conf/drafter/eagle.yaml, eagle1.yaml and hass.yaml, `objective`."""

    unroll: int = 3
    """Steps trained; the decoder may go deeper."""
    decay: float = 0.8
    """Step s weighs decay ** s."""
    loss: str = "lk_hybrid"
    """A loss of train/losses.py or a sum of some, e.g. kl, lk_hybrid, 0.1*kl, 0.1*kl+top:10."""
    feature_weight: float = 1.0
    """Generation 1: weight of the distance to the target's next final state (smooth L1, its mean over the width)."""
    detach: bool = False
    """No gradient from a step into the one before it."""
    weighting: str = "decay"
    """accepted: rows also weigh what their acceptance adds to the accepted length."""
    teacher_power: float = 2.0
    """The teacher's probabilities are raised to this power and normalised: above 1 favours greedy serving."""
    supervise_prompt: bool = False
    """Also learn the target's distribution over the prompt's own positions."""
    feature_noise: float = 0.0
    """Noise on the true features."""
    feature_noise_kind: str = "gaussian"
    """gaussian: feature_noise is a standard deviation, relative to a feature's own; uniform: from -feature_noise to
    feature_noise as they are, times 512 / tokens of the row (EAGLE-1, with 0.1)."""

    def __post_init__(self) -> None:
        loss_named(self.loss)
        known_weighting(self.weighting)
        known_teacher("soft", self.teacher_power)
        if self.unroll < 1:
            raise UserError(f"drafter.objective.unroll must be 1 or more, got {self.unroll}")
        if not 0 <= self.feature_weight < torch.inf or not 0 <= self.feature_noise < torch.inf:
            raise UserError("drafter.objective.feature_weight and drafter.objective.feature_noise must be 0 or more")
        if self.feature_noise_kind not in NOISES:
            known = ", ".join(NOISES)
            raise UserError(f"drafter.objective.feature_noise_kind: '{self.feature_noise_kind}' is not one of {known}")


class EagleObjective:
    """(drafter, batch) -> {'loss': Total, …} and what train/horizons.py measures; of generation 1 also 'feature'."""

    def __init__(self, config: EagleObjectiveConfig, drafter: Eagle, target: Target) -> None:
        self.config = config
        self.loss = loss_named(config.loss)
        self.teacher_head = target.head_rows(drafter.draft_ids).detach()
        self.place = places(drafter.draft_ids, target.vocab_size)
        self.horizon = 2

    def __call__(self, drafter: nn.Module, batch: Batch) -> dict[str, Total]:
        assert isinstance(drafter, Eagle)
        steps = self._unroll(drafter, batch)
        totals = steps_loss([(steps, drafter.lm_head.weight)], self._teacher, self.loss, self.config.weighting)
        if drafter.shape.generation == 1:
            loss, distance = totals["loss"], _feature_distance(steps)
            totals["loss"] = Total(loss.sum + self.config.feature_weight * distance, loss.count)
            totals["feature"] = Total(distance.detach(), loss.count)
        return totals

    def _unroll(self, drafter: Eagle, batch: Batch) -> list[Step]:
        final = batch.features[:, :, -1]
        slots, taught = [], []
        for step in range(self.config.unroll):
            slot = align(batch.tokens, batch.loss_mask, batch.documents, final, self.horizon + step)
            slots.append(slot)
            taught.append(slot.scored & (self.place[slot.labels] >= 0))
        used = used_slots(taught)
        position = positions_within(batch.documents)
        attend = UnrolledAttention(used, starts_within(batch.documents) if any_packed(batch.documents) else None)
        fused = drafter.fuse(self._noisy(batch.features[:, :, : len(drafter.taps)], batch.number))
        rows, hidden = _step(drafter, slots[0].inputs, fused, position, attend.of(0))
        steps = [step_of(rows[taught[0]], slots[0], taught[0], self.place, 1.0)]
        hidden = hidden.gather(1, used[..., None].expand(-1, -1, hidden.shape[2]))
        for step in range(1, self.config.unroll):
            inputs = slots[step].inputs.gather(1, used)
            hidden = hidden.detach() if self.config.detach else hidden
            rows, hidden = _step(drafter, inputs, hidden, position.gather(1, used) + step, attend.of(step))
            rows = _scatter(rows, used, taught[step].shape[1])[taught[step]]
            steps.append(step_of(rows, slots[step], taught[step], self.place, self.config.decay**step))
        return steps

    def _noisy(self, features: Tensor, number: int) -> Tensor:
        """The true features [B, T, S, D] with the noise of batch `number`."""
        size = self.config.feature_noise
        if not size:
            return features
        generator = torch.Generator(features.device).manual_seed(number)
        noise = torch.empty_like(features)
        if self.config.feature_noise_kind == "uniform":
            return features + noise.uniform_(-1, 1, generator=generator) * size * 512 / features.shape[1]
        return features + noise.normal_(generator=generator) * features.std(-1, keepdim=True) * size

    def _teacher(self, final: Tensor, label: Tensor) -> Tensor:
        return law(final, label, self.teacher_head, "soft", self.config.teacher_power)


Config, Objective = EagleObjectiveConfig, EagleObjective  # the names the pipeline looks for


def _step(drafter: Eagle, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
    """drafter.step(); of long rows what it held is not kept but computed once more in the backward pass."""
    shape = drafter.shape
    if tokens.numel() * (16 * shape.hidden_size + 4 * shape.intermediate_size) < HEAVY:
        return drafter.step(tokens, hidden, positions, attend)
    return checkpoint(drafter.step, tokens, hidden, positions, attend, use_reentrant=False, preserve_rng_state=False)


def _feature_distance(steps: list[Step]) -> Tensor:
    """Σ share · smooth L1 between the rows, taken as guesses of the state that scores their label, and that state."""
    distances = []
    for step in steps:
        wide = torch.promote_types(step.rows.dtype, torch.float32)
        guess, true = step.rows.to(wide), step.final.detach().to(wide)  # a target that is tuned must not come closer
        distances.append(step.share * nn.functional.smooth_l1_loss(guess, true, reduction="none").mean(-1).sum())
    return torch.stack(distances).sum()


def used_slots(taught: list[Tensor]) -> Tensor:
    """[B, M]: slots that are taught at any step, ascending; shorter rows repeat slots that are not."""
    used = torch.stack(taught).any(0)
    width = max(1, int(used.sum(1).max()))
    return used.int().argsort(dim=1, descending=True, stable=True)[:, :width]


def _scatter(values: Tensor, slots: Tensor, count: int) -> Tensor:
    """values [B, M, D] to their slots in [B, count, D]; the rest is zero."""
    out = values.new_zeros(values.shape[0], count, values.shape[2])
    return out.scatter(1, slots[..., None].expand_as(values), values)
