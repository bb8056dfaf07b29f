import pytest
import torch

from specdec.align import align, read_ahead


def slots(horizon, mask=None, documents=None):
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1]]).bool() if mask is None else mask
    documents = torch.zeros_like(tokens) if documents is None else documents
    return align(tokens, mask, documents, torch.arange(6)[None], horizon)


@pytest.mark.parametrize("horizon", [1, 2, 3, 4])
def test_the_table(horizon):
    """At slot 1: newest input x_h, label x_{1+h}, teacher row h, scored by the label's own mask."""
    s = slots(horizon)
    assert s.inputs[0, 1] == 10 + horizon
    assert s.labels[0, 1] == 11 + horizon
    assert s.teacher[0, 1] == horizon
    assert s.scored[0, 1] == (1 + horizon >= 3)


def test_no_slot_past_the_end_is_scored():
    for horizon in (1, 2, 5, 9):
        scored = slots(horizon, mask=torch.ones(1, 6).bool()).scored[0]
        assert scored.sum() == max(0, 6 - horizon)


def test_no_slot_predicts_into_another_document_or_padding():
    documents = torch.tensor([[0, 0, 0, 1, 1, -1]])
    scored = slots(2, mask=torch.ones(1, 6).bool(), documents=documents).scored[0]
    assert scored.tolist() == [True, False, False, False, False, False]


def test_horizon_must_be_positive():
    with pytest.raises(ValueError, match="horizon"):
        slots(0)


def test_decoding_reads_the_same_token_as_training():
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15]])
    trained = slots(2).inputs[0]
    assert read_ahead(tokens, torch.tensor([1]), 3)[0].tolist() == trained[1:4].tolist()
