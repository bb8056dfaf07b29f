"""Growing a tree from a drafter's scores: chains, static trees, EAGLE-2's dynamic trees.

A drafter gives one function, expand(tree, start): logits of the nodes from `start` on. Which node comes next is decided
here, the same for every drafter; by chance in drawn.py. A static tree's paths are paths.py's subject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specdec.drafter import Context
from specdec.drawn import drawn_chain, drawn_tree
from specdec.errors import UserError, nearest
from specdec.paths import Path, closed, levels
from specdec.sampling import Sampling, seen_on_paths
from specdec.tree import ROOT, TokenTree

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
    """Static only: each path a list of ranks (0: the likeliest child), parents before children and the most useful
    first, e.g. [[0], [0, 0], [1]]. Empty: measured at the end of training, up to `nodes` and `depth`."""
    width: int = 8
    """Dynamic only: nodes expanded per level, and children of each."""
    nodes: int = 16
    """Dynamic, and static trees that are measured: nodes kept, root included."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"tree.kind: '{self.kind}' is not one of {', '.join(KINDS)}.{nearest(self.kind, KINDS)}")
        if self.depth < 1 or self.width < 1 or self.nodes < 2:
            raise UserError("tree.depth and tree.width must be 1 or more, tree.nodes 2 or more")
        if self.kind == "static" and self.paths:
            closed(self.paths, self.draw)

    @property
    def unmeasured(self) -> bool:
        """A static tree whose paths are still to be measured."""
        return self.kind == "static" and not self.paths

    def known_paths(self) -> list[Path]:
        """A static tree's paths. Raises UserError while they are not measured."""
        if self.unmeasured:
            raise UserError(
                "tree.paths is empty: training measures a static tree's paths and saves them with the drafter "
                "(eval.ranks.measured_tree does it for one at hand). Give paths, or another tree.kind"
            )
        return closed(self.paths, self.draw)

    @property
    def most_nodes(self) -> int:
        """Nodes of the proposed tree, root included."""
        if self.kind == "static" and self.paths:
            return 1 + len(self.paths)
        return 1 + self.depth if self.kind == "chain" else self.nodes

    @property
    def most_slots(self) -> int:
        """Nodes a drafter may have to hold while the tree grows, root included."""
        return 1 + self.depth * self.width if self.kind == "dynamic" else self.most_nodes

    @property
    def longest(self) -> int:
        """Most draft tokens on one path."""
        return max(map(len, self.paths)) if self.kind == "static" and self.paths else self.depth

    def limited(self, nodes: int, depth: int) -> TreeConfig:
        """The same tree cut to its first `nodes` nodes, root included, of those at most `depth` draft tokens deep."""
        if nodes < 2 or depth < 1:
            raise UserError(f"a part of a tree has 2 nodes or more and is 1 deep or more, got {nodes} and {depth}")
        depth = min(depth, self.longest)
        if self.kind == "chain":
            return replace(self, depth=min(depth, nodes - 1))
        if self.kind == "static":
            kept = [list(path) for path in self.known_paths() if len(path) <= depth][: nodes - 1]
            return replace(self, depth=max(map(len, kept)), paths=kept)
        most = 1 + self.width + (depth - 1) * self.width**2  # all that are scored
        return replace(self, depth=depth, nodes=min(nodes, self.nodes, most))


@dataclass(frozen=True)
class Followed(TreeConfig):
    """In a drafter's tree's place while its ranks are counted (eval/ranks.py): along a text that is known, the `width`
    likeliest children of each right node."""

    text: tuple[int, ...] = ()
    """The right tokens after the pending one."""

    @classmethod
    def along(cls, text: Sequence[int], width: int) -> Followed:
        return cls("dynamic", depth=len(text), width=width, nodes=1 + len(text) * width, text=tuple(text))


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
    if isinstance(config, Followed):
        return _followed(config, root, scores, ids)
    chance = config.draw and generator is not None and sampling.temperature > 0
    if config.kind == "chain":
        if chance:
            return drawn_chain(config.depth, root, scores, sampling, generator, ids, vocab_size)
        return _likeliest([(0,) * d for d in range(1, config.depth + 1)], root, scores, ids)
    if config.kind == "static" and chance:
        return drawn_tree(config.known_paths(), root, scores, sampling, generator, ids, vocab_size)
    if config.kind == "static":
        return _likeliest(config.known_paths(), root, scores, ids)
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


def _likeliest(paths: Sequence[Path], tree: TokenTree, scores: Expand, ids: Tensor | None) -> TokenTree:
    """Nodes by rank; a chain is the paths (0), (0, 0), …"""
    rows, start = tree.tokens.shape[0], 0
    grown, order = levels(paths)
    for level in grown:
        width = max(level.ranks) + 1
        logits = scores(tree, start)
        best = logits.argmax(-1, keepdim=True) if width == 1 else logits.topk(width, -1).indices  # [B, n, width]
        parents = torch.tensor(level.parents, device=best.device)
        tokens = best[:, parents - start, torch.tensor(level.ranks, device=best.device)]
        start = tree.nodes
        tree = tree.extended(tokens if ids is None else ids[tokens], parents.expand(rows, -1))
    return tree.arranged(order)


def _followed(config: Followed, tree: TokenTree, scores: Expand, ids: Tensor | None) -> TokenTree:
    """Ranks in order below each right node, down to the first one whose right child is not among them."""
    if tree.tokens.shape[0] != 1:
        raise ValueError(f"a known text is followed in one row, got {tree.tokens.shape[0]}")
    chain, right = tree, 0
    for depth, token in enumerate(config.text):
        logits = scores(chain, depth)[:, 0]
        best = logits.topk(min(config.width, logits.shape[-1]), -1).indices
        best = best if ids is None else ids[best]
        rank = (best[0] == token).nonzero()[:, 0]
        first = tree.nodes
        tree = tree.extended(best, torch.full_like(best, right))
        if not len(rank):
            break
        right = first + int(rank)
        chain = chain.extended(best[:, rank], torch.full_like(best[:, rank], depth))
    return tree


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
        work = work.extended(token.gather(1, chosen), work_parents)
    pool_tokens, pool_parents, pool_scores = (torch.cat(part, 1) for part in (tokens, parents, totals))
    # Stable: a child never scores above its parent, and on a tie the parent, which comes first, wins.
    # The order stays: nodes then lie by score, so that a smaller budget would have been the first of them (cost.py).
    best = pool_scores.sort(dim=1, descending=True, stable=True).indices[:, : config.nodes - 1]
    renumber = torch.zeros_like(pool_parents).scatter(
        1, best, torch.arange(1, best.shape[1] + 1, device=best.device).expand(rows, -1)
    )
    above = pool_parents.gather(1, best)
    kept = torch.where(above == ROOT, 0, renumber.gather(1, above.clamp(min=0)))
    return root.extended(pool_tokens.gather(1, best), kept)
