import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec import Sampling, UserError
from specdec.sampling import Coupled, draw, seen_on_paths
from specdec.tree import TokenTree

LOGITS = torch.tensor([[2.0, 1.0, 0.5, -1.0, 3.0]])


def test_greedy_is_one_hot_on_the_best():
    assert Sampling(0.0).probs(LOGITS).tolist() == [[0, 0, 0, 0, 1]]


def test_temperature_is_a_softmax():
    assert torch.allclose(Sampling(0.5).probs(LOGITS), (LOGITS / 0.5).softmax(-1))


def test_top_k_and_top_p_keep_the_likeliest():
    assert (Sampling(1.0, top_k=2).probs(LOGITS)[0] > 0).tolist() == [True, False, False, False, True]
    kept = Sampling(1.0, top_p=0.7).probs(LOGITS)[0]
    probs = LOGITS.softmax(-1)[0]
    assert (kept > 0).tolist() == [True, False, False, False, True]
    assert probs[4] < 0.7 <= probs[4] + probs[0]
    assert (Sampling(1.0, top_p=0.01).probs(LOGITS)[0] > 0).sum() == 1


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**bad)


def test_draw_has_the_distribution_and_never_a_zero(generator):
    probs = torch.tensor([0.5, 0.0, 0.3, 0.0, 0.2])
    count = 40_000
    counts = torch.bincount(draw(probs.expand(count, -1), generator), minlength=5).double()
    assert counts[1] == counts[3] == 0
    expected = probs.double() * count
    chi2 = ((counts - expected)[[0, 2, 4]] ** 2 / expected[[0, 2, 4]]).sum()
    assert chi2 < 13.8  # 2 degrees of freedom, p = 0.001


@given(
    st.floats(0.2, 2.0),
    st.integers(0, 12),
    st.floats(0.1, 1.0),
    st.floats(0.0, 0.5),
    st.floats(0.5, 2.0),
    st.integers(0, 1000),
)
def test_processors_equal_those_of_transformers(temperature, top_k, top_p, min_p, penalty, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 12, generator=generator, dtype=torch.float64) * 2
    ids = torch.randint(0, 12, (2, 5), generator=generator)
    seen = torch.zeros(2, 12, dtype=torch.bool).scatter_(1, ids, True)
    ours = Sampling(temperature, top_k, top_p, min_p, penalty).probs(logits, seen)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    theirs = TemperatureLogitsWarper(temperature)(ids, theirs)
    if top_k:
        theirs = TopKLogitsWarper(top_k)(ids, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(ids, theirs)
    if min_p > 0:
        theirs = MinPLogitsWarper(min_p)(ids, theirs)
    assert torch.allclose(ours, theirs.softmax(-1), atol=1e-9)


def test_history_is_the_text_and_the_nodes_own_ancestors():
    tokens, lengths = torch.tensor([[1, 2, 9]]), torch.tensor([2])
    tree = TokenTree(torch.tensor([[2, 3, 4, 5]]), torch.tensor([[-1, 0, 0, 1]]))
    seen = seen_on_paths(tokens, lengths, tree, 10)[0]
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [[1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 3, 5]]


def test_coupled_coins_depend_on_seed_row_and_position_only():
    whole, part = Coupled(3, 3), Coupled(3, 3)
    part.select(torch.tensor([2]))
    positions = torch.tensor([5, 5, 5])
    flips = whole.flip(positions)
    assert len(set(flips.tolist())) == 3
    assert part.flip(positions[:1]).item() == flips[2]
    assert whole.flip(positions).tolist() == flips.tolist()
    assert Coupled(4, 3).flip(positions).tolist() != flips.tolist()


def test_coupled_coins_are_uniform():
    coins = Coupled(0, 200)
    values = torch.cat([coins.flip(torch.full((200,), p)) for p in range(200)])
    counts = torch.histc(values, 20, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 43.8  # 19 degrees of freedom, p = 0.001
    assert abs(float(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1])) < 0.02
