"""Sampling: from logits to the distribution tokens are drawn from. The only place that makes probabilities.

Temperature 0 gives one-hot rows, so that nothing else has a branch for greedy decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How the target's logits become a distribution.

    temperature: 0 is greedy. top_k: keep the k likeliest tokens, 0 keeps all. top_p: keep the smallest set
    of likeliest tokens with at least this mass.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}")

    def probs(self, logits: Tensor) -> Tensor:
        """Logits [..., V] to probabilities [..., V], in the logits' own precision but at least fp32."""
        if self.temperature == 0:
            best = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.softmax(-1).sort(-1, descending=True)
            # A token stays if the mass of the tokens before it has not yet reached top_p.
            outside = (ordered.cumsum(-1) - ordered) >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
        return logits.softmax(-1)


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token per row: probs [..., V] to ids [...].

    Inverse transform sampling in fp64: torch.multinomial draws V exponentials per row, which costs more
    than a whole drafting step here, and fp32 cumulative sums lose tokens below 1e-7.
    """
    cumulative = probs.double().cumsum(-1)
    u = torch.rand((*probs.shape[:-1], 1), dtype=torch.float64, device=probs.device, generator=generator)
    # right=True: the first index whose cumulative mass exceeds u, never a token of probability 0.
    index = torch.searchsorted(cumulative, u * cumulative[..., -1:], right=True)
    return index.squeeze(-1).clamp(max=probs.shape[-1] - 1)
