import pytest
import torch

from specdec.accept import target_walk
from specdec.tree import TokenTree


def one_hot(*tokens, vocab=8):
    return torch.nn.functional.one_hot(torch.tensor([tokens]), vocab).float()


def test_greedy_walk_follows_the_target_and_gives_its_correction():
    # root 3 -> {4, 5}; 5 -> {6}
    tree = TokenTree(torch.tensor([[3, 4, 5, 6]]), torch.tensor([[-1, 0, 0, 2]]))
    verdict = target_walk(tree, one_hot(5, 0, 6, 7), None)
    assert verdict.paths.nodes.tolist() == [[0, 2, 3]]
    assert verdict.paths.lengths.tolist() == [3]
    assert verdict.next_tokens.tolist() == [7]


def test_rows_walk_on_their_own():
    tree = TokenTree.chain(torch.tensor([[3, 4, 5], [3, 4, 5]]))
    probs = torch.cat([one_hot(4, 5, 6), one_hot(0, 5, 6)])
    verdict = target_walk(tree, probs, None)
    assert verdict.paths.lengths.tolist() == [3, 1]
    assert verdict.next_tokens.tolist() == [6, 0]


def test_a_padding_node_is_never_a_child():
    tree = TokenTree(torch.tensor([[3, 4]]), torch.tensor([[-1, -2]]))
    assert target_walk(tree, one_hot(4, 4), None).paths.lengths.tolist() == [1]


def test_sampled_walk_emits_the_targets_distribution(generator):
    """First emitted token of a one-child tree: accepted or corrected, it is a draw from the root's row."""
    rows, probs = 40_000, torch.tensor([0.1, 0.2, 0.4, 0.3])
    tree = TokenTree.chain(torch.tensor([[0, 2]]).expand(rows, -1))
    verdict = target_walk(tree, probs.expand(rows, 2, -1), generator)
    first = torch.where(verdict.paths.lengths == 2, torch.tensor(2), verdict.next_tokens)
    counts = torch.bincount(first, minlength=4).double()
    expected = probs.double() * rows
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom, p = 0.001


def test_trees_drawn_by_chance_are_refused():
    tree = TokenTree(torch.tensor([[3]]), torch.tensor([[-1]]), torch.ones(1, 1, 8))
    with pytest.raises(ValueError, match="without chance"):
        target_walk(tree, one_hot(4), None)
