"""stream() and generate(): propose, read, accept, keep, until every row has stopped.

One loop for plain decoding (a tree with only a root) and for every drafter; the rows of it are in batch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.accept import AcceptanceRule, lossless
from specdec.batch import Round, Rows, Step
from specdec.drafter import Drafter
from specdec.errors import UserError
from specdec.sampling import Coins, Coupled, Sampling, Stream
from specdec.stopping import Limits
from specdec.target import Target


@dataclass
class Generation:
    """What one prompt got: new tokens (the one that ended it included), its rounds, and why it ended.

    finish: "stop", "stop_string" or "length". features: [positions read, S, D] when asked for; the last token is not
    always read.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: str = ""
    features: Tensor | None = None

    @property
    def accepted_length(self) -> float:
        """τ: mean tokens per round, bonus included; the token that the prompt's own reading gives is excluded."""
        return sum(r.emitted for r in self.rounds) / len(self.rounds) if self.rounds else float("nan")


def generate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    *,
    seed: int | None = None,
    rule: AcceptanceRule = lossless,
    rows: int | None = None,
    keep_features: bool = False,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Generation]:
    """Decode a batch of prompts (lists of ids); the result is in the order of the prompts.

    rows: most prompts decoded at a time, all of them by default; the next one takes the place of one that ended.
    seed: couple the noise to (seed, prompt, position): the text is then exactly that of plain decoding with that seed.
    on_tokens is called with the number of tokens each step emitted. Raises UserError for an empty prompt, one that does
    not fit the target's window, or stop strings without a tokenizer.
    """
    done = [Generation() for _ in prompts]
    steps = stream(
        target,
        drafter,
        prompts,
        limits,
        sampling,
        generator,
        seed=seed,
        rule=rule,
        rows=rows,
        keep_features=keep_features,
    )
    for step in steps:
        state = done[step.row]
        state.tokens += step.tokens
        if step.round is not None:
            state.rounds.append(step.round)
        state.finish, state.features = step.finish, step.features
        if on_tokens is not None:
            on_tokens(len(step.tokens))
    return done


def stream(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    *,
    seed: int | None = None,
    rule: AcceptanceRule = lossless,
    rows: int | None = None,
    keep_features: bool = False,
) -> Iterator[Step]:
    """The same, yielding each row's tokens as its rounds end. See generate()."""
    sampling = sampling or Sampling()
    if limits.stop_strings and target.tokenizer is None:
        raise UserError("stop_strings need a target with a tokenizer")
    if rows is not None and rows < 1:
        raise UserError(f"rows must be 1 or more, got {rows}")
    rows = min(rows or len(prompts), len(prompts))
    coins: Coins = Stream(generator) if seed is None else Coupled(seed, rows)
    # Coupled noise leaves no room for the drafter's own chance, so it is asked to propose without.
    drafting = generator if seed is None else None
    with torch.inference_mode():
        batch = Rows(target, drafter, prompts, rows, limits, sampling, coins, keep_features)
        steps = batch.first()
    yield from steps
    while batch.active:
        with torch.inference_mode():
            steps = batch.round(rule, drafting)
        yield from steps
