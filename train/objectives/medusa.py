"""How Medusa's heads are trained (2401.10774 §2.2): train/heads.py, reading the target's state alone."""

from __future__ import annotations

from torch import Tensor

from specdec.drafters.medusa import Medusa
from train.heads import HeadsObjective, HeadsObjectiveConfig


class MedusaObjective(HeadsObjective):
    def rows(self, drafter: Medusa, head: int, final: Tensor, read: list[Tensor], taught: Tensor) -> Tensor:  # noqa: ARG002
        return drafter.hidden(head, final[taught])


Config = MedusaObjectiveConfig = HeadsObjectiveConfig
Objective = MedusaObjective  # Config and Objective are the names the pipeline looks for
