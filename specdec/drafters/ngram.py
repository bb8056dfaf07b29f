"""Prompt lookup: propose what followed the last few tokens where they occurred before in the text. No training.

Sources: Saxena, prompt lookup decoding (2023); algorithms §9.3. A row without a match proposes nothing that round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafter import Context
from specdec.errors import UserError
from specdec.sampling import Sampling
from specdec.search import TreeConfig
from specdec.target import Tap
from specdec.tree import PAD, TokenTree


@dataclass(frozen=True)
class NgramConfig:
    """longest, shortest: lengths of the run of last tokens that is looked up, the longest match winning."""

    depth: int = 5
    """Tokens proposed per round."""
    longest: int = 3
    """Longest run looked up."""
    shortest: int = 1
    """Shortest run looked up."""

    def __post_init__(self) -> None:
        if self.depth < 1 or not 1 <= self.shortest <= self.longest:
            raise UserError("ngram: depth must be 1 or more and 1 <= shortest <= longest")


Config = NgramConfig


class Ngram:
    """The drafter; state is the text itself."""

    taps: tuple[Tap, ...] = ()

    def __init__(self, config: NgramConfig | None = None) -> None:
        self.config = config or NgramConfig()
        self.tree = TreeConfig(depth=self.config.depth)

    @property
    def nodes(self) -> int:
        return self.tree.most_nodes

    def reset(self, rows: int, capacity: int) -> None:
        """Nothing to forget."""

    def renew(self, rows: Tensor) -> None:
        """Nothing is kept per row."""

    def select(self, rows: Tensor) -> None:
        """Nothing is kept per row."""

    def propose(self, context: Context, sampling: Sampling, generator: torch.Generator | None) -> TokenTree:  # noqa: ARG002
        texts = [row[:length] for row, length in zip(context.tokens.tolist(), context.lengths.tolist(), strict=True)]
        depth = self.tree.depth
        found = [self._continuation(text) for text in texts]
        fill = [[0] * (depth - len(new)) for new in found]
        tokens = [[text[-1], *new, *zeros] for text, new, zeros in zip(texts, found, fill, strict=True)]
        parents = [[-1, *range(len(new)), *[PAD] * (depth - len(new))] for new in found]
        device = context.tokens.device
        return TokenTree(torch.tensor(tokens, device=device), torch.tensor(parents, device=device))

    def _continuation(self, text: list[int]) -> list[int]:
        for size in range(min(self.config.longest, len(text) - 1), self.config.shortest - 1, -1):
            tail = text[-size:]
            # The latest occurrence: recent text is the likelier to be repeated.
            for at in range(len(text) - size - 1, -1, -1):
                if text[at : at + size] == tail:
                    return text[at + size : at + size + self.tree.depth]
        return []
