"""Who writes the answers: the target in this process, through the batch decoder. A server is in remote.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.decode import Generation, stream
from specdec.drafters.none import Plain
from specdec.sampling import Sampling
from specdec.stopping import Limits
from specdec.target import Tap, Target


@dataclass(frozen=True)
class Request:
    """One answer to write: the prompt's ids and the temperature (0 is greedy)."""

    prompt: list[int]
    temperature: float


@dataclass(frozen=True)
class Answer:
    """New ids, the one that ended it included.

    finish: "stop", "length", or "refused" (no answer; reason says why). features: [F, S, D] of prompt and answer, where
    they were kept. exact: the ids are the writer's own; false where its text had to be tokenised again.
    """

    tokens: list[int]
    finish: str
    features: Tensor | None = None
    exact: bool = True
    reason: str = ""


Advance = Callable[[int, int], None]
"""Called with (answers finished, tokens written) of the requests in hand, after each of them."""


class Writer(Protocol):
    """Answers many prompts; the result is in their order, and the same for the same requests and seed."""

    @property
    def name(self) -> str:
        """What the records call the writer."""
        ...

    def answer(self, requests: Sequence[Request], seed: int, advance: Advance) -> list[Answer]: ...


class Local:
    """The target itself. `taps` asks for the features it computes on the way."""

    def __init__(self, target: Target, max_new_tokens: int, rows: int, taps: tuple[Tap, ...]) -> None:
        self.target, self.rows = target, rows
        self.limits = Limits(max_new_tokens, target.stop_tokens)
        self.drafter = Plain(taps)

    @property
    def name(self) -> str:
        return self.target.name

    def answer(self, requests: Sequence[Request], seed: int, advance: Advance) -> list[Answer]:
        generator = torch.Generator(self.target.device).manual_seed(seed)
        answers = [Generation() for _ in requests]
        finished = written = 0
        for temperature in sorted({request.temperature for request in requests}):
            # Long prompts first: none is left to run alone at the end.
            at = [i for i, request in enumerate(requests) if request.temperature == temperature]
            at.sort(key=lambda i: -len(requests[i].prompt))
            prompts = [requests[i].prompt for i in at]
            keep = bool(self.drafter.taps)
            steps = stream(
                self.target,
                self.drafter,
                prompts,
                self.limits,
                Sampling(temperature),
                generator,
                rows=self.rows,
                keep_features=keep,
            )
            for step in steps:
                answer = answers[at[step.row]]
                answer.tokens += step.tokens
                answer.finish, answer.features = step.finish, _narrow(step.features)
                written += len(step.tokens)
                if step.finish:
                    finished += 1
                    advance(finished, written)
        return [Answer(one.tokens, one.finish, one.features) for one in answers]


def _narrow(features: Tensor | None) -> Tensor | None:
    """Off the device, in half precision where the values fit it: some residual streams go beyond its range."""
    if features is None:
        return None
    half = features.half()
    return (half if bool(half.isfinite().all()) else features.float()).cpu()
