"""Long rows in parts: the values and gradients are those of the whole."""

import pytest
import torch

from specdec.align import starts_within
from train import unrolled
from train.unrolled import UnrolledAttention

BATCH, HEADS, GROUPS, LENGTH, WIDTH = 2, 6, 2, 21, 8
PACKED = torch.tensor([[0] * 5 + [1] * 9 + [2] * 7, [3] * 12 + [4] * 3 + [-1] * 6])


def slots(count):
    """Ascending; the second row repeats some that nobody looks at, as used_slots() does."""
    first = torch.arange(LENGTH - count, LENGTH)
    return torch.stack([first, torch.cat([(first[: count - 2] - 2).clamp(min=0), torch.tensor([0, 1])])])


def unroll(starts, count, dtype=torch.float64, steps=4):
    """All steps' outputs, and the gradients of a weighted sum of them."""
    generator = torch.Generator().manual_seed(0)
    attention, made, outputs = UnrolledAttention(slots(count), starts), [], []
    for step in range(steps):
        rows = count if step else LENGTH
        shapes = [(BATCH, heads, rows, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
        own = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
        outputs.append(attention.of(step)(*own))
        made += own
    weights = [torch.randn(out.shape, generator=generator).to(dtype) for out in outputs]
    total = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    return outputs, torch.autograd.grad(total, made)


@pytest.mark.parametrize("size", [1, 4, 10**6], ids=["slot by slot", "some", "one part"])
@pytest.mark.parametrize("documents", [None, PACKED], ids=["a text a row", "packed"])
@pytest.mark.parametrize("count", [3, LENGTH])
def test_parts_are_the_whole(monkeypatch, documents, count, size):
    starts = None if documents is None else starts_within(documents)
    whole = unroll(starts, count)
    monkeypatch.setattr(unrolled, "LONG", 0)
    monkeypatch.setattr(unrolled, "PART", size * BATCH * HEADS * LENGTH)
    for one, other in zip(unroll(starts, count), whole, strict=True):
        for found, expected in zip(one, other, strict=True):
            assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_parts_in_lower_precision(monkeypatch):
    monkeypatch.setattr(unrolled, "LONG", 0)
    exact = [[one.detach() for one in some] for some in unroll(starts_within(PACKED), 5)]
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        found = unroll(starts_within(PACKED), 5, dtype)
        for one, other in zip(found, exact, strict=True):
            for a, b in zip(one, other, strict=True):
                assert a.dtype == dtype
                assert torch.allclose(a.double(), b, atol=close * float(b.abs().max()))


def test_short_rows_are_not_cut(monkeypatch):
    monkeypatch.setattr(unrolled, "_Piece", lambda *_: pytest.fail("a part was made"))
    unroll(starts_within(PACKED), 5)


@pytest.mark.parametrize("part", [100, 10**9])
def test_a_step_that_is_run_again_keeps_its_keys(monkeypatch, part):
    """What the backward pass recomputes must not count as a further step."""
    monkeypatch.setattr(unrolled, "LONG", 0)
    monkeypatch.setattr(unrolled, "PART", part)
    attention = UnrolledAttention(slots(5), None)
    tensors = [torch.randn(BATCH, heads, LENGTH, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    first = attention.of(0)(*tensors)
    later = [tensor[:, :, :5] for tensor in tensors]
    second = attention.of(1)(*later)
    assert torch.equal(attention.of(0)(*tensors), first)
    assert torch.equal(attention.of(1)(*later), second)
    assert len(attention.keys) == 2
