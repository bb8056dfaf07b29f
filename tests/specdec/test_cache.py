"""T11–T13: after every round the caches are what a fresh pass over the decided text would leave; memory."""

import gc

import pytest
import torch
from makers import DRAFTERS, TREES, draft_model, eagle
from tiny import EOS, tiny_model

from specdec import Limits, Target, generate
from specdec.drafters.none import Plain
from specdec.slots import LayerSlots

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3]]


def layers(target) -> list[LayerSlots]:
    return target._cache.layers


def assert_cache_is_that_of(target, texts):
    """Row r's first `lengths` slots against a fresh prefill of its text."""
    fresh = Target(target.model, target.tokenizer)
    for row, text in enumerate(texts):
        length = int(target.lengths[row])
        fresh.start([text[:length]], 1)
        for own, other in zip(layers(target), layers(fresh), strict=True):
            for a, b in ((own.keys, other.keys), (own.values, other.values)):
                assert torch.allclose(a[row, :, :length], b[0, :, :length], atol=1e-9)


def watched(drafter, check):
    original = drafter.propose

    def propose(context, *arguments):
        texts = [t[:n] for t, n in zip(context.tokens.tolist(), context.lengths.tolist(), strict=True)]
        tree = original(context, *arguments)
        check(texts, context)
        return tree

    drafter.propose = propose
    return drafter


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_targets_cache_after_every_round(target, name):
    rounds = []

    def check(texts, context):
        rounds.append(1)
        assert target.lengths.tolist() == [n - 1 for n in context.lengths.tolist()]  # T13: all but the pending token
        assert_cache_is_that_of(target, texts)

    generate(target, watched(DRAFTERS[name](target), check), PROMPTS, Limits(24, (EOS,)))
    assert len(rounds) > 2


@pytest.mark.parametrize("tree", TREES)
def test_the_draft_models_cache_after_every_round(target, tree):
    drafter = draft_model(target, TREES[tree])

    def check(texts, _):
        assert_cache_is_that_of(drafter.model, texts)

    generate(target, watched(drafter, check), PROMPTS, Limits(24, (EOS,)))


@pytest.mark.parametrize("tree", TREES)
def test_eagles_cache_after_every_round(target, tree):
    """Positions with true features hold the keys of a fresh pass over true features: guesses have given way."""
    drafter = eagle(target, TREES[tree])
    other = eagle(target, TREES[tree])

    def check(texts, _):
        for row, text in enumerate(texts):
            known = len(text) - 1  # the pending token has no features yet
            features = target.features(torch.tensor([text[:known]]), drafter.taps)
            other.reset(1, 128)
            at = torch.arange(known)[None]
            tokens = torch.tensor([text])[:, 1:]
            mask = torch.arange(other._cache.width(known)) <= at[..., None]
            other._cached(tokens, other.fuse(features), at, at, mask)
            for a, b in ((drafter._cache.keys, other._cache.keys), (drafter._cache.values, other._cache.values)):
                assert torch.allclose(a[row, :, :known], b[0, :, :known], atol=1e-9)

    generate(target, watched(drafter, check), PROMPTS, Limits(24, (EOS,)))


def live_bytes():
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("kind", ["chain", "dynamic"])
def test_eight_rows_cost_what_the_arithmetic_says_and_rounds_cost_nothing(kind):
    """All tensors alive during decoding against 2 · layers · rows · heads · slots · width · bytes."""
    # Wide enough that the cache, not the bookkeeping, is what is measured.
    target = Target(tiny_model(num_key_value_heads=6, hidden_size=192, num_attention_heads=6))
    drafter = eagle(target, TREES[kind])
    limits, prompts = Limits(150), [[5 + i, 6, 7] for i in range(8)]
    before, seen, turns = live_bytes(), [], []

    def check(*_):
        turns.append(1)
        if len(turns) % 12 == 2:  # looking at every object there is takes a third of a second
            seen.append(live_bytes() - before)

    generate(target, watched(drafter, check), prompts, limits)
    assert len(seen) > 6
    slots = 3 + 150 + drafter.nodes
    # The drafter is a sixth layer of the same shape.
    expected = 2 * (target.layers + 1) * 8 * 6 * slots * 32 * 8
    assert max(seen) <= 1.3 * expected
    assert max(seen[3:]) <= 1.02 * max(seen[:3])


def test_rows_that_end_give_their_memory_back():
    target = Target(tiny_model())
    text = generate(target, Plain(), [[5, 6]], Limits(40))[0].tokens
    sizes = []
    drafter = watched(Plain(), lambda texts, _: sizes.append((len(texts), layers(target)[0].keys.shape[0])))
    generate(target, drafter, [[5, 6], [9, 8, 7]], Limits(40, (text[6],)))
    assert all(rows == held for rows, held in sizes)
    assert sizes[-1][0] == 1
