"""How Hydra's heads are trained (2402.05109 §3, §4): train/heads.py, reading the text's own tokens before the guess."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.drafters.hydra import Hydra
from train.heads import HeadsObjective, HeadsObjectiveConfig


class HydraObjective(HeadsObjective):
    def rows(self, drafter: Hydra, head: int, final: Tensor, read: list[Tensor], taught: Tensor) -> Tensor:
        return drafter.hidden(head, final[taught], torch.stack(read, 2)[taught])


Config = HydraObjectiveConfig = HeadsObjectiveConfig
Objective = HydraObjective  # Config and Objective are the names the pipeline looks for
