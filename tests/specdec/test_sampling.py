import pytest
import torch

from specdec import Sampling, UserError
from specdec.sampling import draw

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
