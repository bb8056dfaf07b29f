"""The proof of alignment: memorise one text, decode it, and nearly all is accepted; the neighbouring horizons fail."""

import pytest
import torch
from tiny import EOS

from data.batches import Batch
from specdec import Limits, TreeConfig, generate
from specdec.drafters.eagle import EagleConfig, create
from specdec.drafters.none import Plain
from train.objectives.eagle import EagleObjective, EagleObjectiveConfig, scored_slots
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
    assert float(totals["accept_1"].count) == 2


def test_later_steps_reach_the_first_ones_weights(target):
    """The unroll is not detached (EAGLE-3): step 2's loss alone moves fc."""
    drafter, objective = objective_for(target, unroll=2, decay=1.0)
    tokens = torch.tensor([[5, 6, 7, 8]])
    mask = torch.tensor([[False, False, False, True]])
    features = target.features(tokens, (*drafter.taps, "final")).clone()
    batch = Batch(tokens, mask, torch.zeros_like(tokens), features)
    rows, slots = objective._unroll(drafter, batch, features[:, :, :-1], features[:, :, -1])
    assert slots[1].scored.sum() == 1
    rows[1].sum().backward()
    assert float(drafter.fc.weight.grad.abs().sum()) > 0


def test_scored_slots_keeps_order(target):
    drafter, objective = objective_for(target)
    tokens = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(tokens).bool()
    mask[0, 8:], mask[1, 4:] = True, True
    features = target.features(tokens, (*drafter.taps, "final")).clone()
    _, slots = objective._unroll(
        drafter, Batch(tokens, mask, torch.zeros_like(tokens), features), features[:, :, :-1], features[:, :, -1]
    )
    used = scored_slots(slots)
    for row in range(2):
        want = torch.stack([s.scored for s in slots]).any(0)[row].nonzero()[:, 0].tolist()
        assert used[row, : len(want)].tolist() == want
