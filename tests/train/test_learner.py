"""Adapters on a drafter: what is trained, what is saved, and that both say the same."""

import pytest
import torch

from data.batches import batches
from data.texts import Text
from specdec import Limits, TreeConfig, UserError, generate, open_drafter
from specdec.drafters import draft_model
from specdec.drafters.none import Plain
from train import checkpoint
from train.adapters import LoraConfig
from train.fit_config import FitConfig
from train.learner import Learner
from train.loop import fit
from train.objectives.draft_model import DraftModelObjective, DraftModelObjectiveConfig


def fitted(target, folder, lora, steps=6, stop_at=None):
    """A fit of two of the target's layers; its drafter and its last checkpoint."""
    counts = torch.arange(target.vocab_size, 0, -1).double()
    config = draft_model.DraftModelConfig(layers=[0, 3], draft_vocab_size=200)
    drafter = draft_model.create(config, target, counts, torch.Generator().manual_seed(0))
    learner = Learner(drafter, DraftModelObjective(DraftModelObjectiveConfig(), drafter, target), lora)
    texts = [Text(torch.arange(3 + i, 23 + i), ((2, 20),), None) for i in range(4)]

    def save(at, average, optimizer):
        own = draft_model.config_of(drafter)
        parameters = learner.parameters
        return checkpoint.save(folder, at, "draft_model", own, drafter, parameters, average, optimizer, learner.state)

    def report(step, _):
        if step == stop_at:
            raise KeyboardInterrupt

    settings = FitConfig(lr=1e-2, batch_size=2, save_steps=3, average_decay=0.0, optimizer="adamw")
    path = fit(
        settings,
        learner,
        lambda start: batches(texts, target, ("final",), 2, 0, False, start),
        steps,
        save,
        checkpoint.latest(folder),
        report,
        every=1,
    )
    return drafter, path


def test_adapters_are_merged_when_saved_and_say_the_same(target, tmp_path):
    plain, _ = fitted(target, tmp_path / "plain", None)
    drafter, path = fitted(target, tmp_path / "lora", LoraConfig(rank=4))
    opened = open_drafter(path, target)
    assert set(opened.state_dict()) == set(plain.state_dict())
    tokens = torch.tensor([[5, 6, 7, 8]])
    documents = torch.zeros_like(tokens)
    checkpoint.load_averaged(path, {n: p for n, p in drafter.named_parameters() if ".lora_" in n})
    assert torch.allclose(opened.states(tokens, documents), drafter.states(tokens, documents), atol=1e-5)
    assert not torch.allclose(opened.states(tokens, documents), plain.states(tokens, documents), atol=1e-3)
    opened.tree = TreeConfig(depth=3)
    expected = generate(target, Plain(), [[5, 6, 7]], Limits(20))[0].tokens
    assert generate(target, opened, [[5, 6, 7]], Limits(20))[0].tokens == expected


def test_dropout_that_would_do_nothing_is_refused(target, tmp_path):
    with pytest.raises(UserError, match=r"fit\.lora\.dropout"):
        fitted(target, tmp_path, LoraConfig(rank=4, dropout=0.1))


def test_a_resumed_fit_of_adapters_is_bit_for_bit_the_same(target, tmp_path):
    _, whole = fitted(target, tmp_path / "whole", LoraConfig(rank=4))
    torch.rand(3)  # what others draw does not matter
    try:
        fitted(target, tmp_path / "cut", LoraConfig(rank=4), stop_at=5)
    except KeyboardInterrupt:
        assert checkpoint.latest(tmp_path / "cut").name == "step-000003"
    _, again = fitted(target, tmp_path / "cut", LoraConfig(rank=4))
    for name in ("training.safetensors", "drafter.safetensors"):
        assert (again / name).read_bytes() == (whole / name).read_bytes()
