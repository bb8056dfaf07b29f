"""The proof of alignment: memorise one text, decode it, and nearly all is accepted; the neighbouring horizons fail."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, tiny_model

from data.batches import Batch, collate
from data.texts import Text
from specdec import Limits, Target, TreeConfig, generate
from specdec.drafters.eagle import EagleConfig, create
from specdec.drafters.none import Plain
from train.objectives import eagle
from train.objectives.eagle import EagleObjective, EagleObjectiveConfig, used_slots
from train.optim import Optimizers

PROMPT = [5, 60, 7, 81, 9]
DEPTH = 4


def memorised_accepted_length(target, shift=0, depth=DEPTH):
    answer = generate(target, Plain(), [PROMPT], Limits(48, (EOS,)))[0].tokens
    assert len(set(answer)) > 12, "the text must not be a loop"
    tokens = torch.tensor([PROMPT + answer])
    mask = torch.zeros_like(tokens).bool()
    mask[0, len(PROMPT) :] = True
    counts = torch.bincount(tokens[0], minlength=target.vocab_size).double()
    drafter = create(EagleConfig(draft_vocab_size=64), target, counts, torch.Generator().manual_seed(0)).double()
    drafter.tree = TreeConfig(depth=depth)
    objective = EagleObjective(EagleObjectiveConfig(unroll=depth), drafter, target)
    objective.horizon += shift
    features = target.features(tokens, (*drafter.taps, "final")).clone()
    batch = Batch(tokens, mask, torch.zeros_like(tokens), features)
    optimizer = Optimizers(dict(drafter.named_parameters()), "adamw", 3e-3, 0.0)
    for _ in range(150):
        loss = objective(drafter, batch)["loss"].mean()
        loss.backward()
        optimizer.step(1.0)
    out = generate(target, drafter, [PROMPT], Limits(48, (EOS,)))[0]
    assert out.tokens == answer
    return out.accepted_length


def test_a_memorised_text_is_accepted(target):
    assert memorised_accepted_length(target) >= 0.9 * (DEPTH + 1)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_horizon_off_by_one_fails(target, shift):
    assert memorised_accepted_length(target, shift) < 0.5 * (DEPTH + 1)


def objective_for(target, **changes):
    counts = torch.arange(target.vocab_size, 0, -1).double()
    drafter = create(EagleConfig(draft_vocab_size=200), target, counts, torch.Generator().manual_seed(0)).double()
    return drafter, EagleObjective(EagleObjectiveConfig(**changes), drafter, target)


def test_padding_and_other_rows_change_nothing(target):
    """Sums over a padded batch are the sums over its rows alone: one division per step can come later."""
    drafter, objective = objective_for(target)
    texts = [torch.randint(3, 200, (1, n), generator=torch.Generator().manual_seed(n)) for n in (9, 14)]

    def batch(texts, width):
        tokens = torch.zeros(len(texts), width, dtype=torch.long)
        mask, documents = torch.zeros_like(tokens).bool(), torch.full_like(tokens, -1)
        for row, text in enumerate(texts):
            size = text.shape[1]
            tokens[row, :size], mask[row, 3:size], documents[row, :size] = text[0], True, row
        return Batch(tokens, mask, documents, target.features(tokens, (*drafter.taps, "final")).clone())

    together = objective(drafter, batch(texts, 17))
    alone = [objective(drafter, batch([text], text.shape[1])) for text in texts]
    for name, total in together.items():
        assert torch.allclose(total.sum, alone[0][name].sum + alone[1][name].sum)
        assert float(total.count) == pytest.approx(float(alone[0][name].count + alone[1][name].count))


def test_only_masked_tokens_of_the_draft_vocabulary_count(target):
    drafter, objective = objective_for(target, unroll=1)
    tokens = torch.tensor([[5, 6, 7, 250, 9, 10]])  # 250 is outside the 200 draft tokens
    mask = torch.tensor([[False, False, True, True, True, False]])
    features = target.features(tokens, (*drafter.taps, "final")).clone()
    totals = objective(drafter, Batch(tokens, mask, torch.zeros_like(tokens), features))
    assert float(totals["loss"].count) == 2
    assert float(totals["accept_1"].count) == 3, "what cannot be proposed is wrong"
    assert (float(totals["coverage"].sum), float(totals["coverage"].count)) == (2, 3)


def test_later_steps_reach_the_first_ones_weights(target):
    """The unroll is not detached (EAGLE-3): step 2's loss alone moves fc."""
    drafter, objective = objective_for(target, unroll=2, decay=1.0)
    tokens = torch.tensor([[5, 6, 7, 8]])
    mask = torch.tensor([[False, False, False, True]])
    features = target.features(tokens, (*drafter.taps, "final")).clone()
    batch = Batch(tokens, mask, torch.zeros_like(tokens), features)
    steps = objective._unroll(drafter, batch, features[:, :, :-1], features[:, :, -1])
    assert steps[1].scored.sum() == 1
    steps[1].rows.sum().backward()
    assert float(drafter.fc.weight.grad.abs().sum()) > 0


