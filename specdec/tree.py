"""TokenTree: what a drafter proposes, for a batch of rows, as two integer arrays.

Positions, attention masks and paths all derive from `parents`. A chain is a tree, and plain decoding is a
tree with only a root, so one loop serves every method. Accepting nodes is `accept.py`'s subject.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROOT = -1
PAD = -2


@dataclass(frozen=True)
class TokenTree:
    """Proposed tokens of B rows, N nodes each, parents before children.

    tokens: [B, N]; column 0 is the pending token (decided, not yet read by the target).
    parents: [B, N]; column 0 is ROOT, PAD marks unused nodes, otherwise ``parents[b, n] < n``.
    draft_probs: [B, N, V] or None; row n is the distribution the children of node n were drawn from. None
        says that no chance was involved in choosing the nodes.
    branching: with draft_probs, that nodes may have several children, drawn without replacement. A matter of how the
        tree was grown, never of what was drawn: the rule that verifies it must not depend on that.
    """

    tokens: Tensor
    parents: Tensor
    draft_probs: Tensor | None = None
    branching: bool = False

    def __post_init__(self) -> None:
        if self.tokens.shape != self.parents.shape or self.tokens.dim() != 2:
            raise ValueError(
                f"tokens and parents must both be [B, N], got {tuple(self.tokens.shape)} "
                f"and {tuple(self.parents.shape)}"
            )

    @classmethod
    def chain(cls, tokens: Tensor) -> TokenTree:
        """A chain per row: tokens [B, N], each node the child of the one before it."""
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
        return cls(tokens, parents.expand_as(tokens))

    @property
    def nodes(self) -> int:
        """N, padding included."""
        return self.tokens.shape[1]

    def extended(self, tokens: Tensor, parents: Tensor) -> TokenTree:
        """With more nodes [B, n] behind these; of trees still growing, so without draft_probs."""
        return TokenTree(torch.cat([self.tokens, tokens], 1), torch.cat([self.parents, parents], 1))

    def arranged(self, order: Sequence[int]) -> TokenTree:
        """The same tree with its nodes in another order, root first and parents before children."""
        if list(order) == list(range(self.nodes)):
            return self
        at = torch.tensor(order, device=self.tokens.device)
        parents = self.parents[:, at]
        moved = torch.where(parents < 0, parents, at.argsort()[parents.clamp(min=0)])
        laws = None if self.draft_probs is None else self.draft_probs[:, at]
        return TokenTree(self.tokens[:, at], moved, laws, self.branching)

    def ancestors(self) -> Tensor:
        """bool [B, N, N]: entry [b, n, m] says that m is n itself or lies between n and the root."""
        return self._reach

    @functools.cached_property
    def _reach(self) -> Tensor:
        count = self.nodes
        eye = torch.eye(count, device=self.tokens.device)
        # one_hot has no code for "no parent": shift by two and drop the columns of PAD and ROOT.
        edge = torch.nn.functional.one_hot(self.parents.long() + 2, count + 2)[..., 2:]
        reach = eye + edge.to(eye.dtype)
        steps = 1
        while steps < count:  # path lengths double with each product
            reach = (reach @ reach).clamp(max=1)
            steps *= 2
        return reach.bool()

    def visible(self, lengths: Tensor, width: int, start: int = 0) -> Tensor:
        """What nodes from `start` on may attend to: bool [B, N - start, width].

        Keys lie in slots: the row's text in 0 … lengths - 1, node m in lengths + m. A node sees the text, its ancestors
        and itself.
        """
        slot = torch.arange(width, device=self.tokens.device)
        mask = (slot < lengths[:, None])[:, None].repeat(1, self.nodes - start, 1)
        at = lengths[:, None] + torch.arange(self.nodes, device=self.tokens.device)
        within = self.ancestors()[:, start:]
        return mask.scatter_(2, at[:, None].expand(-1, self.nodes - start, -1), within)

    def depths(self) -> Tensor:
        """[B, N]: number of edges between a node and its root; 0 for padding."""
        return self.ancestors().sum(-1) - 1


@dataclass(frozen=True)
class Paths:
    """Accepted nodes of each row, root first.

    nodes: [B, M]; entries past ``lengths`` are meaningless. lengths: [B], at least 1 (the root itself).
    """

    nodes: Tensor
    lengths: Tensor
