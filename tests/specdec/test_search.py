import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import Sampling, UserError
from specdec.drafter import Context
from specdec.search import TreeConfig, best_paths, closed, grow

VOCAB = 7


def scorer(seed):
    """A drafter whose logits are a fixed function of the path: the same node always scores the same."""

    def logits_of(path):
        generator = torch.Generator().manual_seed(seed * 7919 + hash(tuple(path)) % 100_000)
        return torch.randn(VOCAB, generator=generator, dtype=torch.float64) * 2

    return logits_of


def path_of(tree, node):
    path = []
    while node >= 0:
        path.append(int(tree.tokens[0, node]))
        node = int(tree.parents[0, node])
    return path[::-1]


def run(config, seed=0, ids=None):
    logits_of = scorer(seed)
    calls = []

    def expand(tree, start):
        calls.append((start, tree.nodes))
        return torch.stack([logits_of(path_of(tree, n)) for n in range(start, tree.nodes)])[None]

    context = Context(torch.tensor([[3]]), torch.tensor([1]), None, torch.tensor([0]))
    tree = grow(config, context, expand, Sampling(), None, ids, VOCAB)
    starts = [start for start, _ in calls]
    assert starts == [0, *[end for _, end in calls][:-1]], "each node is expanded once, in order"
    return tree, logits_of


def score(logits_of, path):
    """Sum of log-probabilities of a path below the root."""
    return sum(float(logits_of(path[:i]).log_softmax(-1)[path[i]]) for i in range(1, len(path)))


@pytest.mark.parametrize("seed", range(5))
def test_a_chain_takes_the_likeliest_each_time(seed):
    tree, logits_of = run(TreeConfig(depth=4), seed)
    path = path_of(tree, 4)
    assert [int(logits_of(path[:i]).argmax()) for i in range(1, 5)] == path[1:]


@pytest.mark.parametrize("seed", range(5))
def test_static_nodes_have_their_ranks(seed):
    paths = [[0], [1], [2], [0, 0], [1, 1], [0, 0, 2]]
    tree, logits_of = run(TreeConfig(kind="static", paths=paths), seed)
    found = set()
    for node in range(1, tree.nodes):
        path = path_of(tree, node)
        order = [logits_of(path[:i]).argsort(descending=True).tolist() for i in range(1, len(path))]
        found.add(tuple(ranks.index(token) for ranks, token in zip(order, path[1:], strict=True)))
    assert found == {tuple(path) for path in paths}


@pytest.mark.parametrize("seed", range(8))
def test_a_dynamic_tree_that_prunes_no_beam_is_the_best_there_is(seed):
    """With beams as wide as the vocabulary's square the search is exhaustive: brute force must agree."""
    depth, nodes = 2, 9
    tree, logits_of = run(TreeConfig(kind="dynamic", depth=depth, width=VOCAB, nodes=nodes), seed)
    every = [(3, *p) for d in (1, 2) for p in itertools.product(range(VOCAB), repeat=d)]
    best = sorted(every, key=lambda path: -score(logits_of, path))[: nodes - 1]
    assert {tuple(path_of(tree, n)) for n in range(1, tree.nodes)} == set(best)


@given(st.integers(0, 50), st.integers(1, 4), st.integers(1, 4), st.integers(2, 20))
def test_dynamic_trees_are_trees(seed, depth, width, nodes):
    tree, _ = run(TreeConfig(kind="dynamic", depth=depth, width=width, nodes=nodes), seed)
    assert tree.nodes <= nodes
    parents = tree.parents[0].tolist()
    assert parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert int(tree.depths().max()) <= depth
    children = [(parents[n], int(tree.tokens[0, n])) for n in range(1, tree.nodes)]
    assert len(children) == len(set(children)), "a token at most once under a parent"


def test_draft_ids_are_mapped_before_they_are_read():
    ids = torch.tensor([2, 3, 5, 7, 11, 13, 17])
    for config in (
        TreeConfig(depth=2),
        TreeConfig(kind="static", paths=[[0], [1], [0, 1]]),
        TreeConfig(kind="dynamic", depth=2, width=2, nodes=5),
    ):
        tree, _ = run(config, ids=ids)
        assert set(tree.tokens[0, 1:].tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("nodes", [1, 3, 6])
def test_best_paths_equals_brute_force(seed, nodes):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(3, 3, generator=generator).sort(1, descending=True).values.tolist()

    def value(path):
        product = 1.0
        for depth, rank in enumerate(path):
            product *= rows[depth][rank]
        return product

    every = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]
    expected = sorted(map(value, every), reverse=True)[:nodes]
    found = best_paths(rows, nodes)
    assert sorted(map(value, found), reverse=True) == pytest.approx(expected)
    closed(found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "bush"}, "tree.kind: 'bush'"),
        ({"depth": 0}, "tree.depth"),
        ({"kind": "static"}, "tree.paths must hold"),
        ({"kind": "static", "paths": [[0], [0]]}, "tree.paths must hold different"),
        ({"kind": "static", "paths": [[0, 1]]}, r"\[0, 1\] is there but its parent \[0\]"),
    ],
)
def test_bad_trees_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        TreeConfig(**settings)
