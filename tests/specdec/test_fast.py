"""Packed weights: the same products, the same text, only where they pay, and out of the way of everything else."""

from __future__ import annotations

import pytest
import torch
from makers import DRAFTERS
from tiny import tiny_model, tiny_tokenizer
from torch import nn

from specdec import Limits, Target, UserError, fast, generate
from specdec.drafters.none import Plain
from specdec.load import TargetConfig

KINDS = ["onednn", "mkl"]
STOP = (1,)


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    """Make the measurement come out for this kind at every row count."""

    def measured(layers):  # noqa: ARG001
        return request.param, {"plain": [1.0] * 4, "onednn": [0.5] * 4, "mkl": [0.5] * 4}

    try:
        fast._KINDS[request.param](nn.Linear(8, 8))
    except (RuntimeError, AttributeError, NotImplementedError):
        pytest.skip(f"this torch has no {request.param} packing")
    monkeypatch.setattr(fast, "_measure", measured)
    return request.param


@pytest.mark.parametrize("shape", [(1, 24), (5, 24), (2, 9, 24), (200, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_gives_the_plain_product(kind, shape, bias):  # noqa: ARG001
    layer = nn.Linear(24, 40, bias=bias)
    x = torch.randn(shape)
    expected = layer(x)
    packed = fast.pack(layer, "packed")
    with torch.inference_mode():
        assert torch.allclose(layer(x), expected, atol=1e-5)
    packed.release()
    assert "forward" not in vars(layer)


def test_gradients_and_changed_weights_take_the_plain_product(kind):  # noqa: ARG001
    layer = nn.Linear(24, 40)
    fast.pack(layer, "packed")
    x = torch.randn(3, 24)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        layer.weight.mul_(2.0)
        assert torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("drafter", ["none", "ngram", "eagle-dynamic", "eagle-chain", "draft_model-static"])
def test_the_text_is_that_of_the_stock_model(kind, drafter):  # noqa: ARG001
    stock = Target(tiny_model().float(), tiny_tokenizer(), fast_mode="off")
    target = Target(tiny_model().float(), tiny_tokenizer(), fast_mode="packed")
    assert target.packed is not None
    assert stock.packed is None
    prompts = [[5, 9, 17, 33], [40, 8], [77, 12, 5, 9, 17, 33]]
    limits = Limits(24, STOP)
    found = generate(target, DRAFTERS[drafter](target), prompts, limits)
    assert [g.tokens for g in found] == [g.tokens for g in generate(stock, Plain(), prompts, limits)]


def test_the_stock_model_is_the_stock_model(kind):  # noqa: ARG001
    target = Target(tiny_model().float(), fast_mode="packed")
    layers = [layer for layer, _ in target.packed.layers]
    assert layers
    assert all("forward" in vars(layer) for layer in layers)
    with target.stock():
        assert not any("forward" in vars(layer) for layer in layers)
    assert all("forward" in vars(layer) for layer in layers)


def test_auto_leaves_small_and_wide_modules_alone(monkeypatch):
    assert fast.pack(nn.Linear(8, 8)) is None
    assert fast.pack(nn.Linear(8, 8).double(), "packed") is None
    assert fast.pack(nn.Linear(8, 8), "off") is None
    monkeypatch.setattr(fast, "_free_memory", lambda: 1e6)
    assert fast.pack(nn.Linear(2048, 2048)) is None


def test_what_is_chosen_is_what_was_faster():
    layer = nn.Linear(2048, 2048)
    packed = fast.pack(layer)
    if packed is None:
        pytest.skip("nothing is faster than the plain product here")
    faster = [a < b for a, b in zip(packed.seconds[packed.kind], packed.seconds["plain"], strict=True)]
    assert packed.chosen == faster
    assert any(faster)
    assert packed.kind in packed.describe()


def test_what_was_measured_is_kept_and_used_again(tmp_path, monkeypatch):
    memory = tmp_path / "deep" / "packing.json"
    fast.pack(nn.Linear(512, 512), "packed", memory)
    assert memory.is_file()
    monkeypatch.setattr(fast, "_measure", lambda _: pytest.fail("measured again"))
    fast.pack(nn.Linear(512, 512), "packed", memory)
    with pytest.raises(pytest.fail.Exception):
        fast.pack(nn.Linear(512, 256), "packed", memory)
    memory.write_text("{ cut off")
    with pytest.raises(pytest.fail.Exception):
        fast.pack(nn.Linear(512, 512), "packed", memory)


def test_a_wrong_operator_is_not_used(monkeypatch):
    class Wrong(fast._OneDNN):
        def __call__(self, x):
            return super().__call__(x) * 1.01

    monkeypatch.setattr(fast, "_KINDS", {"onednn": Wrong})
    assert fast.pack(nn.Linear(512, 512), "packed") is None


def test_an_unknown_mode_is_refused():
    with pytest.raises(UserError, match=r"target\.fast: 'quick' is not one of auto, off, packed, graph"):
        TargetConfig("t", "somewhere", fast="quick")
