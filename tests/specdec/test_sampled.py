"""Sampled text against exact probabilities, for every drafter and tree, on a model small enough to enumerate."""

import itertools

import pytest
import torch
from makers import DRAFTERS
from tiny import tiny_model

from specdec import Limits, Sampling, Target, generate

VOCAB, LENGTH, ROWS = 6, 3, 6000
PROMPT = [3, 4]


@pytest.fixture(scope="module")
def small() -> Target:
    return Target(tiny_model(3, vocab_size=VOCAB, initializer_range=0.15, eos_token_id=None, pad_token_id=0))


def law(target, sampling):
    """P(x1 x2 x3) for all 216 texts, from plain passes."""
    with target.stock() as model, torch.no_grad():
        texts = list(itertools.product(range(VOCAB), repeat=LENGTH))
        logits = model(torch.tensor([[*PROMPT, *text] for text in texts])).logits
    probs = sampling.probs(logits)
    out = torch.ones(len(texts), dtype=torch.float64)
    for i in range(LENGTH):
        step = probs[:, len(PROMPT) - 1 + i]
        out *= step[torch.arange(len(texts)), torch.tensor([text[i] for text in texts])]
    return out


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("temperature", [pytest.param(0.5, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 3}])
def test_texts_have_their_exact_probabilities(small, name, temperature, cut):
    sampling = Sampling(temperature, **cut)
    drafter = DRAFTERS[name](small)
    generator = torch.Generator().manual_seed(17)
    out = generate(small, drafter, [PROMPT] * ROWS, Limits(LENGTH), sampling, generator)
    places = torch.tensor([sum(t * VOCAB ** (LENGTH - 1 - i) for i, t in enumerate(g.tokens)) for g in out])
    counts = torch.bincount(places, minlength=VOCAB**LENGTH).double()
    expected = law(small, sampling) * ROWS
    assert bool((counts[expected == 0] == 0).all()), "a text of probability 0 was emitted"
    used = expected >= 5
    rest = ~used & (expected > 0)
    a = torch.cat([counts[used], counts[rest].sum()[None]])
    b = torch.cat([expected[used], expected[rest].sum()[None]]).clamp(min=1e-9)
    chi2, freedom = float(((a - b) ** 2 / b)[b >= 5].sum()), int((b >= 5).sum()) - 1
    # Wilson–Hilferty: the χ² law's cube root is nearly normal; 3.1 is p = 1e-3.
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 3.1


def test_the_measured_acceptance_is_the_teacher_forced_one(small):
    """T27: a drawn chain of one is accepted with Σ min(p, q), within what chance allows."""
    from makers import TREES, draft_model

    from specdec import TreeConfig

    assert TREES["drawn"].draw
    drafter = draft_model(small, TreeConfig(depth=1, draw=True))
    sampling, rows = Sampling(1.0), 8000
    expected = []
    original = drafter.propose

    def propose(context, *arguments):
        tree = original(context, *arguments)
        texts = [t[:n] for t, n in zip(context.tokens.tolist(), context.lengths.tolist(), strict=True)]
        with small.stock() as model, torch.no_grad():
            p = sampling.probs(model(torch.tensor(texts)).logits[:, -1])
        expected.append(torch.minimum(p, tree.draft_probs[:, 0, :VOCAB]).sum(-1).mean())
        return tree

    drafter.propose = propose
    out = generate(small, drafter, [PROMPT] * rows, Limits(3), sampling, torch.Generator().manual_seed(5))
    accepted = sum(g.rounds[0].accepted for g in out) / rows
    assert abs(accepted - float(expected[0])) < 4 * (0.25 / rows) ** 0.5
    first = [g.rounds[0] for g in out]
    assert sum(r.emitted for r in first) / rows == 1 + accepted
