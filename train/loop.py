"""fit: the training loop, the same for every drafter.

A step is `gradient_accumulation_steps` batches; their losses are sums and counts, divided once. Batches are a function
of seed and number, so a resumed fit sees what an uninterrupted one would have seen and has the same losses.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from data.batches import Batch
from specdec.errors import UserError
from train import checkpoint
from train.losses import Total
from train.optim import KINDS, Average, Optimizers, cosine


@dataclass(frozen=True)
class FitConfig:
    """conf/fit/*.yaml."""

    optimizer: str = "muon"
    """muon (matrices; the rest with AdamW) or adamw."""
    lr: float = 2e-3
    """Peak learning rate, the same for both."""
    epochs: float = 2.0
    """Passes over the distilled texts; ignored when max_steps is set."""
    max_steps: int | None = None
    """Optimiser steps."""
    batch_size: int = 4
    """Rows per batch: a text each, or as many as pack_tokens takes."""
    pack_tokens: int | None = None
    """Put several texts into one row of up to this many tokens; they do not see each other. null: a text a row."""
    gradient_accumulation_steps: int = 1
    """Batches per optimiser step."""
    warmup_ratio: float = 0.04
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.01
    """On matrices only."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    average_decay: float = 0.99
    """Of the moving average of the weights, which is what is saved; 0 turns it off."""
    save_steps: int = 100
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        if self.optimizer not in KINDS:
            raise UserError(f"fit.optimizer: '{self.optimizer}' is not one of {', '.join(KINDS)}")
        for name in ("batch_size", "gradient_accumulation_steps", "save_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"fit.{name} must be 1 or more, got {getattr(self, name)}")
        if self.pack_tokens is not None and self.pack_tokens < 1:
            raise UserError(f"fit.pack_tokens must be 1 or more, or null, got {self.pack_tokens}")
        numbers = (self.lr, self.epochs, 1 if self.max_steps is None else self.max_steps)
        if not all(0 < number < math.inf for number in numbers):
            raise UserError("fit.lr, fit.epochs and fit.max_steps must be above 0")
        if not 0 <= self.weight_decay < math.inf or not 0 <= self.warmup_ratio <= 1 or not self.max_grad_norm > 0:
            raise UserError("fit.weight_decay must be 0 or more, fit.warmup_ratio from 0 to 1, max_grad_norm above 0")
        if not 0 <= self.average_decay < 1:
            raise UserError(f"fit.average_decay must be from 0 to below 1, got {self.average_decay}")

    def steps(self, batches: int) -> int:
        """Optimiser steps, given the batches of one pass over the texts."""
        if self.max_steps is not None:
            return self.max_steps
        return max(1, round(self.epochs * batches / self.gradient_accumulation_steps))


class Objective(Protocol):
    """Sums and counts by name; 'loss' is the one that is minimised."""

    def __call__(self, drafter: nn.Module, batch: Batch) -> dict[str, Total]: ...


def fit(
    config: FitConfig,
    drafter: nn.Module,
    objective: Objective,
    make_batches: Callable[[int], Iterator[Batch]],
    steps: int,
    save: Callable[[int, Average, Optimizers], Path],
    resume_from: Path | None,
    report: Callable[[int, dict[str, float]], None],
    every: int = 10,
) -> Path:
    """Train for `steps` steps and return the last checkpoint.

    make_batches(n) gives the batches from number n on. An interrupt finishes the step and saves a checkpoint first.
    Raises UserError when the loss is no longer a number, naming the step.
    """
    parameters = dict(drafter.named_parameters())
    optimizer = Optimizers(parameters, config.optimizer, config.lr, config.weight_decay)
    average = Average(parameters, config.average_decay)
    step = checkpoint.restore(resume_from, drafter, average, optimizer) if resume_from else 0
    stream = make_batches(step * config.gradient_accumulation_steps)
    sums: dict[str, Total] = {}
    path = resume_from
    drafter.train()
    with _deferred_interrupt() as interrupted:
        while step < steps:
            factor = cosine(step, steps, round(config.warmup_ratio * steps))
            totals = _gradients(config, drafter, objective, stream, list(parameters.values()))
            optimizer.step(factor)
            average.update(parameters, step)
            step += 1
            sums = {name: sums[name] + total if name in sums else total for name, total in totals.items()}
            if step % every == 0 or step == steps:
                values = {name: float(total.mean()) for name, total in sums.items()}
                if not torch.isfinite(torch.tensor(values["loss"])):
                    raise UserError(f"the loss is {values['loss']} at step {step}; try a lower fit.lr ({config.lr})")
                report(step, {**values, "lr": config.lr * factor})
                sums = {}
            if step % config.save_steps == 0 or step == steps or interrupted:
                path = save(step, average, optimizer)
            if interrupted:
                raise KeyboardInterrupt
    assert path is not None
    return path


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


def _gradients(
    config: FitConfig,
    drafter: nn.Module,
    objective: Objective,
    stream: Iterator[Batch],
    parameters: list[nn.Parameter],
) -> dict[str, Total]:
    """Leave one step's clipped gradients on the parameters; returns its detached totals."""
    sums: dict[str, Total] = {}
    for _ in range(config.gradient_accumulation_steps):
        totals = objective(drafter, next(stream))
        totals["loss"].sum.backward()
        totals = {name: Total(total.sum.detach(), total.count) for name, total in totals.items()}
        sums = {name: sums[name] + total if name in sums else total for name, total in totals.items()}
    count = sums["loss"].count.clamp(min=1e-8)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(count)
    torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
    return sums
