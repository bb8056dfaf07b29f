"""The optimisers behind one face, a cosine schedule with warm-up, and the moving average of the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

KINDS = ("muon", "adamw")
BETAS = (0.9, 0.95)  # as EAGLE trains
TABLES = ("lm_head", "embed", "wte")  # names that output and input matrices have
MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


class Optimizers:
    """Muon for the hidden matrices and AdamW for the rest, or AdamW for all.

    Muon (orthogonalised momentum; Jordan et al. 2024, Liu et al. 2502.16982 for the scale that lets both share one
    learning rate) learns about twice as much from the same tokens as AdamW here. Output and input matrices stay with
    AdamW.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], kind: str, lr: float, weight_decay: float) -> None:
        self.lr = lr
        matrices = {
            name: parameter
            for name, parameter in parameters.items()
            if kind == "muon" and parameter.dim() == 2 and not any(table in name for table in TABLES)
        }
        rest = [p for n, p in parameters.items() if n not in matrices]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.all: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)]
        if matrices:
            self.all.append(
                torch.optim.Muon(
                    list(matrices.values()), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
                )
            )

    def step(self, factor: float) -> None:
        """One step at `factor` times the peak learning rate; gradients are cleared."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What resuming needs of a parameter's state."""
        return {k: v for one in self.all if parameter in one.state for k, v in one.state[parameter].items()}

    def load(self, parameter: nn.Parameter, moments: dict[str, Tensor]) -> None:
        for optimizer in self.all:
            if any(parameter is own for group in optimizer.param_groups for own in group["params"]):
                optimizer.state[parameter] = moments


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
