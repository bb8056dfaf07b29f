"""No drafter: plain decoding through the same loop, and the baseline every speedup is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.drafter import Context
from specdec.sampling import Sampling
from specdec.target import Tap
from specdec.tree import TokenTree


class Plain:
    """Proposes only the root. `taps` asks for features along the way (distillation stores them)."""

    nodes = 1

    def __init__(self, taps: tuple[Tap, ...] = ()) -> None:
        self.taps = taps

    def reset(self, rows: int, capacity: int) -> None:
        """Nothing to forget."""

    def renew(self, rows: Tensor) -> None:
        """Nothing is kept per row."""

    def select(self, rows: Tensor) -> None:
        """Nothing is kept per row."""

    def propose(self, context: Context, sampling: Sampling, generator: torch.Generator | None) -> TokenTree:  # noqa: ARG002
        return TokenTree.chain(context.pending()[:, None])
