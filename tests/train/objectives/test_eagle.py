"""EAGLE's own: the unroll, what a slot sees where a row holds several texts, and the states of generation 1."""

import dataclasses

import pytest
import torch
from tiny import tiny_model

from data.batches import Batch, collate
from data.texts import Text
from specdec import Target, UserError
from specdec.drafters.eagle import EagleConfig, create
from specdec.layers import grouped
from train import unrolled
from train.objectives import eagle
from train.objectives.eagle import EagleObjective, EagleObjectiveConfig, used_slots


def objective_for(target, generation=3, size=200, **changes):
    counts = torch.arange(target.vocab_size, 0, -1).double()
    config = EagleConfig(draft_vocab_size=size, generation=generation)
    drafter = create(config, target, counts, torch.Generator().manual_seed(0)).double()
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
    steps = objective._unroll(drafter, batch)
    assert steps[1].scored.sum() == 1
    steps[1].rows.sum().backward()
    assert float(drafter.fc.weight.grad.abs().sum()) > 0


def test_used_slots_keeps_order(target):
    drafter, objective = objective_for(target)
    tokens = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(tokens).bool()
    mask[0, 8:], mask[1, 4:] = True, True
    features = target.features(tokens, (*drafter.taps, "final")).clone()
    steps = objective._unroll(drafter, Batch(tokens, mask, torch.zeros_like(tokens), features))
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
    monkeypatch.setattr(eagle, "starts_within", lambda _: pytest.fail("a mask was made"))
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
    for step in objective._unroll(drafter, batch):
        labels = drafter.draft_ids[step.labels].tolist()
        assert set(labels) <= set(tokens[2:6].tolist() + tokens[11:14].tolist())


# -- the unroll against a rollout of each slot -----------------------------------------------------------------------


def rollout(drafter, text, features, slot, steps, detach):
    """What the head reads at each step of one slot: true features up to it, then its own, everything read anew."""
    inputs, hidden, rows = text[1 : slot + 2], drafter.fuse(features[: slot + 1]), []
    for step in range(steps):
        at = torch.arange(slot + 1 + step)[None]
        out, own = drafter.step(inputs[None], hidden[None], at, lambda q, k, v: grouped(q, k, v, None))
        rows.append(out[0, -1])
        own = own[:, -1].detach() if detach else own[:, -1]
        hidden, inputs = torch.cat([hidden, own]), torch.cat([inputs, text[slot + 2 + step :][:1]])
    return rows


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize(("generation", "detach"), [(3, False), (3, True), (1, False), (1, True)])
def test_the_unroll_is_the_rollout_of_every_slot(monkeypatch, generation, detach, in_parts):
    """T21, values and gradients; texts one after another in a row see only themselves."""
    if in_parts:
        monkeypatch.setattr(unrolled, "LONG", 0)
        monkeypatch.setattr(unrolled, "PART", 500)
        monkeypatch.setattr(eagle, "HEAVY", 0)
    drafter, objective = objective_for(SHARED, generation, unroll=3, detach=detach)
    texts = make_texts()
    taps = (*drafter.taps, "final")
    batch = collate([texts[:3], texts[3:]], SHARED, taps, True)
    steps = objective._unroll(drafter, batch)
    slots = {}  # of each text, by the place of its first token
    for row, several in enumerate((texts[:3], texts[3:])):
        start = 0
        for text in several:
            features = SHARED.features(text.tokens[None], taps)[0, :, : len(drafter.taps)].clone()
            for slot in range(len(text.tokens) - 2):
                depth = min(3, len(text.tokens) - 2 - slot)
                slots[row, start + slot] = rollout(drafter, text.tokens, features, slot, depth, detach)
            start += len(text.tokens)
    expected = [
        torch.stack([slots[tuple(at)][number] for at in step.taught.nonzero().tolist()])
        for number, step in enumerate(steps)
    ]
    weights = [torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)).double() for rows in expected]
    parameters = [p for name, p in drafter.named_parameters() if name != "lm_head.weight"]
    gradients = []
    for found in ([step.rows for step in steps], expected):
        total = sum((rows * weight).sum() for rows, weight in zip(found, weights, strict=True))
        gradients.append(torch.autograd.grad(total, parameters))
    for step, rows in zip(steps, expected, strict=True):
        assert torch.allclose(step.rows, rows, atol=1e-10)
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-10 * float(other.abs().max()))


# -- generation 1 ----------------------------------------------------------------------------------------------------


