import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import UserError
from train.losses import CHUNK, Total, accepted_weights, head_loss, kl, loss_named, overlaps, total_variation

DISTANCES = ("kl", "reverse_kl", "jsd:0.3", "tv", "log_acceptance", "lk_hybrid", "0.2*kl+3*tv")
OTHERS = ("ce", "top:3", "0.5*ce+top:2+0.1*jsd:0.5")
NO_LABEL = torch.full((3,), -1)


@st.composite
def pairs(draw):
    seed = draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(3, 11, generator=generator, dtype=torch.float64) * 3 for _ in range(2))


@given(pairs())
def test_every_loss_is_zero_only_at_the_teacher(pair):
    p, log_q = pair[0].softmax(-1), pair[1].log_softmax(-1)
    for loss in map(loss_named, DISTANCES):
        assert torch.allclose(loss(p, p.log(), NO_LABEL)[0], torch.zeros(3, dtype=torch.float64), atol=1e-9)
        assert bool((loss(p, log_q, NO_LABEL)[0] > 0).all())


@given(pairs())
def test_total_variation_is_one_minus_acceptance(pair):
    p, q = pair[0].softmax(-1), pair[1].softmax(-1)
    assert torch.allclose(total_variation(p, q.log(), NO_LABEL)[0], 1 - torch.minimum(p, q).sum(-1))


def test_kl_with_a_one_hot_teacher_is_cross_entropy():
    p = torch.tensor([[0.0, 1.0, 0.0]])
    log_q = torch.tensor([[1.0, 2.0, 3.0]]).log_softmax(-1)
    assert torch.allclose(kl(p, log_q, NO_LABEL[:1])[0], -log_q[:, 1])


def test_unknown_loss_is_named():
    with pytest.raises(UserError, match=r"'kll'.*Did you mean 'kl'"):
        loss_named("kll")


def test_totals_add_before_they_divide():
    a, b = Total(torch.tensor(6.0), torch.tensor(2.0)), Total(torch.tensor(1.0), torch.tensor(5.0))
    assert float((a + b).mean()) == 1.0


def by_the_book(name, p, log_q, label):
    """The definitions, for autograd."""
    q = log_q.exp()
    overlap = torch.minimum(p, q).sum(-1)
    if "+" in name:
        parts = [part.rpartition("*") for part in name.split("+")]
        return sum(float(weight or 1) * by_the_book(one, p, log_q, label) for weight, _, one in parts)
    if name.startswith("jsd"):
        beta = float(name.split(":")[1])
        log_m = (beta * p + (1 - beta) * q).log()
        return beta * (p * (p.log() - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)
    if name.startswith("top"):
        top = p.topk(int(name.split(":")[1]), -1).indices
        return -(p * log_q).gather(-1, top).sum(-1)
    if name == "ce":
        return -torch.where(label >= 0, log_q.gather(-1, label.clamp(min=0)[:, None])[:, 0], 0.0)
    if name == "reverse_kl":
        return (q * (log_q - p.log())).sum(-1)
    if name == "log_acceptance":
        return -overlap.log()
    divergence = (p * (p.log() - log_q)).sum(-1)
    weight = torch.exp(-3 * overlap.detach())
    return {"kl": divergence, "tv": 1 - overlap, "lk_hybrid": weight * divergence + (1 - weight) * (1 - overlap)}[name]


@pytest.mark.parametrize("name", [*DISTANCES, *OTHERS])
@pytest.mark.parametrize("rows", [1, 7, CHUNK, 2 * CHUNK + 5])
def test_values_and_gradients_are_those_of_the_definitions(name, rows):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(30, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    p = (2 * torch.randn(rows, 30, generator=generator, dtype=torch.float64)).softmax(-1)
    weights = torch.rand(rows, generator=generator, dtype=torch.float64)
    labels = torch.randint(-1, 30, (rows,), generator=generator)
    logits = hidden @ head.T
    expected = (weights * by_the_book(name, p, logits.log_softmax(-1), labels)).sum()
    gradients = torch.autograd.grad(3 * expected, [hidden, head])
    found = head_loss(hidden, head, weights, labels, lambda piece: p[piece], loss_named(name))
    assert torch.allclose(found.total, expected)
    assert torch.equal(found.agree, logits.argmax(-1) == p.argmax(-1))
    assert torch.allclose(found.overlap, torch.minimum(p, logits.softmax(-1)).sum(-1))
    assert torch.allclose(overlaps(hidden, head, lambda piece: p[piece]), found.overlap)
    for one, other in zip(torch.autograd.grad(3 * found.total, [hidden, head]), gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-10)


@pytest.mark.parametrize("bad", ["jsd", "jsd:2", "kl:1", "-1*kl", "x*kl", "top:1.5", "", "kl+"])
def test_a_loss_that_cannot_be_read_is_named(bad):
    with pytest.raises(UserError, match=r"drafter\.objective\.loss"):
        loss_named(bad)


def test_weights_of_acceptance_are_the_derivative_of_the_accepted_length():
    """T23: against autograd, for the mean over steps."""
    alphas = torch.rand(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    accepted = alphas.cumprod(1).sum() / 4
    assert torch.allclose(accepted_weights(alphas), torch.autograd.grad(accepted, alphas)[0])
