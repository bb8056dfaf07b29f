"""Greedy equality with transformers over architectures, trees, batches and seeds; properties over random proposals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import TREES, eagle
from tiny import EOS, FAMILIES, family_model, tiny_model

from eval.speed import stock_generate
from specdec import Limits, Sampling, Target, TokenTree, UserError, generate, stream
from specdec.drafters.ngram import Ngram, NgramConfig
from specdec.drafters.none import Plain

SHARED = Target(tiny_model())


def prompts_for(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (3,), generator=generator).tolist()
    return [torch.randint(3, 300, (size,), generator=generator).tolist() for size in sizes]


def check_family(family, kind, seeds):
    for seed in seeds:
        target = Target(family_model(family, seed % 5))
        drafter = Ngram(NgramConfig(depth=4)) if kind == "ngram" else eagle(target, TREES[kind], seed)
        prompts = prompts_for(seed)
        limits = Limits(1 + seed % 23, (EOS, 7, 11))
        expected = [stock_generate(target, prompt, limits) for prompt in prompts]
        assert [g.tokens for g in generate(target, drafter, prompts, limits)] == expected
        assert [generate(target, drafter, [p], limits)[0].tokens for p in prompts] == expected


@pytest.mark.parametrize("kind", ["chain", "static", "dynamic", "ngram"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family, kind):
    """T10, a few seeds."""
    check_family(family, kind, range(3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "static", "dynamic", "ngram"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers_on_50_seeds(family, kind):
    check_family(family, kind, range(50))


class Scripted(Plain):
    """Proposes whatever trees it is given, in turn; `hints` are texts whose continuations are mixed in."""

    def __init__(self, shapes, hints):
        super().__init__()
        self.shapes, self.hints, self.turn = shapes, hints, 0
        self.nodes = max(len(shape) for shape in shapes)

    def propose(self, context, sampling, generator):  # noqa: ARG002
        shape = self.shapes[self.turn % len(self.shapes)]
        self.turn += 1
        rows = []
        for text, length in zip(context.tokens.tolist(), context.lengths.tolist(), strict=True):
            hint = next((h[length:] for h in self.hints if h[:length] == text[:length]), [])
            depth = [0] * len(shape)
            row = [text[length - 1]]
            for node in range(1, len(shape)):
                parent = shape[node]
                depth[node] = depth[parent] + 1 if parent >= 0 else 0
                right = hint[depth[node] - 1] if 0 < depth[node] <= len(hint) else 5
                twin = any(shape[m] == parent and row[m] == right for m in range(1, node))
                row.append((right + node) % 300 if twin or (node + self.turn) % 4 == 0 else right)
            rows.append(row)
        return TokenTree(torch.tensor(rows), torch.tensor([shape]).expand(len(rows), -1))


@st.composite
def shapes(draw):
    found = [-1]
    for node in range(1, draw(st.integers(1, 9))):
        found.append(draw(st.sampled_from([*[p for p in range(node) if found[p] != -2], -2])))
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.lists(shapes(), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(3, 299), min_size=1, max_size=6), min_size=1, max_size=3),
    st.sets(st.integers(1, 299), max_size=60),
    st.integers(1, 25),
    st.integers(0, 5),
)
def test_any_trees_stops_and_batches_leave_the_text_alone(trees, prompts, stops, limit, least):
    limits = Limits(limit, tuple(stops), min_new_tokens=min(least, limit))
    plain = generate(SHARED, Plain(), prompts, limits)
    hints = [p + g.tokens for p, g in zip(prompts, generate(SHARED, Plain(), prompts, Limits(30)), strict=True)]
    out = generate(SHARED, Scripted(trees, hints), prompts, limits)
    assert [g.tokens for g in out] == [g.tokens for g in plain]
    assert [g.finish for g in out] == [g.finish for g in plain]
    for g in out:  # T28: only what is emitted is counted
        assert sum(r.emitted for r in g.rounds) == len(g.tokens) - 1
        assert all(0 <= r.accepted <= r.proposed and r.emitted - 1 <= r.accepted <= r.emitted for r in g.rounds)


@settings(max_examples=25, deadline=None)
@given(st.lists(shapes(), min_size=1, max_size=4), st.integers(0, 1000), st.sampled_from([0.5, 1.0, 1.5]))
def test_coupled_sampling_does_not_see_the_trees(trees, seed, temperature):
    prompts = prompts_for(seed)
    sampling = Sampling(temperature, top_k=20, top_p=0.95, repetition_penalty=1.2)
    plain = generate(SHARED, Plain(), prompts, Limits(15, (EOS,)), sampling, seed=seed)
    hints = [p + g.tokens for p, g in zip(prompts, plain, strict=True)]
    out = generate(SHARED, Scripted(trees, hints), prompts, Limits(15, (EOS,)), sampling, seed=seed)
    assert [g.tokens for g in out] == [g.tokens for g in plain]


def test_a_stream_whose_target_went_on_to_something_else_says_so():
    steps = stream(SHARED, Plain(), [[5, 6]], Limits(9))
    next(steps)
    generate(SHARED, Plain(), [[7]], Limits(2))
    with pytest.raises(UserError, match="began to decode something else"):
        list(steps)
