"""Evaluation within a fit: texts of some prompts are withheld, and those prompts decoded with the drafter as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from data.batches import Batch
from data.texts import Text
from eval.acceptance import acceptance
from specdec.decode import generate
from specdec.drafter import Drafter
from specdec.stopping import Limits
from specdec.target import Target
from train.losses import Total


@dataclass(frozen=True)
class Withheld:
    """texts: those that are trained on. prompts: the withheld ones. held: the texts that begin with them."""

    texts: list[Text]
    prompts: list[list[int]]
    held: list[Text]


def withhold(texts: Sequence[Text], count: int, seed: int) -> Withheld:
    """Keep `count` prompts back, drawn by the seed, with all texts that begin with them; at most a quarter of all."""
    prompts: dict[tuple[int, ...], None] = {prompt_of(text): None for text in texts}
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    listed = list(prompts)
    chosen = [listed[index] for index in order[: min(count, len(listed) // 4)]]
    apart = set(chosen)
    return Withheld(
        texts=[text for text in texts if prompt_of(text) not in apart],
        prompts=[list(prompt) for prompt in chosen],
        held=[text for text in texts if prompt_of(text) in apart],
    )


def prompt_of(text: Text) -> tuple[int, ...]:
    """What stands before the first answer."""
    return tuple(text.tokens[: text.spans[0][0]].tolist())


def decoded(target: Target, drafter: Drafter, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """tau and the acceptance rate over the prompts, greedy, all prompts at once."""
    answers = generate(target, drafter, prompts, Limits(tokens, target.stop_tokens), rows=len(prompts))
    figures = acceptance([one for answer in answers for one in answer.rounds])
    return {"tau": figures.tau, "acceptance_rate": figures.acceptance_rate}


@torch.no_grad()
def teacher_forced(learner: Callable[[Batch], dict[str, Total]], batches: Sequence[Batch]) -> dict[str, float]:
    """The training measures over withheld texts."""
    sums: dict[str, Total] = {}
    for batch in batches:
        for name, total in learner(batch).items():
            sums[name] = sums[name] + total if name in sums else total
    return {f"forced_{name}": float(total.mean()) for name, total in sums.items()}
