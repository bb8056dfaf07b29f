import pytest
import torch

from specdec.align import align, any_packed, positions_within, read_ahead, runs, visible_within


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


DOCUMENTS = torch.tensor([[4, 4, 4, 7, 7, -1, -1], [5, 5, 5, 5, -1, -1, -1], [2, 3, 3, 6, 6, 6, 6]])


def test_positions_begin_anew_with_each_document():
    at = positions_within(DOCUMENTS)
    assert at[0, :5].tolist() == [0, 1, 2, 0, 1]
    assert at[1, :4].tolist() == [0, 1, 2, 3]
    assert at[2].tolist() == [0, 0, 1, 0, 1, 2, 3]
    padding = at[DOCUMENTS < 0]
    assert padding.min() >= 0
    assert padding.max() <= 3, "no further than a document reaches: learned positions end somewhere"


def test_a_position_sees_its_own_document_up_to_itself():
    visible = visible_within(DOCUMENTS)
    for row, documents in enumerate(DOCUMENTS.tolist()):
        for query, document in enumerate(documents):
            seen = visible[row, query].nonzero()[:, 0].tolist()
            if document >= 0:
                assert seen == [key for key in range(query + 1) if documents[key] == document]
            assert query in seen, "padding too must see something: a softmax over nothing is no number"


def test_one_document_a_row_is_plain_causal_attention():
    documents = torch.tensor([[0, 0, 0, 0], [1, 1, -1, -1]])
    assert torch.equal(visible_within(documents), torch.ones(4, 4).tril().bool().expand(2, 4, 4))
    assert torch.equal(positions_within(documents), torch.arange(4).expand(2, 4))
    assert not any_packed(documents)
    assert any_packed(DOCUMENTS)


def test_runs_are_counted_from_each_position_on():
    flags = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [0, 0, 1, 0, 1, 1, 0]]).bool()
    assert runs(flags, 3).tolist() == [[2, 1, 0, 3, 3, 2, 1], [0, 0, 1, 0, 2, 1, 0]]
    assert torch.equal(runs(flags, 1), flags.long())
