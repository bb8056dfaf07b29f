import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.tree import PAD, ROOT, TokenTree


@st.composite
def parent_lists(draw):
    count = draw(st.integers(1, 12))
    return [ROOT] + [draw(st.integers(0, n - 1)) for n in range(1, count)]


def walk(parents, node):
    """The obvious way: follow parents up."""
    path = [node]
    while parents[node] >= 0:
        node = parents[node]
        path.append(node)
    return path


@given(parent_lists())
def test_ancestors_and_depths_agree_with_following_parents(parents):
    tree = TokenTree(torch.zeros(1, len(parents), dtype=torch.long), torch.tensor([parents]))
    reach, depths = tree.ancestors()[0], tree.depths()[0]
    for node in range(len(parents)):
        path = walk(parents, node)
        assert set(reach[node].nonzero()[:, 0].tolist()) == set(path)
        assert depths[node] == len(path) - 1


def test_chain_is_a_tree():
    chain = TokenTree.chain(torch.tensor([[4, 5, 6]]))
    assert chain.parents.tolist() == [[ROOT, 0, 1]]
    assert chain.depths().tolist() == [[0, 1, 2]]


def test_padding_sees_only_itself():
    tree = TokenTree(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[ROOT, 0, PAD]]))
    assert tree.ancestors()[0, 2].tolist() == [False, False, True]
