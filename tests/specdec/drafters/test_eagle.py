"""EAGLE: what training computes is what decoding computes."""

import pytest
import torch
from tiny import tiny_model

from data.batches import Batch
from specdec import Limits, Target, UserError, generate
from specdec.drafters.eagle import EagleConfig, create, shape_for
from train.objectives.eagle import EagleObjective, EagleObjectiveConfig


def drafter_for(target, **changes):
    counts = torch.arange(target.vocab_size, 0, -1).double()
    config = EagleConfig(**({"draft_vocab_size": 200} | changes))
    return create(config, target, counts, torch.Generator().manual_seed(0)).double()


def causal(positions):
    return torch.arange(64) <= positions[..., None]


@pytest.mark.parametrize(("fc_norm", "norm_output"), [(True, True), (False, False), (True, False)])
def test_unrolled_training_equals_the_decoders_steps(target, fc_norm, norm_output):
    """Teacher-forced unroll at slot t against a decode from the prefix that ends there (algorithms §6.4)."""
    drafter = drafter_for(target, fc_norm=fc_norm, norm_output=norm_output)
    tokens = torch.randint(3, 200, (1, 14), generator=torch.Generator().manual_seed(1))
    features = target.features(tokens, (*drafter.taps, "final")).clone()
    batch = Batch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), features)
    objective = EagleObjective(EagleObjectiveConfig(unroll=3), drafter, target)
    steps = objective._unroll(drafter, batch, features[:, :, :-1], features[:, :, -1])
    slot = 6
    trained = []
    for step in steps:
        trained.append(step.rows[step.taught[0].nonzero()[:, 0].tolist().index(slot)])
    # The decoder: true features up to the slot, then its own, fed the same tokens.
    drafter.reset(1, 32)
    position = torch.arange(slot + 1)[None]
    true = drafter.fuse(features[:, : slot + 1, :-1])
    normed, hidden = drafter._cached(tokens[:, 1 : slot + 2], true, position, position, causal(position))
    normed, hidden, decoded = normed[:, -1:], hidden[:, -1:], []
    for step in range(3):
        if step:
            token = tokens[:, slot + 1 + step, None]
            at = torch.tensor([[slot + step]])
            normed, hidden = drafter._cached(token, hidden, at, at, causal(at))
        decoded.append(normed[0, 0])
    for a, b in zip(trained, decoded, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


def test_guessed_keys_are_rewritten_from_true_features(target):
    """After rounds of guessing, the cache's keys of read positions are those of a fresh pass over true features."""
    drafter = drafter_for(target)
    prompt = [5, 6, 7, 8]
    drafter.select = lambda _: None  # keep the finished row's cache to look at
    out = generate(target, drafter, [prompt], Limits(12))[0]
    text = prompt + out.tokens
    cache = drafter._cache
    known = len(text) - 2 - out.rounds[-1].emitted  # positions the last proposal had features of
    keys = cache.keys[0, :, :known].clone()
    drafter.reset(1, 64)
    tokens = torch.tensor([text])
    features = target.features(tokens, drafter.taps)[:, :known]
    at = torch.arange(known)[None]
    drafter._cached(tokens[:, 1 : known + 1], drafter.fuse(features), at, at, causal(at))
    assert torch.allclose(keys, drafter._cache.keys[0, :, :known], atol=1e-10)


def test_proposals_are_in_the_draft_vocabulary(target):
    drafter = drafter_for(target, draft_vocab_size=20)
    known = set(drafter.draft_ids.tolist())
    proposed = []
    original = drafter.propose

    def spy(*args):
        tree = original(*args)
        proposed.extend(tree.tokens[0].tolist()[1:])
        return tree

    drafter.propose = spy
    generate(target, drafter, [[5, 6]], Limits(10))
    assert set(proposed) <= known


def test_taps_must_exist(target):
    for taps in ([0, 1], [0, 1, 5], [-1, 0, 1]):
        with pytest.raises(UserError, match="taps must be three numbers from 0 to 4"):
            shape_for(EagleConfig(draft_vocab_size=64, taps=taps), target)


def test_default_taps_are_what_engines_expect():
    target = Target(tiny_model(num_hidden_layers=8))
    assert shape_for(EagleConfig(draft_vocab_size=64), target).taps == [2, 4, 5]
