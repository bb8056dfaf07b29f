"""What every objective must do; a new file in train/objectives is tested by its line in tests/trained.py.

The proof of alignment: memorise one text, decode it, and nearly all is accepted; the neighbouring horizons fail.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import TREES
from safetensors.torch import load_file
from tiny import EOS, tiny_model, tiny_tokenizer
from trained import TRAINED, VARIANTS

from data.batches import batches, collate
from data.texts import Text
from specdec import Limits, Target, generate
from specdec.drafter import open_drafter, save_drafter
from specdec.drafters.none import Plain
from specdec.tree import TokenTree
from train import checkpoint, losses, objectives
from train.fit_config import FitConfig
from train.learner import Learner
from train.loop import fit
from train.optim import Optimizers

PROMPT = [5, 60, 7, 81, 9]
LIMITS = Limits(48, (EOS,))
SHARED = Target(tiny_model(), tiny_tokenizer(), "tiny")
ANSWER = generate(SHARED, Plain(), [PROMPT], LIMITS)[0].tokens
TEXT = torch.tensor([PROMPT + ANSWER])
COUNTS = torch.bincount(TEXT[0], minlength=SHARED.vocab_size).double()
names = pytest.mark.parametrize("name", TRAINED)


def test_every_objective_is_covered():
    kinds = {path.stem for path in Path(objectives.__path__[0]).glob("[a-z]*.py")}
    assert {entry.kind for entry in TRAINED.values()} == kinds


# -- alignment -------------------------------------------------------------------------------------------------------


def memorised_accepted_length(entry, shift=0):
    assert len(set(ANSWER)) > 12, "the text must not be a loop"
    mask = torch.zeros_like(TEXT).bool()
    mask[0, len(PROMPT) :] = True
    drafter = entry.drafter(SHARED, COUNTS)
    objective = entry.learning(drafter, SHARED)
    objective.horizon += shift
    batch = entry.batch(TEXT, mask, SHARED)
    optimizer = Optimizers(dict(drafter.named_parameters()), "adamw", entry.lr, 0.0)
    for step in range(entry.steps):
        objective(drafter, batch)["loss"].mean().backward()
        optimizer.step(1.0 - step / entry.steps)
    out = generate(SHARED, drafter, [PROMPT], LIMITS)[0]
    assert out.tokens == ANSWER
    return out.accepted_length


@pytest.mark.parametrize("name", [*TRAINED, *VARIANTS])
def test_a_memorised_text_is_accepted(name):
    entry = (TRAINED | VARIANTS)[name]
    assert memorised_accepted_length(entry) >= 0.9 * (entry.depth + 1)


@pytest.mark.parametrize(("name", "shift"), [(name, shift) for name in TRAINED for shift in TRAINED[name].shifts])
def test_a_horizon_off_by_one_fails(name, shift):
    assert memorised_accepted_length(TRAINED[name], shift) < 0.6 * (TRAINED[name].depth + 1)


def taught_laws(entry, drafter, monkeypatch):
    """Per step what training takes for the drafter's law at each slot, [slots, V'] log-probabilities."""
    seen = []

    def recorded(p, log_q, label):  # noqa: ARG001
        seen.append(log_q.clone())
        return log_q.new_zeros(len(log_q)), torch.zeros_like(log_q)

    monkeypatch.setitem(losses.LOSSES, "recorded", recorded)
    objective = entry.learning(drafter, SHARED, loss="recorded")
    objective(drafter, entry.batch(TEXT, torch.ones_like(TEXT).bool(), SHARED))
    rest, laws = torch.cat(seen), []
    while len(rest):  # step s has a row for every slot whose label is still in the text
        count = TEXT.shape[1] - objective.horizon - len(laws)
        laws.append(rest[:count])
        rest = rest[count:]
    return laws, objective.horizon


def decoded_laws(entry, drafter, monkeypatch):
    """(position, depth) -> the log-probabilities by which decoding guesses it, where its path is the text's.

    The loop is the real one; a wrong token at a depth that differs from round to round cuts what is accepted.
    """
    text, seen, rounds = TEXT[0].tolist(), {}, []

    def forced(config, context, expand, *_):
        tree, length = TokenTree.chain(context.pending()[:, None]), int(context.lengths[0])
        rounds.append(length)
        for depth in range(config.depth):
            law, at = expand(tree, depth)[0, -1].log_softmax(-1), min(length + depth, len(text) - 1)
            wrong = len(rounds) % (config.depth + 1)
            if depth <= wrong and length + depth < len(text):
                seen[length + depth, depth] = law
            token = (text[at] + (depth == wrong)) % SHARED.vocab_size
            tree = TokenTree.chain(torch.cat([tree.tokens, torch.tensor([[token]])], 1))
        return tree

    monkeypatch.setattr(sys.modules[drafter.propose.__module__], "grow", forced)
    out = generate(SHARED, drafter, [PROMPT], LIMITS)[0]
    assert out.tokens == ANSWER
    assert len({one.accepted for one in out.rounds}) > entry.depth, "all lengths of what is accepted"
    return seen


@names
def test_training_and_decoding_see_the_same_laws(name, monkeypatch):
    """Teacher-forced, at every slot and step (algorithms §6.4)."""
    entry = TRAINED[name]
    drafter = entry.stirred(SHARED, COUNTS)
    laws, horizon = taught_laws(entry, drafter, monkeypatch)
    compared = Counter()
    for (position, depth), law in decoded_laws(entry, drafter, monkeypatch).items():
        step = 0 if horizon == 1 else depth  # it has read the whole text before: one step speaks for every depth
        if step < len(laws):
            assert float((law - laws[step][position - horizon - step]).abs().max()) < 1e-9
            compared[depth] += 1
    assert set(compared) == set(range(entry.depth if horizon == 1 else len(laws)))
    assert min(compared.values()) >= 4
    assert min(compared.values()) >= 4


# -- sums ------------------------------------------------------------------------------------------------------------

SPANS = [((3, 9),), ((2, 4), (7, 12)), ((1, 5),), ((4, 7), (9, 11), (13, 15))]


def make_texts(entry, features, spans=SPANS):
    """Texts of several turns; the last feature of each was never read, as when an answer was decoded."""
    texts = []
    for number, parts in enumerate(spans):
        tokens = torch.randint(0, 220, (parts[-1][1],), generator=torch.Generator().manual_seed(number))
        kept = SHARED.features(tokens[None], entry.taps(SHARED))[0][:-1] if features else None
        texts.append(Text(tokens, parts, kept))
    return texts


def taught(objective, drafter, made):
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
    assert one[0].keys() == other[0].keys()
    for name in one[0]:
        assert torch.allclose(one[0][name], other[0][name], rtol=1e-9, atol=1e-12), name
    for name, gradient in one[1].items():
        assert torch.allclose(gradient, other[1][name], rtol=1e-9, atol=1e-9 * float(gradient.abs().max())), name


def with_objective(name):
    entry = TRAINED[name]
    drafter = entry.stirred(SHARED)
    return entry, drafter, entry.learning(drafter, SHARED)


@names
@pytest.mark.parametrize("supervise_prompt", [False, True])
@pytest.mark.parametrize("features", [True, False], ids=["stored", "computed"])
def test_split_and_packed_texts_train_as_they_do_alone(name, features, supervise_prompt):
    """Sums add: one division per step can come later."""
    entry, drafter, objective = with_objective(name)
    a, b, c, d = make_texts(entry, features)

    def batch(*rows):
        return collate([list(row) for row in rows], SHARED, entry.taps(SHARED), supervise_prompt)

    alone = taught(objective, drafter, [batch([text]) for text in (a, b, c, d)])
    assert float(alone[0]["loss"][1]) > 0
    for layout in (
        [batch([a], [b], [c], [d])],
        [batch([a, b, c, d])],
        [batch([d, a], [c, b])],
        [batch([b, c, a], [d])],
    ):
        assert_same_training(alone, taught(objective, drafter, layout))


@names
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_however_texts_are_packed_the_loss_is_the_same(name, data):
    entry, drafter, objective = with_objective(name)
    ends = st.lists(st.integers(0, 12), min_size=2, max_size=4, unique=True).map(sorted)
    spans = [
        tuple(zip(cuts[::2], cuts[1::2], strict=False)) for cuts in data.draw(st.lists(ends, min_size=1, max_size=6))
    ]
    texts = make_texts(entry, True, spans)
    rows, rest = [], data.draw(st.permutations(texts))
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        rows, rest = [*rows, rest[:cut]], rest[cut:]
    taps = entry.taps(SHARED)
    alone = taught(objective, drafter, [collate([[text]], SHARED, taps, False) for text in texts])
    assert_same_training(alone, taught(objective, drafter, [collate(rows, SHARED, taps, False)]))


@names
def test_padding_changes_nothing(name):
    """However wide it is, and whatever stands in it."""
    entry, drafter, objective = with_objective(name)
    a, b, c, _ = make_texts(entry, True)
    batch = collate([[a, c], [b]], SHARED, entry.taps(SHARED), False)
    expected = taught(objective, drafter, [batch])
    padding = batch.documents < 0
    assert bool(padding.any())
    for token in (0, 7, EOS):
        tokens = batch.tokens.masked_fill(padding, token)
        features = batch.features.masked_fill(padding[..., None, None], float(token))
        other = dataclasses.replace(batch, tokens=tokens, features=features)
        assert_same_training(expected, taught(objective, drafter, [other]))
    pad = torch.nn.functional.pad
    wider = dataclasses.replace(
        batch,
        tokens=pad(batch.tokens, (0, 3), value=9),
        loss_mask=pad(batch.loss_mask, (0, 3)),
        documents=pad(batch.documents, (0, 3), value=-1),
        features=pad(batch.features, (0, 0, 0, 0, 0, 3), value=1.0),
    )
    assert_same_training(expected, taught(objective, drafter, [wider]))


# -- a fit in fp32 ---------------------------------------------------------------------------------------------------

FROZEN = Target(tiny_model().float(), tiny_tokenizer(), "tiny32")
AS_IT_WAS = {name: tensor.clone() for name, tensor in FROZEN.model.state_dict().items()}


def fitted(entry, folder, stop_at=None):
    """Ten steps of a fit in a folder, from what is there; features come from the target, within the step."""
    drafter, seen = entry.drafter(FROZEN), {}
    learner = Learner(drafter, entry.learning(drafter, FROZEN))
    texts = []
    for number in range(6):
        tokens = torch.randint(3, 200, (10 + number,), generator=torch.Generator().manual_seed(number))
        texts.append(Text(tokens, ((2, len(tokens)),)))

    def report(step, values):
        if "loss" in values:
            seen[step] = values["loss"]
        if step == stop_at:
            signal.raise_signal(signal.SIGINT)

    def save(progress, average, optimizer):
        own = entry.module.config_of(drafter)
        return checkpoint.save(folder, progress, entry.kind, own, drafter, learner.parameters, average, optimizer)

    path = fit(
        FitConfig(lr=1e-3, batch_size=2, save_steps=4),
        learner,
        lambda start: batches(texts, FROZEN, entry.taps(FROZEN), 2, 0, False, start),
        10,
        save,
        checkpoint.latest(folder),
        report,
        every=1,
    )
    return path, seen


@names
def test_an_interrupted_fit_goes_on_bit_for_bit_and_saves_the_drafter_alone(name, tmp_path):
    entry = TRAINED[name]
    whole, expected = fitted(entry, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fitted(entry, tmp_path / "cut", stop_at=5)
    before = checkpoint.latest(tmp_path / "cut")
    assert before is not None
    assert before.name == "step-000005"
    again, rest = fitted(entry, tmp_path / "cut")
    assert list(rest) == [6, 7, 8, 9, 10]
    assert rest == {step: expected[step] for step in rest}
    for file in ("drafter.safetensors", "training.safetensors"):
        assert (again / file).read_bytes() == (whole / file).read_bytes()

    target = FROZEN.model.state_dict()
    assert all(torch.equal(tensor, target[name]) for name, tensor in AS_IT_WAS.items())
    saved, drafter = load_file(whole / "drafter.safetensors"), entry.drafter(FROZEN)
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in drafter.state_dict().items()
    }
    moved = {name for name, parameter in drafter.named_parameters() if not torch.equal(parameter, saved[name])}
    assert moved == {name for name, _ in drafter.named_parameters()}
    for name, tensor in saved.items():
        same = [own for own in target.values() if own.shape == tensor.shape and torch.equal(own, tensor)]
        assert tensor.dim() < 2 or not same, f"{name} is the target's"


@names
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_saved_and_opened_is_the_same_drafter(name, tree, tmp_path):
    entry = TRAINED[name]
    drafter = entry.stirred(SHARED)
    drafter.tree = TREES[tree].limited(TREES[tree].most_nodes, entry.depth)
    save_drafter(drafter, entry.kind, entry.module.config_of(drafter), tmp_path)
    again = open_drafter(tmp_path, SHARED)
    assert again.tree == drafter.tree
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key])
    assert proposals(drafter) == proposals(again)


def proposals(drafter):
    """Every tree of a text."""
    made, original = [], drafter.propose

    def spy(*arguments):
        tree = original(*arguments)
        made.append((tree.tokens.tolist(), tree.parents.tolist()))
        return tree

    drafter.propose = spy
    generate(SHARED, drafter, [PROMPT, PROMPT[1:]], Limits(20))
    return made