def test_used_slots_keeps_order(target):
    drafter, objective = objective_for(target)
    tokens = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(tokens).bool()
    mask[0, 8:], mask[1, 4:] = True, True
    features = target.features(tokens, (*drafter.taps, "final")).clone()
    steps = objective._unroll(
        drafter, Batch(tokens, mask, torch.zeros_like(tokens), features), features[:, :, :-1], features[:, :, -1]
    )
    used = used_slots([step.taught for step in steps])
    for row in range(2):
        want = torch.stack([step.taught for step in steps]).any(0)[row].nonzero()[:, 0].tolist()
        assert used[row, : len(want)].tolist() == want


# -- several texts in a row ------------------------------------------------------------------------------------------

SHARED = Target(tiny_model())
SPANS = [((3, 9),), ((2, 4), (7, 12)), ((1, 5),), ((4, 7), (9, 11), (13, 15))]


def make_texts(features, spans=SPANS):
    """Texts of several turns; the last feature of each was never read, as when an answer was decoded."""
    texts = []
    for number, parts in enumerate(spans):
        tokens = torch.randint(0, 200, (parts[-1][1],), generator=torch.Generator().manual_seed(number))
        kept = SHARED.features(tokens[None], (*TAPS, "final"))[0][:-1] if features else None
        texts.append(Text(tokens, parts, kept))
    return texts


def trained(objective, drafter, made):
    """Summed losses and counts of batches, and the gradient of the loss."""
    drafter.zero_grad()
    sums = {}
    for batch in made:
        totals = objective(drafter, batch)
        totals["loss"].sum.backward()
        for name, total in totals.items():
            sums[name] = sums.get(name, 0) + torch.stack([total.sum.detach().double(), total.count.double()])
    return sums, {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}


def assert_same_training(one, other):
    for name in one[0]:
        assert torch.allclose(one[0][name], other[0][name], rtol=1e-9, atol=1e-12), name
    for name, gradient in one[1].items():
        assert torch.allclose(gradient, other[1][name], rtol=1e-9, atol=1e-9 * float(gradient.abs().max())), name


TAPS = objective_for(SHARED)[0].taps


