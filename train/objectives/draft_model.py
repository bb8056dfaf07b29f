"""How a draft model is distilled: its law of every next token against the target's (DistillSpec 2310.08461), on the
target's texts and, where asked, on its own (GKD 2306.13649).

Horizon 1: slot t has read x_0 … x_t, as the decoder's cache has, and predicts x_{t+1}.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.batches import Batch
from specdec.align import align, runs
from specdec.drafters.draft_model import Distilled
from specdec.errors import UserError
from specdec.target import Target
from specdec.vocab import places
from train.horizons import measured, step_of
from train.losses import Total, head_loss, loss_named
from train.on_policy import rewritten
from train.teacher import known_teacher, law


@dataclass(frozen=True)
class DraftModelObjectiveConfig:
    """conf/drafter/draft_model.yaml, `objective`."""

    loss: str = "lk_hybrid"
    """A loss of train/losses.py or a sum of some, e.g. kl, lk_hybrid, jsd:0.5, 0.1*ce+0.9*tv."""
    teacher: str = "soft"
    """soft: the target's distribution; hard: the token of the text (then kl is the cross-entropy)."""
    teacher_power: float = 2.0
    """soft: the teacher's probabilities are raised to this power and normalised: above 1 favours greedy serving."""
    supervise_prompt: bool = False
    """Also learn over the prompt's own positions."""
    depth: int = 5
    """Draft tokens of a round, in the measured tau."""
    on_policy: float = 0.0
    """Probability that a batch's answers are written by the drafter itself, at temperature 1, before the target scores
    them. Of a sum of losses ce is nothing there."""
    on_policy_tokens: int = 64
    """Longest such answer."""

    def __post_init__(self) -> None:
        loss_named(self.loss)
        known_teacher(self.teacher, self.teacher_power)
        if self.depth < 1 or self.on_policy_tokens < 1:
            raise UserError("drafter.objective.depth and drafter.objective.on_policy_tokens must be 1 or more")
        if not 0 <= self.on_policy <= 1:
            raise UserError(f"drafter.objective.on_policy must be from 0 to 1, got {self.on_policy}")
        if self.on_policy and (self.teacher == "hard" or self.supervise_prompt):
            raise UserError(
                "drafter.objective.on_policy needs teacher: soft, or the drafter would learn from itself, "
                "and supervise_prompt: false, or answers have no beginning"
            )


class DraftModelObjective:
    """(drafter, batch) -> {'loss': Total, …} and what train/horizons.py measures, tau over runs of slots."""

    def __init__(self, config: DraftModelObjectiveConfig, drafter: Distilled, target: Target) -> None:
        self.config, self.target = config, target
        self.loss = loss_named(config.loss)
        self.teacher_head = target.head_rows(drafter.draft_ids).detach()
        self.frozen = drafter.head_rows().detach() if drafter.shape.head == "frozen" else None
        self.place = places(drafter.draft_ids, target.vocab_size)
        self.horizon = 1

    def __call__(self, drafter: nn.Module, batch: Batch) -> dict[str, Total]:
        assert isinstance(drafter, Distilled)
        own = self._written(drafter, batch)
        batch = batch if own is None else own
        final = batch.features[:, :, -1]
        slots = align(batch.tokens, batch.loss_mask, batch.documents, final, self.horizon)
        taught = slots.scored & (self.place[slots.labels] >= 0)
        rows = drafter.states(batch.tokens, batch.documents)[taught]
        step = step_of(rows, slots, taught, self.place, 1.0)
        head = drafter.head_rows() if self.frozen is None else self.frozen
        wide = torch.promote_types(rows.dtype, torch.float32)
        weights = torch.ones(len(rows), dtype=wide, device=rows.device)
        labels = step.labels if own is None else torch.full_like(step.labels, -1)  # its own tokens teach it nothing
        graded = head_loss(
            rows, head, weights, labels, lambda piece: self._teacher(step.final[piece], step.labels[piece]), self.loss
        )
        count = torch.tensor(len(rows), dtype=torch.float64, device=rows.device)
        right = torch.zeros_like(taught)
        right[taught] = graded.agree
        return {
            "loss": Total(graded.total, count),
            **measured([step], [graded.agree], [graded.overlap]),
            "tau": tau(right, slots.scored, self.config.depth),
        }

    def _written(self, drafter: Distilled, batch: Batch) -> Batch | None:
        """The batch with answers of the drafter's own; None where it is not their turn."""
        if not self.config.on_policy:
            return None
        device = batch.tokens.device
        generator = torch.Generator(device).manual_seed(batch.number)
        if float(torch.rand((), generator=generator, device=device)) >= self.config.on_policy:
            return None
        return rewritten(batch, drafter, self.target, self.config.on_policy_tokens, generator)

    def _teacher(self, final: Tensor, label: Tensor) -> Tensor:
        return law(final, label, self.teacher_head, self.config.teacher, self.config.teacher_power)


Config, Objective = DraftModelObjectiveConfig, DraftModelObjective  # the names the pipeline looks for


def tau(right: Tensor, scored: Tensor, depth: int) -> Total:
    """Tokens of a round that begins at a scored slot, teacher-forced: as many slots in a row as are right, at most
    `depth`, and the target's own token. right, scored: bool [B, T].
    """
    tokens = 1 + runs(right, depth)[scored]
    return Total(tokens.sum().double(), scored.sum().double())
