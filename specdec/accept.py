"""Acceptance: which proposed nodes are kept, and which token comes next.

A rule takes the tree, the target's distribution at every node and a generator, and must leave the emitted
tokens distributed exactly as the target's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.sampling import draw
from specdec.tree import Paths, TokenTree


@dataclass(frozen=True)
class Verdict:
    """paths: the accepted nodes, root first. next_tokens: [B], the token after the last accepted node."""

    paths: Paths
    next_tokens: Tensor


class AcceptanceRule(Protocol):
    """(tree, target_probs [B, N, V], generator) -> Verdict."""

    def __call__(self, tree: TokenTree, target_probs: Tensor, generator: torch.Generator | None) -> Verdict: ...


def target_walk(tree: TokenTree, target_probs: Tensor, generator: torch.Generator | None) -> Verdict:
    """Draw from the target at each node and descend while a child carries the drawn token.

    Every emitted token is a draw from the target's own row, so the output distribution is the target's
    whatever the tree, provided its nodes were chosen without chance (or with chance that is not conditioned
    on): algorithms §1.5, SpecInfer (2305.09781) "naive sampling". With one-hot rows this is greedy
    verification.

    Raises ValueError for a tree that carries draft_probs: that is another rule's input.
    """
    if tree.draft_probs is not None:
        raise ValueError("target_walk takes trees grown without chance; this one carries draft_probs")
    rows = torch.arange(tree.tokens.shape[0], device=tree.tokens.device)
    node = torch.zeros_like(rows)
    alive = torch.ones_like(rows, dtype=torch.bool)
    path, length = [node], torch.ones_like(rows)
    next_tokens = torch.zeros_like(tree.tokens[:, 0])
    while True:
        drawn = draw(target_probs[rows, node], generator)
        next_tokens = torch.where(alive, drawn, next_tokens)
        child = (tree.parents == node[:, None]) & (tree.tokens == drawn[:, None]) & alive[:, None]
        alive = child.any(-1)
        if not bool(alive.any()):
            return Verdict(Paths(torch.stack(path, 1), length), next_tokens)
        node = torch.where(alive, child.int().argmax(-1), node)
        path.append(node)
        length = length + alive.to(length.dtype)