def one_text(target, taps=("final",)):
    tokens = torch.randint(3, 200, (1, 16), generator=torch.Generator().manual_seed(3))
    features = target.features(tokens, taps).clone()
    return Batch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), features)


def oracle(drafter, batch):
    """The drafter says what the target's next state is."""
    final = batch.features[0, :, -1]

    def step(tokens, hidden, positions, attend):  # noqa: ARG001
        states = final[(positions + 1).clamp(max=len(final) - 1)]
        return states, states

    drafter.step = step


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_true_next_state_is_without_loss(target, noise):
    """T18: any shift shows. Noise is on what is read, not on what is learned."""
    drafter, objective = objective_for(
        target, 1, size=target.vocab_size, unroll=3, loss="kl", teacher_power=1.0, feature_noise=noise
    )
    drafter.lm_head.weight.copy_(target.head_rows(drafter.draft_ids))  # in fp64
    batch = one_text(target)
    oracle(drafter, batch)
    totals = objective(drafter, batch)
    assert float(totals["feature"].sum) == 0.0
    assert abs(float(totals["loss"].sum)) < 1e-9
    for step in (1, 2, 3):
        assert float(totals[f"accept_{step}"].mean()) == 1.0
        assert float(totals[f"expected_{step}"].mean()) == pytest.approx(1.0)
    objective.horizon += 1
    totals = objective(drafter, batch)
    assert float(totals["feature"].mean()) > 0.1
    assert float(totals["accept_1"].mean()) < 0.5


def test_the_distance_is_added_to_the_loss_and_measured_apart(target):
    drafter, objective = objective_for(target, 1, unroll=2, decay=0.5, loss="0.1*kl", feature_weight=3.0)
    batch = one_text(target)
    totals, by_hand = objective(drafter, batch), 0.0
    with torch.no_grad():
        steps = objective._unroll(drafter, batch)
    for share, step in zip((1.0, 0.5), steps, strict=True):
        away = (step.rows - step.final).abs()
        by_hand += share * float(torch.where(away < 1, away**2 / 2, away - 0.5).mean(-1).sum())
    assert float(totals["feature"].sum) == pytest.approx(by_hand)
    assert float(totals["feature"].count) == float(totals["loss"].count)
    assert not totals["feature"].sum.requires_grad
    _, bare = objective_for(target, 1, unroll=2, decay=0.5, loss="0.1*kl", feature_weight=0.0)
    without = float(bare(drafter, batch)["loss"].sum.detach())
    assert float(totals["loss"].sum.detach()) == pytest.approx(without + 3 * by_hand)
    third, own = objective_for(target)
    assert "feature" not in own(third, one_text(target, (*third.taps, "final")))


def test_a_target_that_is_tuned_too_is_not_drawn_towards_the_guess(target):
    drafter, objective = objective_for(target, 1)
    batch = one_text(target)
    batch.features.requires_grad_()
    guess = torch.zeros(target.width, dtype=torch.float64, requires_grad=True)
    drafter.step = lambda tokens, *_: (guess.expand(*tokens.shape, -1),) * 2
    objective(drafter, batch)["loss"].sum.backward()
    assert guess.grad is not None
    assert batch.features.grad is None


def test_noise_is_drawn_from_the_batchs_number(target):
    features = torch.randn(2, 64, 1, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for kind, most in (("uniform", 0.1 * 512 / 64), ("gaussian", 1.0)):
        _, objective = objective_for(target, 1, feature_noise=0.1, feature_noise_kind=kind)
        noise = objective._noisy(features, 5) - features
        assert torch.equal(noise, objective._noisy(features, 5) - features)
        assert not torch.allclose(noise, objective._noisy(features, 6) - features)
        assert float(noise.abs().max()) < most
        size = most / 3**0.5 if kind == "uniform" else 0.1 * float(features.std(-1).square().mean().sqrt())
        assert float(noise.std()) == pytest.approx(size, rel=0.05)
    assert objective_for(target)[1]._noisy(features, 5) is features


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_noise_kind": "loud"}, "feature_noise_kind: 'loud' is not one of gaussian, uniform"),
        ({"feature_weight": -1.0}, "feature_weight and drafter.objective.feature_noise must be 0 or more"),
        ({"teacher_power": 0.0}, "teacher_power must be above 0"),
    ],
)
def test_settings_that_mean_nothing_are_named(change, message):
    with pytest.raises(UserError, match=message):
        EagleObjectiveConfig(**change)
