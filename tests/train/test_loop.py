import itertools
import math
import signal

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model

from data.batches import batches
from data.texts import Text
from specdec import Target, UserError
from specdec.drafters.eagle import EagleConfig, config_of, create
from train import checkpoint
from train.fit_config import FitConfig
from train.learner import Learner
from train.loop import Judgement, fit
from train.objectives.eagle import EagleObjective, EagleObjectiveConfig


class Bench:
    """A small fit in a folder: run(steps) from whatever is there."""

    def __init__(self, target, folder, **changes):
        self.target, self.folder = target, folder
        self.config = FitConfig(**({"lr": 1e-3, "batch_size": 2, "save_steps": 4} | changes))
        self.losses = {}
        taps = (2, 2, 2, "final")
        self.texts = []
        for i in range(6):
            tokens = torch.randint(3, 200, (10 + i,), generator=torch.Generator().manual_seed(i))
            self.texts.append(Text(tokens, ((2, len(tokens)),), target.features(tokens[None], taps)[0].clone()))

    def run(self, steps, stop_at=None, judge=None):
        counts = torch.arange(self.target.vocab_size, 0, -1).double()
        generator = torch.Generator().manual_seed(0)
        model = EagleConfig(draft_vocab_size=200)
        drafter = create(model, self.target, counts, generator).to(self.target.model.dtype)
        learner = Learner(drafter, EagleObjective(EagleObjectiveConfig(), drafter, self.target))

        def report(step, values):
            if "loss" in values:
                self.losses[step] = values["loss"]
            if step == stop_at:
                signal.raise_signal(signal.SIGINT)

        return fit(
            self.config,
            learner,
            lambda start: batches(self.texts, self.target, (2, 2, 2, "final"), 2, 0, False, start),
            steps,
            lambda at, average, optimizer: checkpoint.save(
                self.folder, at, "eagle", config_of(drafter), drafter, learner.parameters, average, optimizer
            ),
            checkpoint.latest(self.folder),
            report,
            judge,
            every=1,
        )


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("stop_at", [3, 4, 6])
def test_a_resumed_fit_has_the_same_losses_and_weights(target, tmp_path, stop_at, optimizer):
    whole = Bench(target, tmp_path / "whole", optimizer=optimizer)
    end = whole.run(9)
    cut = Bench(target, tmp_path / "cut", optimizer=optimizer)
    with pytest.raises(KeyboardInterrupt):
        cut.run(9, stop_at)
    assert checkpoint.latest(tmp_path / "cut").name == f"step-{stop_at:06d}"
    again = cut.run(9)
    assert cut.losses == whole.losses
    assert (again / "drafter.safetensors").read_bytes() == (end / "drafter.safetensors").read_bytes()


def test_losses_fall(target, tmp_path):
    bench = Bench(target, tmp_path, lr=3e-3)
    bench.run(40)
    values = list(bench.losses.values())
    assert sum(values[-5:]) < 0.8 * sum(values[:5])


def test_only_the_newest_checkpoint_is_kept_and_it_is_whole(target, tmp_path):
    Bench(target, tmp_path).run(9)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000009"]
    names = {p.name for p in (tmp_path / "step-000009").iterdir()}
    assert names == {"drafter.safetensors", "config.json", "training.safetensors", "state.json"}


def test_accumulated_batches_equal_one_large_one(target, tmp_path):
    """Sums over micro-batches are divided once."""
    split = Bench(target, tmp_path / "a", gradient_accumulation_steps=3)
    split.run(1)
    taps = (2, 2, 2, "final")
    counts = torch.arange(target.vocab_size, 0, -1).double()
    drafter = create(EagleConfig(draft_vocab_size=200), target, counts, torch.Generator().manual_seed(0)).double()
    objective = EagleObjective(EagleObjectiveConfig(), drafter, target)
    stream = itertools.islice(batches(split.texts, target, taps, 2, 0, False), 3)
    totals = [objective(drafter, batch)["loss"] for batch in stream]
    mean = sum(float(t.sum.detach()) for t in totals) / sum(float(t.count) for t in totals)
    assert split.losses[1] == pytest.approx(mean, rel=1e-9)


