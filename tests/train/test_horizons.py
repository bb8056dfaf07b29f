"""What is measured over the steps of a slot, against a count by hand."""

import pytest
import torch

from specdec import UserError
from specdec.align import align
from specdec.vocab import places
from train.horizons import known_weighting, measured, step_of, steps_loss
from train.losses import loss_named


def two_steps(target, outside=()):
    """One row of seven tokens, all supervised from the third on, read by two heads."""
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    mask = torch.tensor([[False, False, True, True, True, True, True]])
    final = torch.randn(1, 7, target.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([token for token in range(200) if token not in outside])
    place = places(ids, target.vocab_size)
    steps = []
    for step in range(2):
        slots = align(tokens, mask, torch.zeros_like(tokens), final, 2 + step)
        taught = slots.scored & (place[slots.labels] >= 0)
        steps.append(step_of(final[taught], slots, taught, place, 0.5**step))
    return steps, target.head_rows(ids)


def test_runs_are_counted_from_their_slot(target):
    steps, _ = two_steps(target)
    # Slots 0..4 are scored at step 1, slots 0..3 at step 2.
    agrees = [torch.tensor([True, True, False, True, True]), torch.tensor([True, False, True, True])]
    totals = measured(steps, agrees, [torch.full((5,), 0.5), torch.full((4,), 0.25)])
    # Tokens of a round begun at each slot: 3, 2, 1, 3 and, where the text ends, 2.
    assert float(totals["tau"].mean()) == pytest.approx((3 + 2 + 1 + 3 + 2) / 5)
    assert float(totals["accept_1"].mean()) == pytest.approx(4 / 5)
    assert float(totals["expected_2"].mean()) == pytest.approx(0.25)
    assert float(totals["coverage"].mean()) == 1.0


def test_labels_outside_the_vocabulary_are_wrong_and_bound_the_acceptance(target):
    steps, _ = two_steps(target, outside=(9,))
    assert [len(step.rows) for step in steps] == [4, 3]
    totals = measured(steps, [torch.ones(4).bool(), torch.ones(3).bool()], [torch.ones(4), torch.ones(3)])
    assert float(totals["accept_1"].mean()) == pytest.approx(4 / 5)
    assert float(totals["coverage"].mean()) == pytest.approx(7 / 9)
    assert float(totals["expected_1"].mean()) <= 4 / 5
    # The run that would pass the missing label ends before it.
    assert float(totals["tau"].mean()) == pytest.approx((3 + 2 + 1 + 3 + 2) / 5)


def test_rows_of_one_matrix_and_of_several_have_the_same_loss(target):
    steps, head = two_steps(target)

    def teacher(final, _):
        return (final @ head.T).softmax(-1)

    for weighting in ("decay", "accepted"):
        together = steps_loss([(steps, head)], teacher, loss_named("kl"), weighting)
        apart = steps_loss([([step], head) for step in steps], teacher, loss_named("kl"), weighting)
        for name, total in together.items():
            assert torch.allclose(total.sum, apart[name].sum)
            assert torch.allclose(total.count, apart[name].count)


def test_an_unknown_weighting_is_named():
    with pytest.raises(UserError, match=r"drafter\.objective\.weighting: 'x' is not one of decay, accepted"):
        known_weighting("x")
