"""How EAGLE-3 is trained: unrolled as it will be used ("training-time test", 2503.01840 §3.2), with teacher forcing.

Step s predicts with horizon 2 + s. Its attention sees the true features up to its own slot (keys of step 0) and its own
guesses of steps 1..s, exactly the keys that the decoder's cache holds at that moment. The gradient flows through the
unroll.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.batches import Batch
from specdec import fast
from specdec.align import align, any_packed, positions_within, visible_within
from specdec.drafters.eagle import Eagle
from specdec.errors import UserError
from specdec.layers import grouped
from specdec.target import Target
from specdec.vocab import places
from train.horizons import Step, known_weighting, step_of, steps_loss
from train.losses import Total, loss_named


@dataclass(frozen=True)
class EagleObjectiveConfig:
    """conf/drafter/eagle.yaml, `objective`."""

    unroll: int = 3
    """Steps trained; the decoder may go deeper."""
    decay: float = 0.8
    """Step s weighs decay ** s."""
    loss: str = "lk_hybrid"
    """A loss of train/losses.py or a sum of some, e.g. kl, lk_hybrid, 0.1*ce+0.9*tv."""
    weighting: str = "decay"
    """accepted: rows also weigh what their acceptance adds to the accepted length."""
    teacher_power: float = 2.0
    """The teacher's probabilities are raised to this power and normalised: above 1 favours greedy serving."""
    supervise_prompt: bool = False
    """Also learn the target's distribution over the prompt's own positions."""
    feature_noise: float = 0.0
    """Standard deviation of noise on the features, relative to their size."""

    def __post_init__(self) -> None:
        loss_named(self.loss)
        known_weighting(self.weighting)
        if self.unroll < 1:
            raise UserError(f"drafter.objective.unroll must be 1 or more, got {self.unroll}")


class UnrolledAttention:
    """Keys and values of the steps so far. Called once per step with that step's queries, keys and values.

    Step 0 covers all T slots; later steps only the slots [B, M] that are scored at all, since only step-0 keys are
    seen by other slots. visible [B, T, T]: which of those a slot sees; None: all up to its own, where each row is one
    document.
    """

    def __init__(self, slots: Tensor, visible: Tensor | None) -> None:
        self.slots, self.visible = slots, visible
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, H, M, d], key and value [B, G, M, d] -> [B, M, H·d]; M is T at step 0."""
        self.keys.append(key)
        self.values.append(value)
        if len(self.keys) == 1:
            return grouped(query, key, value, self.visible)
        width = query.shape[3]
        query = query.unflatten(1, (key.shape[1], -1)) * width**-0.5  # [B, G, share, M, d]
        count = self.keys[0].shape[2]
        if self.visible is None:
            unseen = torch.arange(count, device=query.device) > self.slots[..., None]
        else:
            unseen = ~self.visible.gather(1, self.slots[..., None].expand(-1, -1, count))
        first = query @ self.keys[0][:, :, None].transpose(-1, -2)
        scores = [first.masked_fill(unseen[:, None, None], -torch.inf)]
        scores += [(query * own[:, :, None]).sum(-1, keepdim=True) for own in self.keys[1:]]
        weights = torch.cat(scores, -1).softmax(-1)
        out = weights[..., :count] @ self.values[0][:, :, None]
        for step, own in enumerate(self.values[1:]):
            out = out + weights[..., count + step, None] * own[:, :, None]
        return out.flatten(1, 2).transpose(1, 2).flatten(2)


class EagleObjective:
    """(drafter, batch) -> {'loss': Total, …} and what train/horizons.py measures."""

    def __init__(self, config: EagleObjectiveConfig, drafter: Eagle, target: Target) -> None:
        self.config = config
        self.loss = loss_named(config.loss)
        self.teacher_head = target.head_rows(drafter.draft_ids).detach()
        self.place = places(drafter.draft_ids, target.vocab_size)
        self.horizon = 2

    def __call__(self, drafter: nn.Module, batch: Batch) -> dict[str, Total]:
        assert isinstance(drafter, Eagle)
        own, final = batch.features[:, :, :-1], batch.features[:, :, -1]
        steps = self._unroll(drafter, batch, own, final)
        return steps_loss([(steps, drafter.lm_head.weight)], self._teacher, self.loss, self.config.weighting)

    def _unroll(self, drafter: Eagle, batch: Batch, own: Tensor, final: Tensor) -> list[Step]:
        if self.config.feature_noise:
            generator = torch.Generator(own.device).manual_seed(batch.number)
            noise = torch.randn(own.shape, dtype=own.dtype, device=own.device, generator=generator)
            own = own + noise * own.std(-1, keepdim=True) * self.config.feature_noise
        slots, taught = [], []
        for step in range(self.config.unroll):
            slot = align(batch.tokens, batch.loss_mask, batch.documents, final, self.horizon + step)
            slots.append(slot)
            taught.append(slot.scored & (self.place[slot.labels] >= 0))
        used = used_slots(taught)
        position = positions_within(batch.documents)
        attend = UnrolledAttention(used, visible_within(batch.documents) if any_packed(batch.documents) else None)
        normed, hidden = drafter.step(slots[0].inputs, drafter.fuse(own), position, attend)
        steps = [step_of(normed[taught[0]], slots[0], taught[0], self.place, 1.0)]
        hidden = hidden.gather(1, used[..., None].expand(-1, -1, hidden.shape[2]))
        for step in range(1, self.config.unroll):
            inputs = slots[step].inputs.gather(1, used)
            normed, hidden = drafter.step(inputs, hidden, position.gather(1, used) + step, attend)
            rows = _scatter(normed, used, taught[step].shape[1])[taught[step]]
            steps.append(step_of(rows, slots[step], taught[step], self.place, self.config.decay**step))
        return steps

    @torch.no_grad()
    def _teacher(self, final: Tensor, _: Tensor) -> Tensor:
        """Target distribution over the draft vocabulary, normalised there and sharpened: [n, D] -> [n, Vd]."""
        logits = fast.product(final, self.teacher_head)
        return (self.config.teacher_power * logits.to(torch.promote_types(logits.dtype, torch.float32))).softmax(-1)


Config, Objective = EagleObjectiveConfig, EagleObjective  # the names the pipeline looks for


def used_slots(taught: list[Tensor]) -> Tensor:
    """[B, M]: slots that are taught at any step, ascending; shorter rows repeat slots that are not."""
    used = torch.stack(taught).any(0)
    width = max(1, int(used.sum(1).max()))
    return used.int().argsort(dim=1, descending=True, stable=True)[:, :width]


def _scatter(values: Tensor, slots: Tensor, count: int) -> Tensor:
    """values [B, M, D] to their slots in [B, count, D]; the rest is zero."""
    out = values.new_zeros(values.shape[0], count, values.shape[2])
    return out.scatter(1, slots[..., None].expand_as(values), values)
