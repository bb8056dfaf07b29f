"""Distilling a draft model: memorise one text, decode it, nearly all is accepted; the neighbouring horizon fails."""

import contextlib
import dataclasses

import pytest
import torch
from tiny import EOS, tiny_model, tiny_tokenizer

from data.batches import Batch
from specdec import Limits, TreeConfig, UserError, generate
from specdec.drafters.draft_model import DraftModelConfig, create
from specdec.drafters.none import Plain
from train.checkpoint import latest, save
from train.fit_config import FitConfig
from train.learner import Learner
from train.loop import fit
from train.objectives.draft_model import DraftModelObjective, DraftModelObjectiveConfig, tau
from train.optim import Optimizers

PROMPT = [5, 60, 7, 81, 9]
DEPTH = 4


def drafter_for(target, counts=None, **changes):
    if counts is None:
        counts = torch.arange(target.vocab_size, 0, -1).double()
    config = DraftModelConfig(**({"layers": [0, 2], "draft_vocab_size": 64} | changes))
    drafter = create(config, target, counts, torch.Generator().manual_seed(0)).to(target.model.dtype)
    drafter.tree = TreeConfig(depth=DEPTH)
    return drafter


def memorised_accepted_length(target, shift=0, teacher="soft", **changes):
    answer = generate(target, Plain(), [PROMPT], Limits(48, (EOS,)))[0].tokens
    tokens = torch.tensor([PROMPT + answer])
    mask = torch.zeros_like(tokens).bool()
    mask[0, len(PROMPT) :] = True
    counts = torch.bincount(tokens[0], minlength=target.vocab_size).double()
    drafter = drafter_for(target, counts, **changes)
    objective = DraftModelObjective(DraftModelObjectiveConfig(loss="kl", teacher=teacher), drafter, target)
    objective.horizon += shift
    batch = Batch(tokens, mask, torch.zeros_like(tokens), target.features(tokens, ("final",)).clone())
    optimizer = Optimizers(dict(drafter.named_parameters()), "adamw", 1e-2, 0.0)
    for step in range(120):
        totals = objective(drafter, batch)
        totals["loss"].mean().backward()
        optimizer.step(1.0 if step < 60 else 0.1)  # the target has near ties
    out = generate(target, drafter, [PROMPT], Limits(48, (EOS,)))[0]
    assert out.tokens == answer
    if not shift:
        assert float(totals["tau"].mean()) > 0.8 * (1 + DEPTH)
    return out.accepted_length


@pytest.mark.parametrize("kind", ["soft", "hard", "own_head", "tied", "untied"])
def test_a_memorised_text_is_accepted(target, tmp_path, kind):
    changes = {"own_head": {"head": "own"}, "hard": {"teacher": "hard"}}.get(kind, {})
    if "tied" in kind:
        tiny_model(9, num_hidden_layers=2, tie_word_embeddings=kind == "tied").save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        changes = {"source": str(tmp_path), "layers": None}
    assert memorised_accepted_length(target, **changes) >= 0.9 * (DEPTH + 1)


def test_a_horizon_off_by_one_fails(target):
    assert memorised_accepted_length(target, 1) < 0.5 * (DEPTH + 1)
    with pytest.raises(ValueError, match="horizon must be at least 1"):
        memorised_accepted_length(target, -1)


def batch_of(target, rows, width):
    """rows: lists of texts; the first three tokens of each are the prompt."""
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    documents, number = torch.full_like(tokens, -1), 0
    mask = torch.zeros_like(tokens).bool()
    for row, members in enumerate(rows):
        at = 0
        for text in members:
            end = at + len(text)
            tokens[row, at:end], documents[row, at:end], mask[row, at + 3 : end] = text, number, True
            at, number = end, number + 1
    return Batch(tokens, mask, documents, target.features(tokens, ("final",), documents).clone())


TEXTS = [torch.randint(3, 200, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 14, 11)]


@pytest.mark.parametrize("loss", ["lk_hybrid", "0.3*ce+0.7*jsd:0.5"])
def test_packed_texts_padding_and_splits_change_nothing(target, loss):
    drafter = drafter_for(target, draft_vocab_size=150)
    objective = DraftModelObjective(DraftModelObjectiveConfig(loss=loss), drafter, target)

    def run(*batches):
        drafter.zero_grad()
        totals = [objective(drafter, batch) for batch in batches]
        for one in totals:
            one["loss"].sum.backward()
        added = {name: sum((one[name] for one in totals[1:]), totals[0][name]) for name in totals[0]}
        gradients = torch.cat([p.grad.flatten() for p in drafter.parameters()])
        return {name: (float(total.sum.detach()), float(total.count)) for name, total in added.items()}, gradients

    apart, gradients = run(batch_of(target, [[text] for text in TEXTS], 17))
    packed = run(batch_of(target, [TEXTS[:2], TEXTS[2:]], 26))
    split = run(batch_of(target, [TEXTS[:1]], 9), batch_of(target, [TEXTS[1:]], 25))
    for totals, own in (packed, split):
        for name, value in apart.items():
            assert totals[name] == pytest.approx(value)
        assert torch.allclose(own, gradients)
    assert set(apart) == {"loss", "accept_1", "expected_1", "tau", "coverage"}
    assert 0 < apart["coverage"][0] < apart["coverage"][1]


