import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import UserError
from train.losses import CHUNK, LOSSES, Total, head_loss, kl, loss_named, total_variation


@st.composite
def pairs(draw):
    seed = draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(3, 11, generator=generator, dtype=torch.float64) * 3 for _ in range(2))


@given(pairs())
def test_every_loss_is_zero_only_at_the_teacher(pair):
    p, log_q = pair[0].softmax(-1), pair[1].log_softmax(-1)
    for loss in LOSSES.values():
        assert torch.allclose(loss(p, p.log())[0], torch.zeros(3, dtype=torch.float64), atol=1e-9)
        assert bool((loss(p, log_q)[0] > 0).all())


@given(pairs())
def test_total_variation_is_one_minus_acceptance(pair):
    p, q = pair[0].softmax(-1), pair[1].softmax(-1)
    assert torch.allclose(total_variation(p, q.log())[0], 1 - torch.minimum(p, q).sum(-1))


def test_kl_with_a_one_hot_teacher_is_cross_entropy():
    p = torch.tensor([[0.0, 1.0, 0.0]])
    log_q = torch.tensor([[1.0, 2.0, 3.0]]).log_softmax(-1)
    assert torch.allclose(kl(p, log_q)[0], -log_q[:, 1])


def test_unknown_loss_is_named():
    with pytest.raises(UserError, match=r"'kll'.*Did you mean 'kl'"):
        loss_named("kll")


def test_totals_add_before_they_divide():
    a, b = Total(torch.tensor(6.0), torch.tensor(2.0)), Total(torch.tensor(1.0), torch.tensor(5.0))
    assert float((a + b).mean()) == 1.0


def by_the_book(name, p, log_q):
    """The definitions, for autograd."""
    divergence = (p * (p.log() - log_q)).sum(-1)
    variation = 0.5 * (p - log_q.exp()).abs().sum(-1)
    weight = torch.exp(-3 * (1 - variation.detach()))
    return {"kl": divergence, "tv": variation, "lk_hybrid": weight * divergence + (1 - weight) * variation}[name]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows", [1, 7, CHUNK, 2 * CHUNK + 5])
def test_values_and_gradients_are_those_of_the_definitions(name, rows):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(30, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    p = (2 * torch.randn(rows, 30, generator=generator, dtype=torch.float64)).softmax(-1)
    weights = torch.rand(rows, generator=generator, dtype=torch.float64)
    logits = hidden @ head.T
    expected = (weights * by_the_book(name, p, logits.log_softmax(-1))).sum()
    gradients = torch.autograd.grad(3 * expected, [hidden, head])
    found, agree = head_loss(hidden, head, weights, lambda piece: p[piece], LOSSES[name])
    assert torch.allclose(found, expected)
    assert torch.equal(agree, logits.argmax(-1) == p.argmax(-1))
    for one, other in zip(torch.autograd.grad(3 * found, [hidden, head]), gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-12)
