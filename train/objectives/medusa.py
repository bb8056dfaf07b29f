"""How Medusa's heads are trained on a frozen target (Medusa-1, 2401.10774 §2.2): each against the target's own law of
the token it guesses, or against the token itself; head k counts decay ** k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.batches import Batch
from specdec import fast
from specdec.align import align
from specdec.drafters.medusa import Medusa
from specdec.errors import UserError
from specdec.target import Target
from train.losses import Total, head_loss, loss_named

TEACHERS = ("soft", "hard")


@dataclass(frozen=True)
class MedusaObjectiveConfig:
    """conf/drafter/medusa.yaml, `objective`."""

    decay: float = 0.8
    """Head k weighs decay ** k (the paper's λ_k)."""
    loss: str = "kl"
    """kl, tv or lk_hybrid."""
    teacher: str = "soft"
    """soft: the target's distribution; hard: the token of the text (then kl is the paper's cross-entropy)."""
    teacher_power: float = 1.0
    """soft: the teacher's probabilities are raised to this power and normalised."""
    supervise_prompt: bool = False
    """Also learn over the prompt's own positions."""

    def __post_init__(self) -> None:
        loss_named(self.loss)
        if self.teacher not in TEACHERS:
            raise UserError(f"drafter.objective.teacher: '{self.teacher}' is not one of {', '.join(TEACHERS)}")
        if not self.decay > 0 or not self.teacher_power > 0:
            raise UserError("drafter.objective.decay and drafter.objective.teacher_power must be above 0")


class MedusaObjective:
    """(drafter, batch) -> {'loss': Total, 'accept_k': Total, …}: accept_k is head k's top-1 agreement."""

    def __init__(self, config: MedusaObjectiveConfig, drafter: Medusa, target: Target) -> None:
        self.config = config
        self.loss = loss_named(config.loss)
        self.teacher_head = target.head_rows(drafter.draft_ids).detach()
        self.place = torch.full((target.vocab_size,), -1, device=target.device)
        self.place[drafter.draft_ids] = torch.arange(len(drafter.draft_ids), device=target.device)
        self.horizon = 2

    def __call__(self, drafter: nn.Module, batch: Batch) -> dict[str, Total]:
        assert isinstance(drafter, Medusa)
        final = batch.features[:, :, -1]
        totals: dict[str, Total] = {}
        # With one matrix for all heads their rows go through it together.
        groups = [[head] for head in range(drafter.shape.heads)]
        if not drafter.shape.own_output:
            groups = [list(range(drafter.shape.heads))]
        for group in groups:
            for name, total in self._group(drafter, batch, final, group).items():
                totals[name] = totals[name] + total if name in totals else total
        return totals

    def _group(self, drafter: Medusa, batch: Batch, final: Tensor, group: list[int]) -> dict[str, Total]:
        rows, teachers, labels, shares = [], [], [], []
        for head in group:
            slots = align(batch.tokens, batch.loss_mask, batch.documents, final, self.horizon + head)
            # A label the heads cannot propose teaches them nothing.
            scored = slots.scored & (self.place[slots.labels] >= 0)
            rows.append(drafter.hidden(head, final[scored]))
            teachers.append(slots.teacher[scored])
            labels.append(self.place[slots.labels[scored]])
            shares.append(self.config.decay**head)
        counts = [len(row) for row in rows]
        teacher, label = torch.cat(teachers), torch.cat(labels)
        wide = torch.promote_types(teacher.dtype, torch.float32)
        weights = torch.cat(
            [teacher.new_full((n,), share, dtype=wide) for n, share in zip(counts, shares, strict=True)]
        )
        loss, agree = head_loss(
            torch.cat(rows),
            drafter.output(group[0]).weight,
            weights,
            lambda piece: self._teacher(teacher[piece], label[piece]),
            self.loss,
        )
        weight = torch.tensor(sum(n * share for n, share in zip(counts, shares, strict=True)), dtype=torch.float64)
        totals = {"loss": Total(loss, weight.to(loss.device))}
        for head, right in zip(group, agree.split(counts), strict=True):
            count = torch.tensor(len(right), dtype=torch.float64, device=loss.device)
            totals[f"accept_{head + 1}"] = Total(right.sum().to(wide), count)
        return totals

    @torch.no_grad()
    def _teacher(self, final: Tensor, label: Tensor) -> Tensor:
        """The law to learn over the draft vocabulary: [n, D] and [n] -> [n, Vd]."""
        wide = torch.promote_types(final.dtype, torch.float32)
        if self.config.teacher == "hard":
            return torch.nn.functional.one_hot(label, len(self.teacher_head)).to(wide)
        return (self.config.teacher_power * fast.product(final, self.teacher_head).to(wide)).softmax(-1)


Config, Objective = MedusaObjectiveConfig, MedusaObjective  # the names the pipeline looks for
