"""A model of some of the target's layers: what is copied, what is borrowed, and which layers are taken."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import FAMILIES, family_model, tiny_model, tiny_tokenizer

from specdec import Target, UserError
from specdec.inside import decoder_layers
from specdec.subset import Lent, candidates, choose_layers, with_layers

TEXTS = [torch.randint(3, 200, (40,), generator=torch.Generator().manual_seed(n)) for n in range(6)]
IDS = torch.arange(200)


def stock_logits(target, tokens):
    with target.stock() as model, torch.no_grad():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_are_the_target_and_some_are_a_model_of_their_own(family):
    target = Target(family_model(family, 0))
    tokens = torch.tensor([[5, 6, 7, 8, 9, 4]])
    before = stock_logits(target, tokens)
    whole = Target(with_layers(target, range(target.layers)), None, "whole", "off")
    assert torch.allclose(stock_logits(whole, tokens), before, atol=1e-12)
    some = Target(with_layers(target, [0, 3]), None, "some", "off")  # which checks its cache, layer for layer
    assert some.layers == len(decoder_layers(some.model)) == 2
    for own, taken in zip(decoder_layers(some.model), (0, 3), strict=True):
        theirs = dict(decoder_layers(target.model)[taken].named_parameters())
        for name, parameter in own.named_parameters():
            assert torch.equal(parameter, theirs[name])
            assert parameter.data_ptr() != theirs[name].data_ptr()
    with torch.no_grad():
        for parameter in decoder_layers(some.model).parameters():
            parameter.zero_()
    assert torch.equal(stock_logits(target, tokens), before), "the target is as it was"


def test_lists_of_a_setting_per_layer_are_cut_too():
    target = Target(family_model("qwen3", 0))
    assert len(target.model.config.layer_types) == 4
    assert len(with_layers(target, [1, 3]).config.layer_types) == 2


def test_packed_weights_stay_with_the_layers_they_were_packed_for():
    target = Target(tiny_model().float(), None, "packed", "packed")
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    small = Target(with_layers(target, [0, 1]), None, "small", "off")
    first = small.features(tokens, ("final",)).clone()
    with torch.no_grad():
        for parameter in decoder_layers(small.model).parameters():
            parameter.mul_(0.5)
    assert not torch.allclose(small.features(tokens, ("final",)), first)


def test_borrowed_parts_are_neither_parameters_nor_moved_nor_cast(target):
    small = with_layers(target, [0, 1])
    embedding = small.get_input_embeddings()
    assert isinstance(embedding, Lent)
    assert not list(embedding.parameters())
    small.base_model.to(torch.bfloat16)
    assert target.embedding.weight.dtype == torch.float64
    assert embedding(torch.tensor([3])).dtype == torch.bfloat16
    angles = [m for m in small.base_model.modules() if isinstance(m, Lent)]
    assert len(angles) == 2, "the embedding and the table of rotary positions"


@given(st.integers(1, 60), st.data())
def test_candidates_are_ascending_subsets_of_the_size(total, data):
    count = data.draw(st.integers(1, total))
    found = candidates(total, count)
    assert len(found) == len(set(found))
    assert tuple(range(count)) in found
    for layers in found:
        assert len(layers) == count
        assert list(layers) == sorted(set(layers))
        assert layers[0] >= 0
        assert layers[-1] < total


def without(model, idle):
    """The model with these layers adding nothing."""
    with torch.no_grad():
        for index in idle:
            model.model.layers[index].self_attn.o_proj.weight.zero_()
            model.model.layers[index].mlp.down_proj.weight.zero_()
    return Target(model, tiny_tokenizer(), "planted")


@pytest.mark.parametrize("planted", candidates(8, 3))
def test_the_layers_that_do_the_work_are_found(planted):
    target = without(tiny_model(num_hidden_layers=8), set(range(8)) - set(planted))
    assert choose_layers(target, 3, TEXTS, IDS) == list(planted)


def test_texts_may_be_short_and_must_be_there(target):
    assert len(choose_layers(target, 2, [TEXTS[0][:1], TEXTS[1][:7]], IDS)) == 2
    with pytest.raises(UserError, match=r"drafter\.model\.layers: there are no texts"):
        choose_layers(target, 2, [], IDS)
