"""Paths of ranks: the best ones against brute force, and what measured accuracies may do to them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import UserError, best_paths
from specdec.paths import closed, levels

SHARES = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=3)


def value(rows, path):
    product = 1.0
    for depth, rank in enumerate(path):
        product *= rows[depth][rank]
    return product


@given(SHARES, st.integers(1, 9))
def test_best_paths_equals_brute_force(rows, nodes):
    """Whatever was measured: no other set of as many paths has more, and each beginning is the best of its size."""
    found = best_paths(rows, nodes)
    rows = [sorted(row, reverse=True) for row in rows]
    every = [p for d in range(len(rows)) for p in itertools.product(*(range(len(row)) for row in rows[: d + 1]))]
    best = sorted((value(rows, path) for path in every), reverse=True)[:nodes]
    assert [value(rows, path) for path in found] == pytest.approx(best)
    assert len(found) == min(nodes, len(every))
    closed(found, drawn=True)


@pytest.mark.parametrize("seed", range(4))
def test_no_tree_of_as_many_nodes_has_more(seed):
    """All trees of three nodes below the root, over two ranks and two depths."""
    import random

    rows = [sorted((random.Random(10 * seed + d).random() for _ in range(2)), reverse=True) for d in range(2)]
    every = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    trees = [t for t in itertools.combinations(every, 3) if all(len(p) == 1 or p[:1] in t for p in t)]
    best = max(sum(value(rows, path) for path in tree) for tree in trees)
    assert sum(value(rows, path) for path in best_paths(rows, 3)) == pytest.approx(best)


def test_accuracies_of_zero_come_last_and_lower_ranks_first():
    assert best_paths([[0.5, 0.0, 0.0], [0.0, 0.0]], 4) == [[0], [1], [2], [0, 0]]
    assert best_paths([[0.5, 0.0, 0.3]], 3) == [[0], [1], [2]]


@pytest.mark.parametrize("rows", [[], [[]], [[0.5], []], [[1.5]], [[-0.1]], [[float("nan")]]])
def test_what_is_no_probability_is_refused(rows):
    with pytest.raises(UserError, match="accuracies must hold"):
        best_paths(rows, 3)


def test_levels_and_where_each_path_comes_to_lie():
    grown, order = levels([(0,), (0, 0), (1,), (0, 0, 2), (1, 0)])
    assert [(level.parents, level.ranks) for level in grown] == [([0, 0], [0, 1]), ([1, 2], [0, 0]), ([3], [2])]
    assert order == [0, 1, 3, 2, 5, 4]
