import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from makers import paths

from specdec import Sampling, UserError
from specdec.drafter import Context
from specdec.search import Followed, TreeConfig, grow

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


def run(config, seed=0, ids=None, sampling=None, generator=None):
    logits_of = scorer(seed)
    calls = []

    def expand(tree, start):
        calls.append((start, tree.nodes))
        return torch.stack([logits_of(path_of(tree, n)) for n in range(start, tree.nodes)])[None]

    context = Context(torch.tensor([[3]]), torch.tensor([1]), None, torch.tensor([0]))
    tree = grow(config, context, expand, sampling or Sampling(), generator, ids, VOCAB)
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


@st.composite
def drawable_paths(draw):
    """A static tree's paths, lower ranks first."""
    found = []
    for _ in range(draw(st.integers(1, 10))):
        free = [(*parent, sum(path[:-1] == parent for path in found)) for parent in [(), *found]]
        found.append(draw(st.sampled_from([path for path in free if path[-1] < 4 and len(path) < 5])))
    return [list(path) for path in found]


def ranks_of(tree, logits_of, node):
    path = path_of(tree, node)
    order = [logits_of(path[:i]).argsort(descending=True).tolist() for i in range(1, len(path))]
    return [ranks.index(token) for ranks, token in zip(order, path[1:], strict=True)]


@given(st.integers(0, 50), paths())
def test_a_static_trees_nodes_are_its_paths_in_their_order(seed, chosen):
    tree, logits_of = run(TreeConfig(kind="static", paths=chosen), seed)
    assert [ranks_of(tree, logits_of, node) for node in range(1, tree.nodes)] == chosen
    assert all(parent < node for node, parent in enumerate(tree.parents[0].tolist()))


@given(st.integers(0, 50), paths(), st.integers(2, 11), st.integers(1, 5))
def test_a_part_is_the_beginning_of_the_tree(seed, chosen, nodes, depth):
    whole = TreeConfig(kind="static", paths=chosen)
    part = whole.limited(nodes, depth)
    (large, _), (small, _) = run(whole, seed), run(part, seed)
    shallow = [node for node, deep in enumerate(large.depths()[0].tolist()) if deep <= depth]
    assert [path_of(small, node) for node in range(small.nodes)] == [path_of(large, n) for n in shallow[:nodes]]
    assert (small.nodes, int(small.depths().max())) == (part.most_nodes, part.longest)
    assert part.limited(nodes, depth) == part


@given(st.integers(0, 50), drawable_paths(), st.integers(2, VOCAB))
def test_a_drawn_tree_carries_each_nodes_law_beside_it(seed, chosen, support):
    """Also where the law's support holds fewer tokens than there are children: those and what is below are padding."""
    config = TreeConfig(kind="static", draw=True, paths=chosen)
    sampling = Sampling(1.0, top_k=support)
    tree, logits_of = run(config, seed, sampling=sampling, generator=torch.Generator().manual_seed(seed))
    index = {(): 0} | {tuple(path): node for node, path in enumerate(chosen, 1)}
    for node, path in enumerate(chosen, 1):
        missing = any(rank >= support for rank in path)
        assert int(tree.parents[0, node]) == (-2 if missing else index[tuple(path[:-1])])
    for node, path in enumerate([[], *chosen]):
        law = tree.draft_probs[0, node]
        leaf = not any(len(other) == len(path) + 1 for other in chosen)  # no level below this one
        if node and int(tree.parents[0, node]) < 0:
            continue
        expected = torch.zeros(VOCAB) if leaf else sampling.probs(logits_of(path_of(tree, node)))
        assert torch.allclose(law, expected.to(law.dtype))
        children = tree.tokens[0, tree.parents[0] == node].tolist()
        assert len(set(children)) == len(children)
        assert bool((law[children] > 0).all())


@given(st.integers(0, 50), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), st.integers(1, VOCAB))
def test_a_followed_text_has_the_likeliest_children_of_each_right_node(seed, text, width):
    config = Followed.along(text, width)
    tree, logits_of = run(config, seed)
    assert tree.nodes <= config.most_nodes
    right, first = 0, 1
    for depth, token in enumerate(text):
        children = range(first, first + width)
        assert tree.parents[0, list(children)].tolist() == [right] * width
        likeliest = logits_of([3, *text[:depth]]).argsort(descending=True)[:width].tolist()
        assert tree.tokens[0, list(children)].tolist() == likeliest
        first += width
        if token not in likeliest:
            break
        right = children[likeliest.index(token)]
    assert first == tree.nodes, "nothing below a wrong path"


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
        Followed.along([7, 2], 5),
    ):
        tree, _ = run(config, ids=ids)
        assert set(tree.tokens[0, 1:].tolist()) <= set(ids.tolist())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "bush"}, "tree.kind: 'bush'"),
        ({"depth": 0}, "tree.depth"),
        ({"kind": "static", "paths": [[]]}, "tree.paths must hold"),
        ({"kind": "static", "paths": [[0], [0]]}, "tree.paths must hold different"),
        ({"kind": "static", "paths": [[0, 1], [0]]}, r"\[0, 1\] is there but its parent \[0\] is not, or comes after"),
        ({"kind": "static", "paths": [[1]], "draw": True}, r"with tree.draw, \[1\] must come after \[0\]"),
    ],
)
def test_bad_trees_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        TreeConfig(**settings)


def test_a_static_tree_without_paths_is_to_be_measured():
    tree = TreeConfig(kind="static", nodes=12, depth=3)
    assert tree.unmeasured
    assert (tree.most_nodes, tree.longest) == (12, 3), "what it may become"
    assert not TreeConfig(kind="static", paths=[[0]]).unmeasured
    for use in (lambda: run(tree), lambda: tree.limited(4, 2)):
        with pytest.raises(UserError, match=r"tree\.paths is empty: training measures .*eval\.ranks\.measured_tree"):
            use()


@pytest.mark.parametrize("tree", [TreeConfig(depth=3), TreeConfig(kind="static", paths=[[0]])])
def test_a_part_without_draft_tokens_is_none(tree):
    for nodes, depth in ((1, 1), (2, 0)):
        with pytest.raises(UserError, match="2 nodes or more"):
            tree.limited(nodes, depth)
