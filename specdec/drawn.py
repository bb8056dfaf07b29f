"""Growing by chance: chains and static trees drawn from the drafter's own distribution, which the tree then carries.

Verification needs the law each token was drawn from. Which tree is grown, and without chance, is search.py's subject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.paths import Path, levels
from specdec.sampling import Sampling, draw, uniform
from specdec.tree import PAD, TokenTree


def _spread(own: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """A law over the drafter's tokens [..., V'] as one over the target's [..., V]."""
    at = torch.arange(own.shape[-1], device=own.device) if ids is None else ids
    return own.new_zeros(*own.shape[:-1], vocab_size).index_copy_(-1, at, own)


def drawn_chain(
    depth: int,
    tree: TokenTree,
    scores: Callable[[TokenTree, int], Tensor],
    sampling: Sampling,
    generator: torch.Generator | None,
    ids: Tensor | None,
    vocab_size: int,
) -> TokenTree:
    """A chain drawn from the drafter's processed distribution."""
    unpenalised = sampling.without_history()
    laws = []
    for node in range(depth):
        own = unpenalised.probs(scores(tree, node)[:, 0])
        law = _spread(own, ids, vocab_size)
        laws.append(law)
        parents = torch.full_like(tree.parents[:, :1], node)
        tree = tree.extended(draw(law, generator)[:, None], parents)
    laws.append(torch.zeros_like(laws[0]))  # the last node has no children
    return TokenTree(tree.tokens, tree.parents, torch.stack(laws, 1))


def drawn_tree(
    paths: Sequence[Path],
    tree: TokenTree,
    scores: Callable[[TokenTree, int], Tensor],
    sampling: Sampling,
    generator: torch.Generator | None,
    ids: Tensor | None,
    vocab_size: int,
) -> TokenTree:
    """A static tree whose siblings are drawn without replacement; rank k is the k-th drawn.

    Gumbel noise on the log-probabilities and the top k of it is that law (Kool et al. 1903.06059). Where the law's
    support holds fewer tokens than there are children, the rest is padding.
    """
    unpenalised = sampling.without_history()
    rows, start = tree.tokens.shape[0], 0
    grown, order = levels(paths)
    laws: list[Tensor] = []
    for level in grown:
        law = _spread(unpenalised.probs(scores(tree, start)), ids, vocab_size)
        laws.append(law)
        noise = uniform(law.shape, law.device, generator)
        keys = law.double().log() - (-noise.clamp(min=1e-300).log()).log()
        top = keys.topk(max(level.ranks) + 1, -1)
        parents = torch.tensor(level.parents, device=law.device).expand(rows, -1)
        at, rank = parents[0] - start, torch.tensor(level.ranks, device=law.device)
        real = (top.values[:, at, rank] > -torch.inf) & (tree.parents.gather(1, parents) != PAD)
        start = tree.nodes
        tree = tree.extended(top.indices[:, at, rank], parents.masked_fill(~real, PAD))
    laws.append(laws[0].new_zeros(rows, tree.nodes - start, vocab_size))  # leaves have no children
    return TokenTree(tree.tokens, tree.parents, torch.cat(laws, 1), branching=True).arranged(order)
