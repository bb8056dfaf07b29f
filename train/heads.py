"""How heads on the target's final state are trained, Medusa's and Hydra's: each against the target's own law of the
token it guesses, or against the token itself; head k counts decay ** k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from data.batches import Batch
from specdec.align import align
from specdec.errors import UserError
from specdec.heads import Heads
from specdec.target import Target
from specdec.vocab import places
from train.horizons import known_weighting, step_of, steps_loss
from train.losses import Total, loss_named
from train.teacher import known_teacher, law


@dataclass(frozen=True)
class HeadsObjectiveConfig:
    """conf/drafter/medusa.yaml and hydra.yaml, `objective`."""

    decay: float = 0.8
    """Head k weighs decay ** k (Medusa's λ_k)."""
    loss: str = "kl"
    """A loss of train/losses.py or a sum of some, e.g. kl, lk_hybrid, 0.1*ce+0.9*tv."""
    weighting: str = "decay"
    """accepted: rows also weigh what their acceptance adds to the accepted length."""
    teacher: str = "soft"
    """soft: the target's distribution; hard: the token of the text (then kl is the papers' cross-entropy)."""
    teacher_power: float = 1.0
    """soft: the teacher's probabilities are raised to this power and normalised."""
    supervise_prompt: bool = False
    """Also learn over the prompt's own positions."""

    def __post_init__(self) -> None:
        loss_named(self.loss)
        known_weighting(self.weighting)
        known_teacher(self.teacher, self.teacher_power)
        if not self.decay > 0:
            raise UserError(f"drafter.objective.decay must be above 0, got {self.decay}")


class HeadsObjective(ABC):
    """(drafter, batch) -> {'loss': Total, …} and what train/horizons.py measures."""

    def __init__(self, config: HeadsObjectiveConfig, drafter: Heads, target: Target) -> None:
        self.config = config
        self.loss = loss_named(config.loss)
        self.teacher_head = target.head_rows(drafter.draft_ids).detach()
        self.place = places(drafter.draft_ids, target.vocab_size)
        self.horizon = 2

    @abstractmethod
    def rows(self, drafter: Any, head: int, final: Tensor, read: list[Tensor], taught: Tensor) -> Tensor:
        """What head `head`'s output matrix reads at the taught slots, [n, D].

        final [B, T, D]: the target's state of each slot. read: per head so far the newest token before the guess,
        [B, T]. taught: bool [B, T].
        """

    def __call__(self, drafter: nn.Module, batch: Batch) -> dict[str, Total]:
        assert isinstance(drafter, Heads)
        final = batch.features[:, :, -1]
        steps, read = [], []
        for head in range(drafter.shape.heads):
            slots = align(batch.tokens, batch.loss_mask, batch.documents, final, self.horizon + head)
            read.append(slots.inputs)
            taught = slots.scored & (self.place[slots.labels] >= 0)
            rows = self.rows(drafter, head, final, read, taught)
            steps.append(step_of(rows, slots, taught, self.place, self.config.decay**head))
        # With one matrix for all heads their rows go through it together.
        groups = [(steps, drafter.output(0).weight)]
        if drafter.shape.own_output:
            groups = [([step], drafter.output(head).weight) for head, step in enumerate(steps)]
        return steps_loss(groups, self._teacher, self.loss, self.config.weighting)

    def _teacher(self, final: Tensor, label: Tensor) -> Tensor:
        return law(final, label, self.teacher_head, self.config.teacher, self.config.teacher_power)
