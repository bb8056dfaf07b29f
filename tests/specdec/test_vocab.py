import pytest
import torch

from specdec import UserError
from specdec.vocab import choose_vocab

COUNTS = torch.tensor([0.0, 5, 1, 7, 0, 3])


def test_most_frequent_sorted_with_the_required():
    assert choose_vocab(COUNTS, 3, []).tolist() == [1, 3, 5]
    assert choose_vocab(COUNTS, 3, [4]).tolist() == [1, 3, 4]
    assert choose_vocab(COUNTS, 6, [0]).tolist() == [0, 1, 2, 3, 4, 5]


def test_too_many_required():
    with pytest.raises(UserError, match="2 special"):
        choose_vocab(COUNTS, 1, [0, 4])
