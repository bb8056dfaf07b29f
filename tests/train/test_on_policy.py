"""Batches that the drafter wrote: drawn from its own law, ended as a decoder ends, and the same again."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from makers import subset
from tiny import EOS

from data.batches import Batch
from specdec import Sampling, TreeConfig
from train.on_policy import draw_answers, rewritten, spans_of, texts_of


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@given(st.lists(st.booleans(), max_size=12))
def test_spans_cover_exactly_what_the_mask_does(mask):
    spans = spans_of(mask)
    assert [at for start, end in spans for at in range(start, end)] == [at for at, on in enumerate(mask) if on]
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end < start


def test_first_tokens_follow_the_drafters_law(target):
    drafter = subset(target, TreeConfig())
    prompt, rows = [5, 6, 7], 4000
    final = drafter.states(torch.tensor([prompt]), torch.zeros(1, 3, dtype=torch.long))[0, -1].detach()
    law = Sampling(1.0).probs(final @ drafter.head_rows().detach().T)
    first = [answer[0] for answer in draw_answers(drafter, [prompt] * rows, 1, (), seeded(0))]
    found = torch.bincount(torch.tensor(first), minlength=target.vocab_size)[drafter.draft_ids] / rows
    common = law * rows >= 5
    assert int(common.sum()) > 10
    assert bool(((found - law).abs() <= 4.5 * (law * (1 - law) / rows).sqrt())[common].all())
    assert float(found[~common].sum()) < 2 * float(law[~common].sum()) + 0.01


def test_later_tokens_are_read_in_their_own_texts(target):
    """Each row goes on as the drafter alone would after what the row holds, also when others have ended."""
    drafter = subset(target, TreeConfig())
    with torch.no_grad():
        drafter.body.norm.weight.mul_(100.0)  # sampling is then greedy
    prompts = [[5, 6, 7], [9, 8], [3], [40, 41, 42, 43]]

    def alone(prompt, stops):
        text = list(prompt)
        while len(text) - len(prompt) < 12:
            final = drafter.states(torch.tensor([text]), torch.zeros(1, len(text), dtype=torch.long))[0, -1]
            text.append(int(drafter.draft_ids[(drafter.head_rows() @ final).argmax()]))
            if text[-1] in stops:
                break
        return text[len(prompt) :]

    free = [alone(prompt, ()) for prompt in prompts]
    assert draw_answers(drafter, prompts, 12, (), seeded(0)) == free
    stops = (free[0][3], free[2][6])
    assert draw_answers(drafter, prompts, 12, stops, seeded(0)) == [alone(prompt, stops) for prompt in prompts]


def batch_of(target):
    """Two texts in one row and two turns in another; padding behind."""
    tokens = torch.randint(3, 200, (2, 20), generator=seeded(4))
    mask, documents = torch.zeros(2, 20).bool(), torch.full((2, 20), -1)
    documents[0, :8], documents[0, 8:18], documents[1, :14] = 0, 1, 2
    mask[0, 4:8] = mask[0, 12:18] = mask[1, 3:6] = mask[1, 9:14] = True
    return Batch(tokens, mask, documents, target.features(tokens, ("final",), documents).clone(), 7)


def test_only_last_answers_are_replaced(target):
    drafter, batch = subset(target, TreeConfig()), batch_of(target)
    own = rewritten(batch, drafter, target, 6, seeded(0))
    assert own.number == 7
    before, after = texts_of(batch), texts_of(own)
    assert [text.spans[:-1] for text in after] == [text.spans[:-1] for text in before] == [(), (), ((3, 6),)]
    for old, new in zip(before, after, strict=True):
        start, end = new.spans[-1]
        assert start == old.spans[-1][0]
        assert torch.equal(new.tokens[:start], old.tokens[:start])
        assert end == len(new.tokens)
        assert 1 <= end - start <= 6
        assert end - start == 6 or int(new.tokens[-1]) == EOS
        assert set(new.tokens[start:].tolist()) <= set(drafter.draft_ids.tolist())
    again = rewritten(batch, drafter, target, 6, seeded(0))
    assert torch.equal(again.tokens, own.tokens)
    assert not torch.equal(rewritten(batch, drafter, target, 6, seeded(1)).tokens, own.tokens)
    expected = target.features(own.tokens, ("final",), own.documents)[own.documents >= 0]
    assert torch.allclose(own.features[own.documents >= 0], expected)


@pytest.mark.parametrize("start", [0, 20])
def test_texts_without_an_answer_of_their_own_are_left_out(target, start):
    batch = batch_of(target)
    mask = torch.zeros_like(batch.loss_mask)
    mask[:, start:] = batch.documents[:, start:] >= 0
    assert (
        rewritten(
            Batch(batch.tokens, mask, batch.documents, batch.features),
            subset(target, TreeConfig()),
            target,
            6,
            seeded(0),
        )
        is None
    )
