"""How often a drafter's k-th candidate is the right one, depth by depth; and the static tree with most of that in it.

A known text is followed: from a place in it the drafter proposes its likeliest children of every right node, as deep as
they are right (search.Followed), so that each count is given a right path before it, which is what a product of them
needs. Which paths to take is specdec/paths.py's subject (algorithms §3.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.decode import generate
from specdec.drafter import Context
from specdec.drafters.none import Plain
from specdec.errors import UserError
from specdec.paths import best_paths
from specdec.planned import Plannable
from specdec.sampling import Sampling
from specdec.search import Followed, TreeConfig
from specdec.stopping import Limits
from specdec.target import Target
from specdec.tree import TokenTree

RANKS = 8
"""Candidates of each node that are looked at."""
ROWS = 16
"""Prompts answered at a time."""


@dataclass(frozen=True)
class Ranked:
    """hits[d][k]: how often candidate k was right at depth d (0: the first draft token). tries[d]: how often that depth
    was reached: every token before it in the text was among the candidates."""

    hits: list[list[int]]
    tries: list[int]

    @property
    def accuracies(self) -> list[list[float]]:
        """P(candidate k is right at depth d, given that the path to it is), as deep as the drafter ever came."""
        return [[hit / count for hit in row] for row, count in zip(self.hits, self.tries, strict=True) if count]


def measured_tree(
    target: Target, drafter: Plannable, prompts: Sequence[Sequence[int]], tree: TreeConfig, max_new_tokens: int
) -> tuple[TreeConfig, Ranked]:
    """`tree` with the paths that bring most on the target's own greedy answers to `prompts` (lists of ids), and what
    was counted for it.

    At most tree.nodes nodes, root included, tree.depth deep. Takes a drafting round for every tree.depth + 1 tokens.
    Raises UserError for a tree that is not static, and where nothing could be counted.
    """
    if tree.kind != "static":
        raise UserError(f"tree.kind: only a static tree's paths can be measured, got '{tree.kind}'")
    limits = Limits(max_new_tokens, target.stop_tokens)
    answers = [one.tokens for one in generate(target, Plain(), prompts, limits, rows=ROWS)]
    ranked = count_ranks(target, drafter, list(zip(prompts, answers, strict=True)), tree.depth)
    if not ranked.accuracies:
        raise UserError(
            f"tree.paths cannot be measured: {type(drafter).__name__} ranked no candidates on {len(prompts)} prompts "
            f"with {sum(map(len, answers))} tokens of answers. Give more or longer ones, or tree.paths"
        )
    return dataclasses.replace(tree, paths=best_paths(ranked.accuracies, tree.nodes - 1)), ranked


def count_ranks(
    target: Target,
    drafter: Plannable,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    depth: int,
    ranks: int = RANKS,
) -> Ranked:
    """Follow the answers of (prompt, answer) pairs, a round from every (depth + 1)-th token; each is read once."""
    ranked = Ranked([[0] * ranks for _ in range(depth)], [0] * depth)
    tree = drafter.tree
    try:
        for prompt, answer in texts:
            _follow(target, drafter, [*prompt, *answer], len(prompt), ranked)
    finally:
        drafter.tree = tree
    return ranked


def _follow(target: Target, drafter: Plannable, text: list[int], prompt: int, ranked: Ranked) -> None:
    """Count one text, whose first `prompt` tokens are given."""
    depth, ranks = len(ranked.hits), len(ranked.hits[0])
    tokens = torch.tensor([text], device=target.device)
    features = target.features(tokens, drafter.taps) if drafter.taps else None
    drafter.tree = Followed.along([0] * depth, ranks)  # the largest there will be
    drafter.reset(1, len(text) + depth)
    seen = 0
    for length in range(prompt + 1, len(text), depth + 1):
        known = text[length : length + depth]
        drafter.tree = Followed.along(known, ranks)
        new = None if features is None else features[:, seen : length - 1]
        lengths, counts = torch.tensor([[length], [length - 1 - seen]], device=target.device)
        # Nothing past the pending token is shown.
        proposed = drafter.propose(Context(tokens[:, :length], lengths, new, counts), Sampling(), None)
        seen = length - 1
        for level, rank in enumerate(right_ranks(proposed, known)):
            ranked.tries[level] += 1
            if rank is not None:
                ranked.hits[level][rank] += 1


def right_ranks(tree: TokenTree, text: Sequence[int]) -> list[int | None]:
    """Along `text` from the root of a tree of one row: which child of each right node is right; None, and the end,
    where none of them is."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    found: list[int | None] = []
    node = 0
    for right in text:
        children = [child for child in range(node + 1, len(tokens)) if parents[child] == node]
        if not children:
            break
        rank = next((rank for rank, child in enumerate(children) if tokens[child] == right), None)
        found.append(rank)
        if rank is None:
            break
        node = children[rank]
    return found
