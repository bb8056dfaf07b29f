import pytest
import torch
from tiny import EOS

from eval.speed import stock_generate
from specdec import Limits, Sampling, TokenTree, generate
from specdec.drafters.none import Plain

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3]]


class Oracle(Plain):
    """Proposes what the target will say, with a mistake in each `wrong`-th token, as a chain or a bushy tree."""

    nodes = 9

    def __init__(self, texts, wrong=0, bushy=False):
        super().__init__()
        self.texts, self.wrong, self.bushy = texts, wrong, bushy

    def propose(self, context, sampling, generator):  # noqa: ARG002
        rows = []
        for tokens, length in zip(context.tokens.tolist(), context.lengths.tolist(), strict=True):
            text = next(t for t in self.texts if tokens[:length] == t[:length])
            chain = (text[length - 1 :] + [0] * 5)[:5]
            rows.append([t if not self.wrong or (length + i) % self.wrong else t + 1 for i, t in enumerate(chain)])
            rows[-1][0] = tokens[length - 1]
        tokens = torch.tensor(rows)
        if not self.bushy:
            return TokenTree.chain(tokens)
        decoys = (tokens + 1) % 300
        tree = torch.cat([tokens[:, :1], decoys[:, 1:], tokens[:, 1:]], 1)  # no time shift: nodes of a tree
        return TokenTree(tree, torch.tensor([[-1, 0, 5, 6, 7, 0, 5, 6, 7]]).expand(len(rows), -1))


def plain(target, prompts, limits):
    return [g.tokens for g in generate(target, Plain(), prompts, limits)]


def test_plain_decoding_equals_transformers(target):
    limits = Limits(30, (EOS,))
    assert plain(target, PROMPTS, limits) == [stock_generate(target, p, limits) for p in PROMPTS]


@pytest.mark.parametrize("bushy", [False, True])
@pytest.mark.parametrize("wrong", [0, 2, 3, 5])
@pytest.mark.parametrize("limit", [1, 2, 7, 30])
def test_any_drafter_gives_the_same_text(target, bushy, wrong, limit):
    limits = Limits(limit, (EOS,))
    expected = plain(target, PROMPTS, limits)
    texts = [p + t for p, t in zip(PROMPTS, plain(target, PROMPTS, Limits(40)), strict=True)]
    out = generate(target, Oracle(texts, wrong, bushy), PROMPTS, limits)
    assert [g.tokens for g in out] == expected
    assert all(len(g.tokens) == 1 + sum(r.emitted for r in g.rounds) for g in out)


def test_a_perfect_drafter_is_accepted_whole(target):
    texts = [p + t for p, t in zip(PROMPTS, plain(target, PROMPTS, Limits(40)), strict=True)]
    out = generate(target, Oracle(texts), PROMPTS, Limits(26))
    assert all(g.accepted_length == 5.0 for g in out)


def test_stop_inside_an_accepted_run_cuts_it(target):
    text = plain(target, PROMPTS[:1], Limits(30))[0]
    stop = text[8]
    expected = text[: text.index(stop) + 1]
    out = generate(target, Oracle([PROMPTS[0] + text]), PROMPTS[:1], Limits(30, (stop,)))[0]
    assert out.tokens == expected
    assert out.finish == "stop"
    assert sum(r.emitted for r in out.rounds) == len(expected) - 1


def test_a_row_does_not_depend_on_the_others(target):
    alone = [plain(target, [p], Limits(20, (EOS,)))[0] for p in PROMPTS]
    assert plain(target, PROMPTS, Limits(20, (EOS,))) == alone


def test_features_kept_are_those_of_the_text(target):
    out = generate(target, Plain((2, "final")), PROMPTS, Limits(12, (EOS,)), keep_features=True)
    for prompt, answer in zip(PROMPTS, out, strict=True):
        text = torch.tensor([prompt + answer.tokens])
        expected = target.features(text, (2, "final"))[0]
        assert answer.features.shape[0] == text.shape[1] - 1
        assert torch.allclose(answer.features, expected[: len(answer.features)], atol=1e-10)


def test_features_kept_match_under_speculation_and_a_stop(target):
    text = plain(target, PROMPTS[:1], Limits(30))[0]
    oracle = Oracle([PROMPTS[0] + text])
    oracle.taps = (1,)
    out = generate(target, oracle, PROMPTS[:1], Limits(30, (text[8],)), keep_features=True)[0]
    whole = torch.tensor([PROMPTS[0] + out.tokens])
    expected = target.features(whole, (1,))[0]
    assert len(out.features) <= whole.shape[1]
    assert torch.allclose(out.features, expected[: len(out.features)], atol=1e-10)


def test_sampling_is_reproducible(target):
    runs = [
        generate(target, Plain(), PROMPTS, Limits(10), Sampling(1.0), torch.Generator().manual_seed(3))
        for _ in range(2)
    ]
    assert [g.tokens for g in runs[0]] == [g.tokens for g in runs[1]]


def test_the_end_of_the_window_ends_a_row(target):
    prompt = [5] * 505
    out = generate(target, Plain(), [prompt], Limits(50))[0]
    assert len(out.tokens) == 512 - 505
    assert out.finish == "length"
