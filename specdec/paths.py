"""Paths of ranks, which a static tree is made of: rank 0 is a node's likeliest child.

Their order is the order of the tree's nodes: its first n nodes are its first n paths, so that a smaller tree is the
beginning of a larger one. Growing them is search.py's and drawn.py's subject, measuring accuracies eval/ranks.py's.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.errors import UserError

Path = tuple[int, ...]


def closed(paths: Sequence[Sequence[int]], drawn: bool = False) -> list[Path]:
    """The paths in their order. Raises UserError for one that comes before its parent, or twice.

    drawn: that rank k is the k-th draw: a node's children are then verified in the order of drawing, so that every
    lower rank must come first.
    """
    found = [tuple(path) for path in paths]
    if not found or len(set(found)) < len(found) or any(rank < 0 for path in found for rank in path) or () in found:
        raise UserError("tree.paths must hold different, non-empty lists of ranks from 0 up, e.g. [[0], [1], [0, 0]]")
    known: set[Path] = {()}
    for path in found:
        *above, rank = path
        if tuple(above) not in known:
            raise UserError(f"tree.paths: {list(path)} is there but its parent {above} is not, or comes after it")
        if drawn and rank and (*above, rank - 1) not in known:
            raise UserError(
                f"tree.paths: with tree.draw, {list(path)} must come after {[*above, rank - 1]}, which is drawn before"
            )
        known.add(path)
    return found


def best_paths(accuracies: Sequence[Sequence[float]], nodes: int) -> list[list[int]]:
    """The static tree with most expected accepted tokens: accuracies[d][k] = P(rank k is right at depth d).

    Takes the `nodes` paths of highest product, highest first, root not counted (Medusa 2401.10774 §2.3.3; algorithms
    §3.1). No product is above that of the path's parent or of the rank before, so that parents and lower ranks come
    first; what was measured may rise from one rank to the next by chance, and is taken in falling order. Raises
    UserError for accuracies that are no probabilities.
    """
    rows = [sorted(row, reverse=True) for row in accuracies]
    if not rows or not all(rows) or not all(0 <= share <= 1 for row in rows for share in row):
        raise UserError("accuracies must hold a non-empty list of numbers from 0 to 1 for each depth")
    chosen: list[list[int]] = []
    heap: list[tuple[float, int, Path, float]] = [(-rows[0][0], 1, (0,), 1.0)]  # the last: the parent's product
    while heap and len(chosen) < nodes:
        negative, depth, path, above = heapq.heappop(heap)
        chosen.append(list(path))
        *parent, rank = path
        if rank + 1 < len(rows[depth - 1]):
            heapq.heappush(heap, (-above * rows[depth - 1][rank + 1], depth, (*parent, rank + 1), above))
        if depth < len(rows):
            heapq.heappush(heap, (negative * rows[depth][0], depth + 1, (*path, 0), -negative))
    return chosen


@dataclass(frozen=True)
class Level:
    """Nodes of one depth as they are grown, level after level: each one's parent, as a node, and its rank."""

    parents: list[int]
    ranks: list[int]


def levels(paths: Sequence[Path]) -> tuple[list[Level], list[int]]:
    """How to grow paths level by level; and then, root first, the node that each path has become."""
    order = sorted(paths, key=len)  # stable: siblings stay in their order
    node = {(): 0} | {path: index for index, path in enumerate(order, 1)}
    found = []
    for depth in range(1, len(order[-1]) + 1):
        level = [path for path in order if len(path) == depth]
        found.append(Level([node[path[:-1]] for path in level], [path[-1] for path in level]))
    return found, [0, *(node[path] for path in paths)]
