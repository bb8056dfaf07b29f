"""EAGLE: what training computes is what decoding computes."""

import json

import pytest
import torch
from tiny import tiny_model
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from data.batches import Batch
from specdec import Limits, Target, UserError, generate
from specdec.drafter import open_drafter, save_drafter
from specdec.drafters.eagle import EagleConfig, config_of, create, shape_for, taps_for
from specdec.layers import grouped, rotate
from train.objectives.eagle import EagleObjective, EagleObjectiveConfig

NETWORKS = {
    "3.1": {},
    "3": {"fc_norm": False, "norm_output": False},
    "normed taps": {"norm_output": False},
    "five taps": {"taps": [4, 0, 1, 2, 3]},
    "1": {"generation": 1, "fc_bias": True},
}


def drafter_for(target, **changes):
    counts = torch.arange(target.vocab_size, 0, -1).double()
    config = EagleConfig(**({"draft_vocab_size": 200} | changes))
    return create(config, target, counts, torch.Generator().manual_seed(0)).double()


def causal(positions):
    return torch.arange(64) <= positions[..., None]


@pytest.mark.parametrize("name", NETWORKS)
def test_unrolled_training_equals_the_decoders_steps(target, name):
    """Teacher-forced unroll at slot t against a decode from the prefix that ends there (algorithms §6.4)."""
    drafter = drafter_for(target, **NETWORKS[name])
    tokens = torch.randint(3, 200, (1, 14), generator=torch.Generator().manual_seed(1))
    features = target.features(tokens, (*drafter.taps, "final")).clone()
    batch = Batch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), features)
    objective = EagleObjective(EagleObjectiveConfig(unroll=3), drafter, target)
    steps = objective._unroll(drafter, batch)
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
    for taps in ([0, 1, 5], [-1, 0, 1]):
        with pytest.raises(UserError, match="taps must be numbers from 0 to 4"):
            shape_for(EagleConfig(draft_vocab_size=64, taps=taps), target)
    for changes, message in (
        ({"taps": []}, "taps must be one to six numbers"),
        ({"taps": [0] * 7}, "taps must be one to six numbers"),
        ({"generation": 2}, "generation must be 1 or 3, got 2"),
        ({"generation": 1, "taps": [1]}, "taps must be null for drafter.model.generation=1"),
        ({"fc_bias": True}, "fc_bias belongs to drafter.model.generation=1"),
    ):
        with pytest.raises(UserError, match=message):
            EagleConfig(**changes)


def test_default_taps_are_what_engines_expect():
    target = Target(tiny_model(num_hidden_layers=8))
    assert shape_for(EagleConfig(draft_vocab_size=64), target).taps == [2, 4, 5]


# -- generation 1 ----------------------------------------------------------------------------------------------------


def test_the_first_generation_is_the_network_that_engines_load(target):
    """Written out from what vLLM computes: no input norm, nothing between the layer and the target's head."""
    drafter = drafter_for(target, generation=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    tokens = torch.randint(3, 200, (2, 7), generator=generator)
    feature = torch.randn(2, 7, 1, target.width, generator=generator, dtype=torch.float64)
    at = torch.arange(7).expand(2, -1)
    out, fed_back = drafter.step(tokens, drafter.fuse(feature), at, lambda q, k, v: grouped(q, k, v, None))
    w = dict(drafter.named_parameters())

    def through(name, x):
        return linear(x, w[f"layer.{name}.weight"])

    def heads(name):
        return through(name, x).unflatten(-1, (-1, target.head_dim)).transpose(1, 2)

    x = linear(torch.cat([target.embedding(tokens), feature[:, :, 0]], -1), w["fc.weight"])
    q, k = (rotate(heads(name), at, drafter.shape.rope_theta) for name in ("q_proj", "k_proj"))
    k, v = (one.repeat_interleave(3, 1) for one in (k, heads("v_proj")))
    y = x + through("o_proj", scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    normed = y / (y.square().mean(-1, keepdim=True) + drafter.shape.rms_norm_eps).sqrt()
    normed = normed * w["layer.post_attention_layernorm.weight"]
    z = y + through("down_proj", silu(through("gate_proj", normed)) * through("up_proj", normed))
    assert torch.allclose(out, z, atol=1e-10)
    assert out is fed_back
    logits = target.head(z)[..., drafter.draft_ids]
    assert torch.allclose(drafter.logits(out), logits, atol=1e-4), "the head is copied in fp32"


def test_the_first_generation_reads_the_final_state_and_has_no_head_of_its_own(target, tmp_path):
    config = EagleConfig(generation=1, draft_vocab_size=200)
    drafter = drafter_for(target, generation=1)
    assert (taps_for(config, target), drafter.taps) == ((), ("final",))
    assert config.taps != EagleConfig().taps, "runs that keep other features are told apart by it"
    names = [*dict(drafter.named_parameters()), *drafter.state_dict()]
    assert not [name for name in names if "norm" in name and "post_attention" not in name]
    assert not [name for name in names if "head" in name or "bias" in name]
    save_drafter(drafter, "eagle", config_of(drafter), tmp_path)
    again = open_drafter(tmp_path, target)
    assert torch.equal(again.lm_head.weight, drafter.lm_head.weight)
    assert torch.allclose(again.lm_head.weight, target.head_rows(drafter.draft_ids), atol=1e-6)


def test_a_folder_saved_before_there_were_generations_opens(target, tmp_path):
    drafter = drafter_for(target)
    config = config_of(drafter)
    save_drafter(
        drafter, "eagle", {key: config[key] for key in config if key not in ("generation", "fc_bias")}, tmp_path
    )
    assert "generation" not in json.loads((tmp_path / "config.json").read_text())
    assert open_drafter(tmp_path, target).shape == drafter.shape
