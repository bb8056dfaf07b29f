import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import UserError
from train.losses import LOSSES, Total, kl, loss_named, total_variation


@st.composite
def pairs(draw):
    seed = draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(3, 11, generator=generator, dtype=torch.float64) * 3 for _ in range(2))


@given(pairs())
def test_every_loss_is_zero_only_at_the_teacher(pair):
    p, log_q = pair[0].softmax(-1), pair[1].log_softmax(-1)
    for loss in LOSSES.values():
        assert torch.allclose(loss(p, p.log()), torch.zeros(3, dtype=torch.float64), atol=1e-9)
        assert bool((loss(p, log_q) > 0).all())


@given(pairs())
def test_total_variation_is_one_minus_acceptance(pair):
    p, q = pair[0].softmax(-1), pair[1].softmax(-1)
    assert torch.allclose(total_variation(p, q.log()), 1 - torch.minimum(p, q).sum(-1))


def test_kl_with_a_one_hot_teacher_is_cross_entropy():
    p = torch.tensor([[0.0, 1.0, 0.0]])
    log_q = torch.tensor([[1.0, 2.0, 3.0]]).log_softmax(-1)
    assert torch.allclose(kl(p, log_q), -log_q[:, 1])


def test_unknown_loss_is_named():
    with pytest.raises(UserError, match=r"'kll'.*Did you mean 'kl'"):
        loss_named("kll")


def test_totals_add_before_they_divide():
    a, b = Total(torch.tensor(6.0), torch.tensor(2.0)), Total(torch.tensor(1.0), torch.tensor(5.0))
    assert float((a + b).mean()) == 1.0