def test_a_loss_that_is_no_number_stops_with_the_step(target, tmp_path):
    bench = Bench(target, tmp_path, lr=1e30)
    with pytest.raises(UserError, match=r"step \d+, batch \d+: .*not taken\. Try a lower fit\.lr"):
        bench.run(9)


def scores(*values):
    """A judge that gives these, one after another."""
    given = iter(values)
    return lambda step: Judgement({"tau": 0.0, "step": step}, next(given))


def test_the_checkpoint_of_the_best_evaluation_is_used_and_kept(target, tmp_path):
    bench = Bench(target, tmp_path, eval_steps=2, save_steps=2)
    assert bench.run(8, judge=scores(1.0, 3.0, 2.0, 2.5)).name == "step-000004"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000008"]
    last = Bench(target, tmp_path / "last", eval_steps=2, keep="last")
    assert last.run(8, judge=scores(1.0, 3.0, 2.0, 2.5)).name == "step-000008"


def test_the_fit_ends_when_evaluations_get_no_better(target, tmp_path):
    bench = Bench(target, tmp_path, eval_steps=2, patience=2)
    assert bench.run(20, judge=scores(1.0, 3.0, 2.0, 2.5, 9.0)).name == "step-000004"
    assert max(bench.losses) == 8
    assert "no better evaluation in 2" in checkpoint.progress_of(tmp_path / "step-000008").stopped
    assert bench.run(20, judge=scores()).name == "step-000004", "it stays ended"


def test_an_evaluation_may_end_the_fit_and_be_left_out(target, tmp_path):
    bench = Bench(target, tmp_path, eval_steps=2)
    answers = iter([Judgement({}, 1.0), Judgement({}, None, "too far")])
    assert bench.run(20, judge=lambda _: next(answers)).name == "step-000002"
    assert checkpoint.progress_of(tmp_path / "step-000004").stopped == "too far"


def test_best_so_far_and_counts_survive_an_interrupt(target, tmp_path):
    judge = {2: 1.0, 4: 3.0, 6: 2.0, 8: 2.5, 10: 2.7}

    def run(folder, steps, **how):
        bench = Bench(target, folder, eval_steps=2)
        return bench.run(steps, judge=lambda step: Judgement({}, judge[step]), **how)

    run(tmp_path / "whole", 10)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", 10, stop_at=7)
    assert run(tmp_path / "cut", 10).name == "step-000004"
    whole, cut = (checkpoint.progress_of(tmp_path / name / "step-000010") for name in ("whole", "cut"))
    assert (cut.best, cut.best_step, cut.stale, cut.tokens, cut.supervised) == (
        whole.best,
        whole.best_step,
        whole.stale,
        whole.tokens,
        whole.supervised,
    )


def test_a_term_that_is_no_number_is_named_and_the_step_not_taken(target, tmp_path):
    bench = Bench(target, tmp_path)
    bench.texts[3].features[:] = math.nan
    with pytest.raises(UserError, match=r"step \d+, batch \d+: loss is nan"):
        bench.run(9)


def test_half_precision_arithmetic_keeps_wide_weights_and_learns(tmp_path):
    bench = Bench(Target(tiny_model().float()), tmp_path, lr=3e-3, dtype="bfloat16", optimizer="adamw")
    path = bench.run(40)
    assert load_file(path / "drafter.safetensors")["fc.weight"].dtype == torch.float32
    values = list(bench.losses.values())
    assert sum(values[-5:]) < 0.8 * sum(values[:5])
    exact = Bench(Target(tiny_model().float()), tmp_path / "exact", lr=3e-3, optimizer="adamw")
    exact.run(1)
    assert bench.losses[1] != exact.losses[1]
    assert bench.losses[1] == pytest.approx(exact.losses[1], rel=0.05)


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": 0.0},
        {"batch_size": 0},
        {"save_steps": 0},
        {"max_steps": 0},
        {"eval_steps": 0},
        {"patience": 2},
        {"schedule": "x"},
        {"dtype": "x"},
    ],
)
def test_bad_settings_are_named(bad):
    with pytest.raises(UserError, match=f"fit.{next(iter(bad))}"):
        FitConfig(**bad)
