"""fit: the training loop, the same for every drafter.

A step is `gradient_accumulation_steps` batches; their losses are sums and counts, divided once. Batches are a function
of seed and number, so a resumed fit sees what an uninterrupted one would have seen and has the same losses.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from data.batches import Batch
from specdec.errors import UserError
from train import checkpoint
from train.checkpoint import Progress
from train.fit_config import FitConfig
from train.losses import Total
from train.optim import Average, Optimizers, schedule


class Learner(Protocol):
    """What is trained: train/learner.py."""

    parameters: Mapping[str, nn.Parameter]
    factors: Mapping[str, float]
    """Multiples of the learning rate, by name; 1 for the others."""

    def begin(self, share: float) -> None:
        """A step begins, at this share of the whole fit."""

    def __call__(self, batch: Batch) -> dict[str, Total]:
        """Sums and counts by name; 'loss' is the one that is minimised."""
        ...

    def train(self, on: bool) -> None:
        """Whether gradients are wanted from now on."""


@dataclass(frozen=True)
class Judgement:
    """An evaluation within a fit. score: higher is better; None: not fit to be kept. stop: why to end here."""

    values: dict[str, float]
    score: float | None
    stop: str | None = None


def fit(
    config: FitConfig,
    learner: Learner,
    make_batches: Callable[[int], Iterator[Batch]],
    steps: int,
    save: Callable[[Progress, Average, Optimizers], Path],
    resume_from: Path | None,
    report: Callable[[int, dict[str, float]], None],
    evaluate: Callable[[int], Judgement] | None = None,
    every: int = 10,
) -> Path:
    """Train for `steps` steps, or until evaluations stop getting better, and return the checkpoint to use: the best one
    where fit.keep says so, else the last.

    make_batches(n) gives the batches from number n on. An interrupt finishes the step and saves a checkpoint first.
    Raises UserError when a loss or gradient is no longer a number, naming step, batch and term.
    """
    parameters = learner.parameters
    optimizer = Optimizers(parameters, config.optimizer, config.lr, config.weight_decay, learner.factors)
    average = Average(parameters, config.average_decay)
    progress, path = Progress(), resume_from
    if resume_from is not None:
        progress = checkpoint.restore(resume_from, parameters, average, optimizer)
    stream = make_batches(progress.step * config.gradient_accumulation_steps)
    window = _Window()
    learner.train(True)
    with _deferred_interrupt() as interrupted:
        while progress.step < steps and progress.stopped is None:
            started, done = time.monotonic(), progress.step
            factor = schedule(config.schedule, done, steps, round(config.warmup_ratio * steps), config.min_lr_ratio)
            learner.begin(done / steps)
            sample = _gradients(config, learner, stream, done + 1)
            optimizer.step(factor)
            average.update(parameters, done)
            seconds = time.monotonic() - started
            progress = replace(
                progress,
                step=done + 1,
                tokens=progress.tokens + sample.tokens,
                supervised=progress.supervised + sample.supervised,
                seconds=progress.seconds + seconds,
            )
            window.add(sample, seconds)
            if progress.step % every == 0 or progress.step == steps:
                report(progress.step, {**window.values(), "lr": config.lr * factor, **_so_far(progress)})
                window = _Window()
            best = progress.best_step
            if evaluate is not None and config.evaluates(progress.step, steps):
                progress = _judged(config, progress, _evaluated(learner, average, evaluate, progress.step, report))
            kept = progress.best_step != best or progress.stopped is not None
            if progress.step % config.save_steps == 0 or progress.step == steps or kept or interrupted:
                path = save(progress, average, optimizer)
            if interrupted:
                raise KeyboardInterrupt
    learner.train(False)
    assert path is not None
    if config.keep == "best" and progress.best_step is not None:
        return checkpoint.path_of(path.parent, progress.best_step)
    return path


def _evaluated(
    learner: Learner,
    average: Average,
    evaluate: Callable[[int], Judgement],
    step: int,
    report: Callable[[int, dict[str, float]], None],
) -> Judgement:
    """What an evaluation of the averaged weights says; recorded as eval/…"""
    learner.train(False)
    with checkpoint.averaged(learner.parameters, average):
        judgement = evaluate(step)
    learner.train(True)
    report(step, {f"eval/{name}": value for name, value in judgement.values.items()})
    return judgement


def _judged(config: FitConfig, progress: Progress, judgement: Judgement) -> Progress:
    score, stale = judgement.score, progress.stale + 1
    if score is not None and (progress.best is None or score > progress.best):
        progress = replace(progress, best=score, best_step=progress.step)
        stale = 0
    stop = judgement.stop
    if stop is None and config.patience is not None and stale >= config.patience:
        stop = f"no better evaluation in {stale}; the best was that of step {progress.best_step}"
    return replace(progress, stale=stale, stopped=stop)


def _so_far(progress: Progress) -> dict[str, float]:
    return {"tokens": progress.tokens, "supervised": progress.supervised, "minutes": progress.seconds / 60}


@dataclass(frozen=True)
class _Sample:
    """What a step saw."""

    totals: dict[str, Total]
    tokens: int
    supervised: int
    grad_norm: float


class _Window:
    """Steps since the last report."""

    def __init__(self) -> None:
        self.totals: dict[str, Total] = {}
        self.tokens = self.steps = 0
        self.seconds = self.grad_norm = 0.0

    def add(self, sample: _Sample, seconds: float) -> None:
        self.totals = _added(self.totals, sample.totals)
        self.tokens, self.steps = self.tokens + sample.tokens, self.steps + 1
        self.seconds, self.grad_norm = self.seconds + seconds, self.grad_norm + sample.grad_norm

    def values(self) -> dict[str, float]:
        """Means over the steps; tokens read per second."""
        means = {name: float(total.mean()) for name, total in self.totals.items()}
        rate = self.tokens / max(self.seconds, 1e-9)
        return {**means, "grad_norm": self.grad_norm / self.steps, "tokens_per_second": rate}


def _added(sums: dict[str, Total], totals: dict[str, Total]) -> dict[str, Total]:
    return {name: sums[name] + total if name in sums else total for name, total in totals.items()}


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[list[int]]:
    """Within, Ctrl-C and SIGTERM only fill the list: a step is finished and saved before the run ends.

    A second Ctrl-C ends at once.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(number: int, _: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _gradients(config: FitConfig, learner: Learner, stream: Iterator[Batch], step: int) -> _Sample:
    """Leave one step's clipped gradients on the parameters."""
    sums: dict[str, Total] = {}
    tokens = supervised = 0
    numbers = []
    for _ in range(config.gradient_accumulation_steps):
        batch = next(stream)
        torch.manual_seed(batch.number)  # dropout draws what it would have drawn in an uninterrupted fit
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=config.half(batch.tokens.device)):
            totals = learner(batch)
        totals["loss"].sum.backward()
        sums = _added(sums, {name: Total(total.sum.detach(), total.count) for name, total in totals.items()})
        tokens += int((batch.documents >= 0).sum())
        supervised += int(batch.loss_mask.sum())
        numbers.append(batch.number)
    count = sums["loss"].count.clamp(min=1e-8)
    trained = [parameter for parameter in learner.parameters.values() if parameter.grad is not None]
    for parameter in trained:
        assert parameter.grad is not None
        parameter.grad.div_(count)
    norm = float(torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm))
    if not math.isfinite(norm) or not math.isfinite(float(sums["loss"].sum)):
        raise UserError(_not_a_number(sums, norm, step, numbers, config))
    return _Sample(sums, tokens, supervised, norm)


def _not_a_number(sums: dict[str, Total], norm: float, step: int, numbers: list[int], config: FitConfig) -> str:
    wrong = [f"{name} is {float(total.mean())}" for name, total in sums.items() if not _finite(total.sum)]
    batches = f"batch {numbers[0]}" if len(numbers) == 1 else f"batches {numbers[0]} to {numbers[-1]}"
    what = ", ".join(wrong) or f"the gradient's norm is {norm}"
    return (
        f"step {step}, {batches}: {what}; the step was not taken. Try a lower fit.lr ({config.lr:g}) or "
        "fit.max_grad_norm; the same command goes on from the last checkpoint"
    )


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())
