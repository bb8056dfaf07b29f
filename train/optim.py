"""The optimisers behind one face, the schedules of the learning rate, and the moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

KINDS = ("muon", "adamw")
SCHEDULES = ("cosine", "linear", "constant")
BETAS = (0.9, 0.95)  # as EAGLE trains
MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
OTHERS = ("lm_head", "outputs.", "embed", "wte", "lora_", "target.")
"""Parts of the names of input and output matrices, low-rank factors and a target's own weights."""


class Optimizers:
    """Muon for the hidden matrices and AdamW for the rest, or AdamW for all.

    Muon (orthogonalised momentum; Jordan et al. 2024, Liu et al. 2502.16982 for the scale that lets both share one
    learning rate) learns about twice as much from the same tokens as AdamW here. Input and output matrices
    stay with AdamW.
    factors: multiples of the learning rate, by name; 1 for the others.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        kind: str,
        lr: float,
        weight_decay: float,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self.lr = lr
        self.all: list[torch.optim.Optimizer] = []
        factors = factors or {}
        hidden = {n for n, p in parameters.items() if kind == "muon" and p.dim() == 2 and not _kept_from_muon(n)}
        groups, matrices = [], []
        for factor in sorted({factors.get(name, 1.0) for name in parameters}):
            own = {name: p for name, p in parameters.items() if factors.get(name, 1.0) == factor}
            rest = [p for name, p in own.items() if name not in hidden]
            shared = {"lr": lr, "factor": factor}
            groups.append({"params": [p for p in rest if p.dim() > 1], "weight_decay": weight_decay, **shared})
            groups.append({"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0, **shared})
            matrices.append({"params": [p for name, p in own.items() if name in hidden], **shared})
        groups, matrices = ([group for group in some if group["params"]] for some in (groups, matrices))
        if groups:
            self.all.append(torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True))
        if matrices:
            self.all.append(
                torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )

    def step(self, factor: float) -> None:
        """One step at `factor` times the peak learning rate; gradients are cleared."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * factor * group["factor"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What resuming needs of a parameter's state."""
        return {k: v for one in self.all if parameter in one.state for k, v in one.state[parameter].items()}

    def load(self, parameter: nn.Parameter, moments: dict[str, Tensor]) -> None:
        for optimizer in self.all:
            if any(parameter is own for group in optimizer.param_groups for own in group["params"]):
                optimizer.state[parameter] = moments


def _kept_from_muon(name: str) -> bool:
    return any(name.startswith(part) or f".{part}" in name for part in OTHERS)


def schedule(kind: str, step: int, steps: int, warmup: int, floor: float) -> float:
    """Factor of the learning rate at `step` (from 0): linear up, then down to `floor` as a cosine or a line, or not."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}[kind]
    return floor + (1 - floor) * left


class Average:
    """Exponential moving average of the trained tensors; starts as a plain mean so that early weights fade."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: Mapping[str, nn.Parameter], step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, value in self.values.items():
            value.lerp_(parameters[name].detach(), 1 - decay)

    def load(self, values: dict[str, Tensor]) -> None:
        for name, value in self.values.items():
            value.copy_(values[name])
