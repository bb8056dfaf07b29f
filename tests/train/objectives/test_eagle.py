"""EAGLE's own: the unroll, and what a slot sees where a row holds several texts."""

import dataclasses

import pytest
import torch
from tiny import tiny_model

from data.batches import Batch, collate
from data.texts import Text
from specdec import Target
from specdec.drafters.eagle import EagleConfig, create
from train.objectives import eagle
from train.objectives.eagle import EagleObjective, EagleObjectiveConfig, used_slots


def objective_for(target, **changes):
    counts = torch.arange(target.vocab_size, 0, -1).double()
    drafter = create(EagleConfig(draft_vocab_size=200), target, counts, torch.Generator().manual_seed(0)).double()
    return drafter, EagleObjective(EagleObjectiveConfig(**changes), drafter, target)


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


def make_texts():
    """Texts of several turns."""
    texts = []
    for number, parts in enumerate(SPANS):
        tokens = torch.randint(0, 200, (parts[-1][1],), generator=torch.Generator().manual_seed(number))
        texts.append(Text(tokens, parts))
    return texts


TAPS = objective_for(SHARED)[0].taps


def test_without_the_document_mask_the_loss_is_another(monkeypatch):
    """The control: rows taken for one text each, wholly and then in the attention alone."""
    drafter, objective = objective_for(SHARED)
    batch = collate([make_texts()], SHARED, (*TAPS, "final"), False)
    right = objective(drafter, batch)["loss"]
    mixed = objective(drafter, dataclasses.replace(batch, documents=torch.zeros_like(batch.documents)))["loss"]
    assert mixed.count > right.count, "slots that predict into the next text"
    monkeypatch.setattr(eagle, "any_packed", lambda _: False)
    crossed = objective(drafter, batch)["loss"]
    assert crossed.count == right.count
    assert not torch.isclose(crossed.sum, right.sum, rtol=1e-4)


def test_one_text_a_row_needs_no_mask(monkeypatch):
    drafter, objective = objective_for(SHARED)
    batch = collate([[text] for text in make_texts()], SHARED, (*TAPS, "final"), False)
    monkeypatch.setattr(eagle, "visible_within", lambda _: pytest.fail("a mask was made"))
    objective(drafter, batch)


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
