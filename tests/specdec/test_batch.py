"""Rows that take turns: a prompt's answer does not depend on whose place it took, for every drafter."""

from __future__ import annotations

import pytest
import torch
from makers import DRAFTERS
from tiny import tiny_model, tiny_tokenizer

from specdec import Limits, Sampling, Target, TokenTree, UserError, generate, stream
from specdec.drafters.none import Plain

PREFIX = [7, 3, 9, 250, 11, 40, 41, 42, 43, 44]
PROMPTS = [
    [*PREFIX, 5],
    [*PREFIX, 9, 17, 33, 120, 60, 61],
    [*PREFIX, 40],
    [*PREFIX, 77, 12, 5],
    [*PREFIX, 8, 8, 8, 8, 9, 10, 11, 12, 13],
    [*PREFIX, 6],
    [*PREFIX, 200, 100],
]
OTHERS = [prompt[5:] if i % 2 else prompt for i, prompt in enumerate(PROMPTS)]  # nothing in common
STOPS = Limits(17, (1, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30))


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model(), tiny_tokenizer())


def alone(target, prompts, sampling=None, taps=()):
    return [generate(target, Plain(taps), [p], STOPS, sampling, keep_features=bool(taps))[0] for p in prompts]


@pytest.mark.parametrize("prompts", [PROMPTS, OTHERS], ids=["shared start", "nothing shared"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_that_take_turns_give_what_each_prompt_gives_alone(target, name, prompts):
    expected = [g.tokens for g in alone(target, prompts)]
    assert len({len(tokens) for tokens in expected}) > 2, "the prompts must end at different times"
    for rows in (1, 2, 3):
        found = generate(target, DRAFTERS[name](target), prompts, STOPS, rows=rows)
        assert [g.tokens for g in found] == expected, rows


@pytest.mark.parametrize("name", ["none", "ngram", "eagle-dynamic", "draft_model-chain"])
def test_coupled_noise_belongs_to_the_prompt_not_to_the_row(target, name):
    sampling = Sampling(1.0, top_k=40, repetition_penalty=1.1)
    whole = generate(target, Plain(), PROMPTS, STOPS, sampling, seed=3)
    turns = generate(target, DRAFTERS[name](target), PROMPTS, STOPS, sampling, seed=3, rows=2)
    assert [g.tokens for g in turns] == [g.tokens for g in whole]


def test_features_are_those_of_each_prompt_alone(target):
    taps = (1, 3, "final")
    expected = alone(target, PROMPTS, taps=taps)
    found = generate(target, Plain(taps), PROMPTS, STOPS, rows=3, keep_features=True)
    for one, other in zip(found, expected, strict=True):
        assert one.features.shape == other.features.shape
        assert torch.allclose(one.features, other.features, atol=1e-10)


def test_a_place_is_taken_at_once(target):
    """While prompts wait, every round reads as many rows as there may be."""
    read, wide = target.read, []
    target.read = lambda tree, start=0: (wide.append(tree.tokens.shape[0]), read(tree, start))[1]
    try:
        started = [step.row for step in stream(target, Plain(), PROMPTS, STOPS, rows=3) if step.round is None]
    finally:
        del target.read
    assert started == list(range(len(PROMPTS)))
    lengths = [len(g.tokens) for g in alone(target, PROMPTS)]
    assert len(wide) < sum(lengths) / 3 + max(lengths)
    assert wide[: len(wide) // 2] == [3] * (len(wide) // 2)


def test_min_new_tokens_and_one_token_answers(target):
    limits = Limits(5, tuple(range(0, 300, 2)), min_new_tokens=2)
    expected = [generate(target, Plain(), [p], limits)[0].tokens for p in PROMPTS]
    assert [g.tokens for g in generate(target, Plain(), PROMPTS, limits, rows=2)] == expected
    one = Limits(1)
    assert [len(g.tokens) for g in generate(target, Plain(), PROMPTS, one, rows=2)] == [1] * len(PROMPTS)


def test_rows_must_be_positive(target):
    with pytest.raises(UserError, match="rows must be 1 or more"):
        generate(target, Plain(), PROMPTS, STOPS, rows=0)


def test_texts_can_be_admitted_in_any_order(target):
    """All rows at once, permuted: each text goes where it was sent."""
    target.start(PROMPTS[:3], 8, (), PROMPTS[3:])
    logits = target.admit(torch.tensor([2, 0, 1]), PROMPTS[3:6]).logits
    assert target.lengths.tolist() == [len(PROMPTS[4]), len(PROMPTS[5]), len(PROMPTS[3])]
    tree = TokenTree.chain(torch.tensor([[5], [6], [7]]))
    found = target.read(tree).logits
    alone = [target.start([p], 8).logits for p in PROMPTS[3:6]]
    assert torch.allclose(logits, torch.cat(alone), atol=1e-10)
    for row, (prompt, token) in enumerate([(PROMPTS[4], 5), (PROMPTS[5], 6), (PROMPTS[3], 7)]):
        assert torch.allclose(found[row, 0], target.start([[*prompt, token]], 8).logits[0, 0], atol=1e-10)


def test_hundreds_of_one_token_answers_in_one_row(target):
    prompts = [[3 + i % 200] for i in range(400)]
    found = generate(target, Plain(), prompts, Limits(1), rows=1)
    assert found[0].tokens == found[200].tokens
    assert all(len(g.tokens) == 1 for g in found)