@pytest.mark.parametrize("head", ["frozen", "own"])
def test_training_and_decoding_see_the_same_laws(target, head):
    """What slot t gives in training is what a decode from the text that ends there proposes by."""
    drafter = drafter_for(target, draft_vocab_size=150, head=head)
    tokens = torch.randint(3, 200, (1, 14), generator=torch.Generator().manual_seed(1))
    states = drafter.states(tokens, torch.zeros_like(tokens))[0].detach()
    expected = states @ drafter.head_rows().detach().T
    seen = []
    original = drafter.model.score
    drafter.model.score = lambda final: seen.append(original(final)) or seen[-1]
    slot = 6
    generate(target, drafter, [tokens[0, : slot + 1].tolist()], Limits(1 + DEPTH))
    assert torch.allclose(seen[0][0], expected[slot], atol=1e-10)  # what it reads first: the prompt


def test_the_tree_of_guesses_is_read_as_the_text_would_be(target):
    """Every proposed token is the likeliest of the training forward over the path before it."""
    drafter = drafter_for(target, draft_vocab_size=150)
    seen, original = [], drafter.propose

    def propose(context, *arguments):
        seen.append((context, original(context, *arguments)))
        return seen[-1][1]

    drafter.propose = propose
    generate(target, drafter, [PROMPT], Limits(12))
    for context, tree in seen:
        text = context.tokens[:, : int(context.lengths[0])]
        whole = torch.cat([text[:, :-1], tree.tokens], 1)  # no time shift: the pending token is the tree's root
        states = drafter.states(whole, torch.zeros_like(whole))[0, text.shape[1] - 1 :]
        guesses = drafter.draft_ids[(states @ drafter.head_rows().T).argmax(-1)]
        assert guesses[:DEPTH].tolist() == tree.tokens[0, 1:].tolist()


def test_tau_is_counted_by_hand():
    right = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 0]]).bool()
    scored = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0]]).bool()
    assert float(tau(right, scored, 2).mean()) == pytest.approx((3 + 3 + 3 + 2 + 1 + 2) / 6)
    assert float(tau(right, scored, 9).mean()) == pytest.approx((5 + 4 + 3 + 2 + 1 + 2) / 6)


def test_the_drafters_own_answers_take_the_texts_place(target):
    drafter = drafter_for(target, draft_vocab_size=150)
    batch = dataclasses.replace(batch_of(target, [[text] for text in TEXTS], 17), number=3)
    config = DraftModelObjectiveConfig(loss="kl", on_policy=1.0, on_policy_tokens=5)
    objective = DraftModelObjective(config, drafter, target)
    first = objective(drafter, batch)
    again = objective(drafter, batch)
    assert torch.equal(first["loss"].sum, again["loss"].sum), "drawn by the batch's number"
    other = objective(drafter, dataclasses.replace(batch, number=4))
    assert not torch.equal(first["loss"].sum, other["loss"].sum)
    assert float(first["loss"].count) <= 5 * len(TEXTS)
    assert float(first["coverage"].mean()) == 1.0
    first["loss"].sum.backward()
    assert all(bool((p.grad != 0).any()) for p in drafter.parameters())
    ce = DraftModelObjective(dataclasses.replace(config, loss="ce"), drafter, target)(drafter, batch)
    assert float(ce["loss"].sum.detach()) == 0.0, "its own tokens are no labels"


def test_batches_are_the_drafters_own_as_often_as_asked(target):
    drafter = drafter_for(target, draft_vocab_size=150)
    config = DraftModelObjectiveConfig(on_policy=0.3, on_policy_tokens=1)
    objective, batch = DraftModelObjective(config, drafter, target), batch_of(target, [TEXTS[:1]], 9)
    own = [objective._written(drafter, dataclasses.replace(batch, number=number)) is not None for number in range(200)]
    assert 0.2 < sum(own) / 200 < 0.4


def test_a_resumed_run_draws_what_an_uninterrupted_one_does(target, tmp_path):
    batches = [dataclasses.replace(batch_of(target, [[t] for t in TEXTS], 17), number=n) for n in range(6)]
    config = FitConfig(max_steps=6, lr=1e-3, save_steps=3, optimizer="adamw")

    def run(folder, resume=None, stop=None):
        drafter, losses = drafter_for(target, draft_vocab_size=150), []
        objective = DraftModelObjective(DraftModelObjectiveConfig(on_policy=0.5, on_policy_tokens=5), drafter, target)
        learner = Learner(drafter, objective)

        def keep(progress, average, optimizer):
            return save(folder, progress, "draft_model", {}, drafter, learner.parameters, average, optimizer)

        def report(step, values):
            losses.append(values["loss"])
            if step == stop:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            fit(config, learner, lambda start: iter(batches[start:]), 6, keep, resume, report, every=1)
        return losses

    whole = run(tmp_path / "a")
    first = run(tmp_path / "b", stop=4)  # after the checkpoint of step 3
    rest = run(tmp_path / "b", latest(tmp_path / "b"))
    assert len(whole) == 6
    assert first[:3] + rest == whole


@pytest.mark.parametrize(
    "bad",
    [
        {"teacher": "x"},
        {"teacher_power": 0.0},
        {"depth": 0},
        {"on_policy": 1.5},
        {"on_policy": 0.5, "teacher": "hard"},
        {"on_policy": 0.5, "supervise_prompt": True},
    ],
)
def test_bad_settings_are_named(bad):
    with pytest.raises(UserError, match=r"drafter\.objective"):
        DraftModelObjectiveConfig(**bad)
