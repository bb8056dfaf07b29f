import pytest
import torch

from specdec.vocab import choose_vocab, coverage

COUNTS = torch.tensor([0.0, 5, 1, 7, 0, 3])


def test_most_frequent_sorted_with_the_required():
    assert choose_vocab(COUNTS, 3, []).tolist() == [1, 3, 5]
    assert choose_vocab(COUNTS, 3, [4]).tolist() == [1, 3, 4]
    assert choose_vocab(COUNTS, 6, [0]).tolist() == [0, 1, 2, 3, 4, 5]


def test_too_many_required():
    with pytest.raises(ValueError, match="2 required"):
        choose_vocab(COUNTS, 1, [0, 4])


def test_coverage():
    assert coverage(COUNTS, torch.tensor([1, 3])) == 12 / 16
