import math

import torch
from tiny import tiny_model, tiny_tokenizer

from eval.lossless import divergence, first_difference
from specdec import Limits, Target, TreeConfig, generate
from specdec.assistant import DraftModel
from specdec.drafters.none import Plain


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


def test_the_gap_is_that_of_the_two_tokens(target):
    text = generate(target, Plain(), [[5, 6]], Limits(6))[0].tokens
    wrong = [*text[:3], (text[3] + 1) % 300, *text[4:]]
    found = divergence(target, [5, 6], text, wrong)
    logits = target.start([[5, 6, *text[:3]]], 1).logits[0, 0]
    assert found.position == 3
    assert found.gap == float((logits[text[3]] - logits[wrong[3]]).float().abs())
    assert not found.near_tie(1e-6)
    assert divergence(target, [5, 6], text, text) is None
    assert math.isinf(divergence(target, [5, 6], text, text[:4]).gap)


def test_in_bf16_texts_part_only_at_near_ties():
    """Speculative and plain text of a bf16 model: the same, or apart where rounding decides."""
    target = Target(tiny_model(initializer_range=0.1).to(torch.bfloat16), tiny_tokenizer(), "half")
    draft = Target(tiny_model(5, num_hidden_layers=1).to(torch.bfloat16), tiny_tokenizer(), "draft")
    drafter = DraftModel(draft, target, TreeConfig(depth=4))
    prompts = [[5 + i, 6, 7 + 2 * i] for i in range(12)]
    limits = Limits(30)
    plain = generate(target, Plain(), prompts, limits)
    spec = generate(target, drafter, prompts, limits)
    for prompt, a, b in zip(prompts, plain, spec, strict=True):
        found = divergence(target, prompt, a.tokens, b.tokens)
        assert found is None or found.near_tie(0.1), found
