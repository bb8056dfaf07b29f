"""The law a drafter learns: the target's own over the draft vocabulary, or the text's token."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import fast
from specdec.errors import UserError

TEACHERS = ("soft", "hard")


def known_teacher(kind: str, power: float) -> None:
    """Raises UserError for settings that do not exist."""
    if kind not in TEACHERS:
        raise UserError(f"drafter.objective.teacher: '{kind}' is not one of {', '.join(TEACHERS)}")
    if not power > 0:
        raise UserError(f"drafter.objective.teacher_power must be above 0, got {power}")


@torch.no_grad()
def law(final: Tensor, label: Tensor, head: Tensor, kind: str, power: float) -> Tensor:
    """final [n, D] of the target, label [n] (places in the draft vocabulary), head [Vd, D] -> [n, Vd].

    soft: the target's probabilities, normalised there and raised to `power` (above 1 favours greedy serving); hard: 1
    for the label.
    """
    wide = torch.promote_types(final.dtype, torch.float32)
    if kind == "hard":
        return torch.nn.functional.one_hot(label, len(head)).to(wide)
    return (power * fast.product(final, head).to(wide)).softmax(-1)
