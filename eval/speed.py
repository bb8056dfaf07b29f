"""Timed decodes of one prompt: with the drafter, plain through the same loop, and transformers' own generate.

The three are run in turn, in an order that rotates from prompt to prompt, so that whatever else the machine does falls
on all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from specdec.decode import Generation, generate
from specdec.drafter import Drafter
from specdec.drafters.none import Plain
from specdec.stopping import Limits
from specdec.target import Target

MODES = ("drafter", "plain", "transformers")


@dataclass(frozen=True)
class Timed:
    """One prompt's three decodes: tokens and seconds of each mode, and the drafter's rounds."""

    tokens: dict[str, list[int]]
    seconds: dict[str, float]
    generation: Generation


def timed(target: Target, drafter: Drafter, prompt: Sequence[int], limits: Limits, turn: int) -> Timed:
    """Decode greedily in every mode, starting with another one at each turn."""
    runs: dict[str, Callable[[], list[int] | Generation]] = {
        "drafter": lambda: generate(target, drafter, [prompt], limits)[0],
        "plain": lambda: generate(target, Plain(), [prompt], limits)[0].tokens,
        "transformers": lambda: stock_generate(target, prompt, limits),
    }
    tokens: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    generation = Generation()
    for mode in MODES[turn % 3 :] + MODES[: turn % 3]:
        start = _now(target)
        out = runs[mode]()
        seconds[mode] = _now(target) - start
        if isinstance(out, Generation):
            generation, out = out, out.tokens
        tokens[mode] = out
    return Timed(tokens, seconds, generation)


def stock_generate(target: Target, prompt: Sequence[int], limits: Limits) -> list[int]:
    """transformers' own greedy decoding of the unmodified model, without the penalties its files may ask for."""
    return stock_answers(target, [prompt], limits, 1)[0]


@torch.inference_mode()
def stock_answers(
    target: Target, prompts: Sequence[Sequence[int]], limits: Limits, size: int, **settings: Any
) -> list[list[int]]:
    """The same for many prompts, `size` at a time, padded on the left; settings go to `model.generate`."""
    stops = list(limits.stop_tokens)
    plain = GenerationConfig(eos_token_id=stops or None, pad_token_id=stops[0] if stops else 0, do_sample=False)
    answers: list[list[int]] = []
    with target.stock() as model:
        held, model.generation_config = model.generation_config, plain
        try:
            for start in range(0, len(prompts), size):
                some = prompts[start : start + size]
                width = max(map(len, some))
                ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in some], device=target.device)
                mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in some], device=target.device)
                room = min(limits.max_new_tokens, target.window - width)
                out = model.generate(ids, attention_mask=mask, max_new_tokens=room, **settings)
                answers += [_ended(row[width:], limits.stop_tokens) for row in out.tolist()]
        finally:
            model.generation_config = held
    return answers


def _ended(tokens: list[int], stops: tuple[int, ...]) -> list[int]:
    """Up to the first stop token: rows that end early are padded."""
    at = next((i for i, token in enumerate(tokens) if token in stops), len(tokens) - 1)
    return tokens[: at + 1]


@dataclass(frozen=True)
class Ratio:
    """Median and middle half of per-prompt ratios."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


def ratio(slow: Sequence[float], fast: Sequence[float]) -> Ratio:
    """How many times faster `fast` is: seconds of both, prompt by prompt."""
    values = sorted(a / b for a, b in zip(slow, fast, strict=True))
    if len(values) < 2:
        return Ratio(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(median, low, high)


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
