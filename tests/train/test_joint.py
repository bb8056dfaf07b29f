"""A target tuned with its drafter: what it may change, what it must not, and that it is known how far it went."""

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from data.batches import batches
from data.texts import Text
from specdec import Limits, Target, TreeConfig, UserError, generate
from specdec.drafters import eagle, medusa
from specdec.drafters.none import Plain
from train import checkpoint
from train.adapters import LoraConfig
from train.fit_config import FitConfig
from train.joint import Joint, JointConfig
from train.loop import fit
from train.objectives.eagle import EagleObjective, EagleObjectiveConfig
from train.objectives.medusa import MedusaObjective, MedusaObjectiveConfig


def said_by(target):
    """Logits after each token of a text."""
    return target.head(target.features(torch.tensor([[5, 6, 7, 8]]), ("final",))[:, :, 0].clone()).detach()


class Bench:
    """A small joint fit in a folder."""

    def __init__(self, folder, mode="lora", kind="medusa", **changes):
        self.folder, self.mode, self.kind = folder, mode, kind
        self.joint = JointConfig(**({"warmup": 0.2, "ramp": 0.0, "lora": LoraConfig(rank=4)} | changes))
        self.target = Target(tiny_model().float(), tiny_tokenizer(), "tiny")
        counts = torch.arange(self.target.vocab_size, 0, -1).double()
        generator = torch.Generator().manual_seed(0)
        if kind == "medusa":
            self.drafter = medusa.create(medusa.MedusaConfig(3, 1, 200), self.target, counts, generator)
            objective = MedusaObjective(MedusaObjectiveConfig(), self.drafter, self.target)
            self.taps = ("final",)
        else:
            self.drafter = eagle.create(eagle.EagleConfig(draft_vocab_size=200), self.target, counts, generator)
            objective = EagleObjective(EagleObjectiveConfig(), self.drafter, self.target)
            self.taps = (*self.drafter.taps, "final")
        prompts = [[5, 60 + i, 7] for i in range(6)]
        answers = generate(self.target, Plain(), prompts, Limits(20))
        self.texts = [
            Text(torch.tensor(prompt + answer.tokens), ((3, 3 + len(answer.tokens)),), None)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        self.learner = Joint(self.joint, mode, self.target, self.drafter, objective, self.taps)
        self.values = {}

    def batches(self, start=0):
        return self.learner.originals(batches(self.texts, self.learner.original, self.taps, 2, 0, False, start))

    def run(self, steps, stop_at=None, **changes):
        settings = {"lr": 3e-3, "batch_size": 2, "save_steps": 100, "average_decay": 0.0} | changes

        def report(step, values):
            self.values[step] = values
            if step == stop_at:
                raise KeyboardInterrupt

        def save(at, average, optimizer):
            own = (medusa if self.kind == "medusa" else eagle).config_of(self.drafter)
            parameters, state = self.learner.parameters, self.learner.state
            return checkpoint.save(self.folder, at, self.kind, own, self.drafter, parameters, average, optimizer, state)

        resume = checkpoint.latest(self.folder)
        return fit(FitConfig(**settings), self.learner, self.batches, steps, save, resume, report, every=1)

    def original_logits(self):
        with self.learner.as_it_was():
            return said_by(self.learner.original)


@pytest.mark.parametrize(("mode", "kind"), [("lora", "medusa"), ("full", "medusa"), ("lora", "eagle")])
def test_the_target_changes_and_the_original_is_still_there(tmp_path, mode, kind):
    bench = Bench(tmp_path, mode, kind)
    before = bench.original_logits()
    assert bench.learner.quality([next(bench.batches())])["kl_original"] < 1e-6
    bench.run(10)
    assert torch.equal(bench.original_logits(), before), "adapters off, or the copy, is the original bit for bit"
    quality = bench.learner.quality([next(bench.batches())])
    assert quality["kl_original"] > 1e-6
    assert quality["perplexity"] != quality["perplexity_original"]


def test_nothing_of_the_target_moves_in_the_warm_up(tmp_path):
    bench = Bench(tmp_path, warmup=0.5)
    bench.run(10)
    assert "kl_original" not in bench.values[5]
    assert bench.values[6]["kl_original"] == pytest.approx(0, abs=1e-5), "step 6 is the first with the target"
    assert bench.values[10]["kl_original"] > 1e-5


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_finished_the_target_is_an_ordinary_model_that_says_the_same(tmp_path, mode):
    bench = Bench(tmp_path, mode)
    bench.run(8)
    said = said_by(bench.target)
    bench.learner.finish()
    bench.target.model.save_pretrained(tmp_path / "target")
    again = Target(type(bench.target.model).from_pretrained(tmp_path / "target"), name="again")
    assert torch.allclose(said_by(again), said, atol=1e-4)
    drafter = bench.drafter.eval()
    drafter.tree = TreeConfig(depth=3)
    prompts = [[5, 6, 7], [9, 10]]
    plain = generate(again, Plain(), prompts, Limits(20))
    drafted = generate(again, drafter, prompts, Limits(20))
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_only_the_last_layers_are_tuned_when_asked(tmp_path):
    bench = Bench(tmp_path, layers=2)
    assert {name.split(".")[2] for name in bench.learner.parameters if name.startswith("target.")} == {"3", "4"}
    bench.run(4)


def test_a_resumed_joint_fit_is_bit_for_bit_the_same(tmp_path):
    whole = Bench(tmp_path / "whole")
    end = whole.run(10)
    again = Bench(tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        again.run(10, stop_at=6, save_steps=5)
    assert checkpoint.latest(tmp_path / "again").name == "step-000005"
    fresh = Bench(tmp_path / "again")
    done = fresh.run(10, save_steps=5)
    assert fresh.values[8]["loss"] == whole.values[8]["loss"]
    for name in ("training.safetensors", "drafter.safetensors"):
        assert (done / name).read_bytes() == (end / name).read_bytes()


def test_the_drafters_loss_reaches_the_target(tmp_path):
    """Without the term that holds it, the target would still be moved."""
    bench = Bench(tmp_path)
    bench.learner.begin(0.9)
    batch = next(bench.batches())
    totals = bench.learner(batch)
    totals["drafter_loss"].sum.backward()
    factors = [p for name, p in bench.learner.parameters.items() if name.startswith("target.") and "lora_B" in name]
    assert any(float(p.grad.abs().sum()) > 0 for p in factors)


@pytest.mark.parametrize("bad", [{"lr_factor": 0.0}, {"warmup": 1.0}, {"layers": 0}, {"max_kl": 0.0}])
def test_bad_settings_are_named(bad):
    with pytest.raises(UserError, match=r"joint\."):
        JointConfig(**bad)
