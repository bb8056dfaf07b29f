import pytest
import torch
from tiny import tiny_model
from torch import nn

from specdec import UserError
from train.adapters import LoraConfig, adapters_off, add_adapters, merge, merged_state

IDS = torch.tensor([[5, 6, 7, 8]])


def adapted(seed=0, **changes):
    """A model with adapters that say something."""
    model = tiny_model().requires_grad_(False)
    factors = add_adapters(model, LoraConfig(rank=4), torch.Generator(), **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factor in factors.values():
            factor.normal_(0, 0.1, generator=generator)
    return model, factors


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_new_adapters_change_nothing_and_only_they_are_trained():
    model = tiny_model()
    before = logits(model)
    factors = add_adapters(model, LoraConfig(rank=4), torch.Generator())
    assert torch.equal(logits(model), before)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(factors)
    assert not any("lm_head" in name for name in factors)
    assert all(factor.dtype == torch.float64 for factor in factors.values())


def test_off_is_the_original_bit_for_bit():
    model, factors = adapted()
    with adapters_off(model):
        assert torch.equal(logits(model), logits(tiny_model()))
    assert not torch.allclose(logits(model), logits(tiny_model()))
    assert all(factor.requires_grad for factor in factors.values())


def test_merged_says_what_the_adapters_said():
    model, _ = adapted()
    said = logits(model)
    other = tiny_model()
    other.load_state_dict(merged_state(model))
    assert torch.allclose(logits(other), said, atol=1e-10)
    merge(model)
    assert torch.allclose(logits(model), said, atol=1e-10)
    assert set(model.state_dict()) == set(other.state_dict())


def test_only_the_named_part_is_adapted():
    _, factors = adapted(within="model.layers.4.")
    assert factors
    assert all(name.startswith("model.layers.4.") for name in factors)


def test_adapters_of_a_half_precision_network_are_wide():
    model = tiny_model().to(torch.bfloat16)
    assert all(
        factor.dtype == torch.float32 for factor in add_adapters(model, LoraConfig(), torch.Generator()).values()
    )


def test_a_network_without_layers_to_adapt_is_refused():
    with pytest.raises(UserError, match="linear layers"):
        add_adapters(nn.Sequential(nn.Embedding(3, 4)), LoraConfig(), torch.Generator())


@pytest.mark.parametrize("bad", [{"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}])
def test_bad_settings_are_named(bad):
    with pytest.raises(UserError, match=r"lora\.rank"):
        LoraConfig(**bad)