@pytest.mark.parametrize("supervise_prompt", [False, True])
@pytest.mark.parametrize("unroll", [1, 3])
@pytest.mark.parametrize("features", [True, False], ids=["stored", "computed"])
def test_packed_texts_train_as_they_do_alone(features, unroll, supervise_prompt):
    drafter, objective = objective_for(SHARED, unroll=unroll)
    a, b, c, d = make_texts(features)

    def batch(*rows):
        return collate([list(row) for row in rows], SHARED, (*TAPS, "final"), supervise_prompt)

    alone = trained(objective, drafter, [batch([text]) for text in (a, b, c, d)])
    assert float(alone[0]["loss"][1]) > 0
    for layout in (
        [batch([a], [b], [c], [d])],
        [batch([a, b, c, d])],
        [batch([d, a], [c, b])],
        [batch([b, c, a], [d])],
    ):
        assert_same_training(alone, trained(objective, drafter, layout))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_however_texts_are_packed_the_loss_is_the_same(data):
    drafter, objective = objective_for(SHARED)
    ends = st.lists(st.integers(0, 12), min_size=2, max_size=4, unique=True).map(sorted)
    spans = [
        tuple(zip(cuts[::2], cuts[1::2], strict=False)) for cuts in data.draw(st.lists(ends, min_size=1, max_size=6))
    ]
    texts = make_texts(True, spans)
    rows, rest = [], data.draw(st.permutations(texts))
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        rows, rest = [*rows, rest[:cut]], rest[cut:]
    taps = (*TAPS, "final")
    alone = trained(objective, drafter, [collate([[text]], SHARED, taps, False) for text in texts])
    assert_same_training(alone, trained(objective, drafter, [collate(rows, SHARED, taps, False)]))


def test_without_the_document_mask_the_loss_is_another(monkeypatch):
    """The control: rows taken for one text each, wholly and then in the attention alone."""
    drafter, objective = objective_for(SHARED)
    batch = collate([make_texts(True)], SHARED, (*TAPS, "final"), False)
    right = objective(drafter, batch)["loss"]
    mixed = objective(drafter, dataclasses.replace(batch, documents=torch.zeros_like(batch.documents)))["loss"]
    assert mixed.count > right.count, "slots that predict into the next text"
    monkeypatch.setattr(eagle, "any_packed", lambda _: False)
    crossed = objective(drafter, batch)["loss"]
    assert crossed.count == right.count
    assert not torch.isclose(crossed.sum, right.sum, rtol=1e-4)


def test_one_text_a_row_needs_no_mask(monkeypatch):
    drafter, objective = objective_for(SHARED)
    batch = collate([[text] for text in make_texts(True)], SHARED, (*TAPS, "final"), False)
    monkeypatch.setattr(eagle, "visible_within", lambda _: pytest.fail("a mask was made"))
    objective(drafter, batch)


@pytest.mark.parametrize("token", [0, 7, EOS])
def test_what_stands_in_the_padding_changes_nothing(token):
    drafter, objective = objective_for(SHARED)
    a, b, c, _ = make_texts(False)
    batch = collate([[a, c], [b]], SHARED, (*TAPS, "final"), False)
    tokens = batch.tokens.masked_fill(batch.documents < 0, token)
    features = SHARED.features(tokens, (*TAPS, "final"), batch.documents).clone()
    other = dataclasses.replace(batch, tokens=tokens, features=features)
    assert_same_training(trained(objective, drafter, [batch]), trained(objective, drafter, [other]))


def test_each_supervised_span_counts_and_nothing_else():
    """A token counts at step s if its slot, 2 + s before it, is in the text."""
    drafter, objective = objective_for(SHARED)
    tokens = torch.arange(3, 23)
    assert torch.isin(tokens, drafter.draft_ids).all()
    text = Text(tokens, ((2, 6), (11, 14)))
    batch = collate([[text, text]], SHARED, (*TAPS, "final"), False)
    totals = objective(drafter, batch)
    counts = [float(totals[f"accept_{step}"].count) for step in (1, 2, 3)]
    assert counts == [2 * (4 + 3), 2 * (3 + 3), 2 * (2 + 3)]
    steps = objective._unroll(drafter, batch, batch.features[:, :, :-1], batch.features[:, :, -1])
    for step in steps:
        labels = drafter.draft_ids[step.labels].tolist()
        assert set(labels) <= set(tokens[2:6].tolist() + tokens[11:14].tolist())
