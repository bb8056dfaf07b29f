"""Growing a tree from a drafter's scores: chains, static trees, EAGLE-2's dynamic trees.

A drafter gives one function, expand(tree, start): logits of the nodes from `start` on. Which node comes next is decided
here, the same for every drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specdec.drafter import Context
from specdec.errors import UserError, nearest
from specdec.sampling import Sampling, draw, seen_on_paths, uniform
from specdec.tree import PAD, ROOT, TokenTree

KINDS = ("chain", "static", "dynamic")
Expand = Callable[[TokenTree, int], Tensor]
"""(tree, start) -> logits [B, N - start, V'] of nodes start…; called with growing trees, each node once."""


@dataclass(frozen=True)
class TreeConfig:
    """conf/drafter/*.yaml, `tree`: what is proposed in a round. Part of decoding, not of the weights."""

    kind: str = "chain"
    """chain, static (fixed paths of ranks) or dynamic (EAGLE-2)."""
    depth: int = 5
    """Longest path, in draft tokens."""
    draw: bool = False
    """Chains and static trees: when sampling with a generator, draw from the drafter's distribution instead of taking
    the likeliest."""
    paths: list[list[int]] = field(default_factory=list)
    """Static only: each path a list of ranks (0: the likeliest child), e.g. [[0], [1], [0, 0]]."""
    width: int = 8
    """Dynamic only: nodes expanded per level, and children of each."""
    nodes: int = 16
    """Dynamic only: nodes kept, root included."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"tree.kind: '{self.kind}' is not one of {', '.join(KINDS)}.{nearest(self.kind, KINDS)}")
        if self.depth < 1 or self.width < 1 or self.nodes < 2:
            raise UserError("tree.depth and tree.width must be 1 or more, tree.nodes 2 or more")
        if self.kind == "static":
            closed(self.paths)

    @property
    def most_nodes(self) -> int:
        """Nodes of the proposed tree, root included."""
        return {"chain": 1 + self.depth, "static": 1 + len(self.paths), "dynamic": self.nodes}[self.kind]

    @property
    def most_slots(self) -> int:
        """Nodes a drafter may have to hold while the tree grows, root included."""
        return 1 + self.depth * self.width if self.kind == "dynamic" else self.most_nodes

    @property
    def longest(self) -> int:
        """Most draft tokens on one path."""
        return max(map(len, self.paths)) if self.kind == "static" else self.depth

    def limited(self, nodes: int, depth: int) -> TreeConfig:
        """The same tree cut to its first `nodes` nodes, root included, and to `depth` draft tokens."""
        depth = min(depth, self.longest)
        if self.kind == "chain":
            return replace(self, depth=min(depth, nodes - 1))
        if self.kind == "static":
            return replace(
                self, depth=depth, paths=[list(p) for p in closed(self.paths) if len(p) <= depth][: nodes - 1]
            )
        most = 1 + self.width + (depth - 1) * self.width**2  # all that are scored
        return replace(self, depth=depth, nodes=min(nodes, self.nodes, most))


def closed(paths: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Paths in breadth-first order. Raises UserError for a path whose parent is missing, or one given twice."""
    found = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    if not found or len(found) != len(paths) or any(rank < 0 for path in found for rank in path) or () in found:
        raise UserError("tree.paths must hold different, non-empty lists of ranks from 0 up, e.g. [[0], [1], [0, 0]]")
    known = {(), *found}
    for path in found:
        if path[:-1] not in known:
            raise UserError(f"tree.paths: {list(path)} is there but its parent {list(path[:-1])} is not")
    return found


def best_paths(accuracies: Sequence[Sequence[float]], nodes: int) -> list[list[int]]:
    """The static tree with most expected accepted tokens: accuracies[d][k] = P(rank k is right at depth d).

    Takes the `nodes` paths of highest product (Medusa 2401.10774 §2.3.3; algorithms §3.1): with accuracies that fall
    with rank that set is closed under parents.
    """
    frontier: list[tuple[float, tuple[int, ...]]] = [(accuracies[0][0], (0,))]
    chosen: list[list[int]] = []
    while frontier and len(chosen) < nodes:
        frontier.sort(key=lambda item: (-item[0], len(item[1]), item[1]))
        score, path = frontier.pop(0)
        chosen.append(list(path))
        depth, rank = len(path) - 1, path[-1]
        if rank + 1 < len(accuracies[depth]) and accuracies[depth][rank] > 0:
            frontier.append((score / accuracies[depth][rank] * accuracies[depth][rank + 1], (*path[:-1], rank + 1)))
        if depth + 1 < len(accuracies):
            frontier.append((score * accuracies[depth + 1][0], (*path, 0)))
    return chosen


def grow(
    config: TreeConfig,
    context: Context,
    expand: Expand,
    sampling: Sampling,
    generator: torch.Generator | None,
    ids: Tensor | None,
    vocab_size: int,
) -> TokenTree:
    """The tree for this round.

    ids [V']: target id of each of the drafter's tokens; None when they are the same. generator None: no chance.
    """
    scores = _penalised(context, expand, sampling, ids, vocab_size)
    root = TokenTree.chain(context.pending()[:, None])
    chance = config.draw and generator is not None and sampling.temperature > 0
    if config.kind == "chain":
        if chance:
            return _drawn_chain(config.depth, root, scores, sampling, generator, ids, vocab_size)
        return _likeliest(closed([[0] * (d + 1) for d in range(config.depth)]), root, scores, ids)
    if config.kind == "static" and chance:
        return _drawn_tree(closed(config.paths), root, scores, sampling, generator, ids, vocab_size)
    if config.kind == "static":
        return _likeliest(closed(config.paths), root, scores, ids)
    return _dynamic(config, root, scores, ids)


def _penalised(context: Context, expand: Expand, sampling: Sampling, ids: Tensor | None, vocab_size: int) -> Expand:
    """The drafter gets the target's repetition penalty, or the two would part at once."""
    if not sampling.needs_history:
        return expand

    def scores(tree: TokenTree, start: int) -> Tensor:
        seen = seen_on_paths(context.tokens, context.lengths, tree, vocab_size)[:, start:]
        logits = expand(tree, start)
        return sampling.penalise(logits, seen[..., : logits.shape[-1]] if ids is None else seen[..., ids])

    return scores


def _append(tree: TokenTree, tokens: Tensor, parents: Tensor) -> TokenTree:
    return TokenTree(torch.cat([tree.tokens, tokens], 1), torch.cat([tree.parents, parents], 1))


def _likeliest(paths: list[tuple[int, ...]], tree: TokenTree, scores: Expand, ids: Tensor | None) -> TokenTree:
    """Nodes by rank, level by level; a chain is the paths (0), (0, 0), …"""
    index = {(): 0} | {path: i + 1 for i, path in enumerate(paths)}
    start, depth = 0, 1
    rows = tree.tokens.shape[0]
    while level := [path for path in paths if len(path) == depth]:
        width = max(path[-1] for path in level) + 1
        logits = scores(tree, start)
        best = logits.argmax(-1, keepdim=True) if width == 1 else logits.topk(width, -1).indices  # [B, n, width]
        at = torch.tensor([index[path[:-1]] - start for path in level], device=best.device)
        rank = torch.tensor([path[-1] for path in level], device=best.device)
        tokens = best[:, at, rank]
        start, depth = tree.nodes, depth + 1
        parents = torch.tensor([index[path[:-1]] for path in level], device=best.device)
        tree = _append(tree, tokens if ids is None else ids[tokens], parents.expand(rows, -1))
    return tree


def _spread(own: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """A law over the drafter's tokens [..., V'] as one over the target's [..., V]."""
    at = torch.arange(own.shape[-1], device=own.device) if ids is None else ids
    return own.new_zeros(*own.shape[:-1], vocab_size).index_copy_(-1, at, own)


def _drawn_chain(
    depth: int,
    tree: TokenTree,
    scores: Expand,
    sampling: Sampling,
    generator: torch.Generator | None,
    ids: Tensor | None,
    vocab_size: int,
) -> TokenTree:
    """A chain drawn from the drafter's processed distribution, which is kept: verification needs the law used."""
    unpenalised = sampling.without_history()
    laws = []
    for node in range(depth):
        own = unpenalised.probs(scores(tree, node)[:, 0])
        law = _spread(own, ids, vocab_size)
        laws.append(law)
        parents = torch.full_like(tree.parents[:, :1], node)
        tree = _append(tree, draw(law, generator)[:, None], parents)
    laws.append(torch.zeros_like(laws[0]))  # the last node has no children
    return TokenTree(tree.tokens, tree.parents, torch.stack(laws, 1))


def _drawn_tree(
    paths: list[tuple[int, ...]],
    tree: TokenTree,
    scores: Expand,
    sampling: Sampling,
    generator: torch.Generator | None,
    ids: Tensor | None,
    vocab_size: int,
) -> TokenTree:
    """A static tree whose siblings are drawn without replacement; rank k is the k-th drawn.

    Gumbel noise on the log-probabilities and the top k of it is that law (Kool et al. 1903.06059). Where the law's
    support holds fewer tokens than there are children, the rest is padding.
    """
    index = {(): 0} | {path: i + 1 for i, path in enumerate(paths)}
    unpenalised = sampling.without_history()
    rows, start, depth = tree.tokens.shape[0], 0, 1
    laws: list[Tensor] = []
    while True:
        level = [path for path in paths if len(path) == depth]
        if not level:
            laws.append(laws[0].new_zeros(rows, tree.nodes - start, vocab_size))  # leaves have no children
            return TokenTree(tree.tokens, tree.parents, torch.cat(laws, 1), branching=True)
        own = unpenalised.probs(scores(tree, start))
        law = _spread(own, ids, vocab_size)
        laws.append(law)
        width = max(path[-1] for path in level) + 1
        noise = uniform(law.shape, law.device, generator)
        keys = law.double().log() - (-noise.clamp(min=1e-300).log()).log()
        top = keys.topk(width, -1)
        at = torch.tensor([index[path[:-1]] - start for path in level], device=law.device)
        rank = torch.tensor([path[-1] for path in level], device=law.device)
        parents = torch.tensor([index[path[:-1]] for path in level], device=law.device).expand(rows, -1)
        real = (top.values[:, at, rank] > -torch.inf) & (tree.parents.gather(1, parents) != PAD)
        start, depth = tree.nodes, depth + 1
        tree = _append(tree, top.indices[:, at, rank], parents.masked_fill(~real, PAD))


def _dynamic(config: TreeConfig, root: TokenTree, scores: Expand, ids: Tensor | None) -> TokenTree:
    """EAGLE-2 (2406.16858 §4): expand the likeliest paths level by level, then keep the best nodes of all scored.

    A path's score is the sum of its log-probabilities over the draft vocabulary, at temperature 1.
    """
    rows, width = root.tokens.shape[0], config.width
    work, start = root, 0
    beam_scores = torch.zeros(rows, 1, device=root.tokens.device, dtype=torch.float64)
    beam_pool = torch.full_like(root.parents, ROOT)  # pool index of each beam; ROOT for the root itself
    tokens: list[Tensor] = []
    parents: list[Tensor] = []
    totals: list[Tensor] = []
    for level in range(config.depth):
        logp = scores(work, start).double().log_softmax(-1)
        top = logp.topk(min(width, logp.shape[-1]), -1)
        total = (beam_scores[..., None] + top.values).flatten(1)
        token = (top.indices if ids is None else ids[top.indices]).flatten(1)
        share = top.indices.shape[-1]
        offset = sum(part.shape[1] for part in tokens)
        tokens.append(token)
        totals.append(total)
        parents.append(beam_pool.repeat_interleave(share, 1))
        if level + 1 == config.depth:
            break
        chosen = total.topk(min(width, total.shape[1]), -1).indices
        beam_scores, beam_pool = total.gather(1, chosen), chosen + offset
        work_parents = start + chosen // share
        start = work.nodes
        work = _append(work, token.gather(1, chosen), work_parents)
    pool_tokens, pool_parents, pool_scores = (torch.cat(part, 1) for part in (tokens, parents, totals))
    # Stable: a child never scores above its parent, and on a tie the parent, which comes first, wins.
    # The order stays: nodes then lie by score, so that a smaller budget would have been the first of them (cost.py).
    best = pool_scores.sort(dim=1, descending=True, stable=True).indices[:, : config.nodes - 1]
    renumber = torch.zeros_like(pool_parents).scatter(
        1, best, torch.arange(1, best.shape[1] + 1, device=best.device).expand(rows, -1)
    )
    above = pool_parents.gather(1, best)
    kept = torch.where(above == ROOT, 0, renumber.gather(1, above.clamp(min=0)))
    return _append(root, pool_tokens.gather(1, best), kept)
