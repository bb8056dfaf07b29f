"""What a fit trains and how a batch becomes a loss: a drafter on a frozen target. (With a target that is trained as
well: train/joint.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from data.batches import Batch
from specdec.errors import UserError
from train.adapters import LoraConfig, add_adapters, merged_state
from train.losses import Total

Objective = Callable[[nn.Module, Batch], dict[str, Total]]


class Learner:
    """A drafter, or low-rank adapters on it."""

    def __init__(self, drafter: nn.Module, objective: Objective, lora: LoraConfig | None = None, seed: int = 0) -> None:
        self.drafter, self.objective = drafter, objective
        self.parameters: Mapping[str, nn.Parameter] = (
            dict(drafter.named_parameters())
            if lora is None
            else add_adapters(drafter, lora, torch.Generator().manual_seed(seed))
        )
        self.factors: Mapping[str, float] = {}
        self._adapted = lora is not None
        if lora is not None and lora.dropout and not drafter.train().training:
            raise UserError(
                "fit.lora.dropout: this drafter reads in training as in decoding, without dropout; set it to 0"
            )

    def begin(self, share: float) -> None:
        """Nothing changes in the course of a fit."""

    def __call__(self, batch: Batch) -> dict[str, Total]:
        return self.objective(self.drafter, batch)

    def train(self, on: bool) -> None:
        self.drafter.train(on)

    def state(self) -> dict[str, Tensor]:
        """The drafter's tensors as they are saved."""
        return merged_state(self.drafter) if self._adapted else self.drafter.state_dict()

    def originals(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches whose features are those of the target as it was."""
        return batches
