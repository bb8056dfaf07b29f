"""AdamW, a cosine schedule with warm-up, and the moving average of the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def adamw(parameters: list[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with EAGLE's betas (0.9, 0.95); decay on matrices only."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def cosine(step: int, steps: int, warmup: int, floor: float = 0.02) -> float:
    """Factor of the learning rate at `step` (from 0): linear up, then a cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Average:
    """Exponential moving average of the trained tensors; starts as a plain mean so that early weights fade."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: dict[str, nn.Parameter], step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, value in self.values.items():
            value.lerp_(parameters[name].detach(), 1 - decay)

    def load(self, values: dict[str, Tensor]) -> None:
        for name, value in self.values.items():
            value.copy_(values[name])
