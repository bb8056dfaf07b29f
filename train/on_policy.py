"""Batches whose answers the drafter wrote itself (GKD 2306.13649, DistillSpec 2310.08461): it learns where it goes, not
only where the target's texts go. Only a drafter that is a language model can write.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from data.batches import Batch, collate
from data.texts import Text
from specdec.drafters.draft_model import Distilled
from specdec.sampling import Sampling, draw
from specdec.target import Target
from specdec.tree import Paths, TokenTree


def spans_of(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """(first, end) of each run of true."""
    found, at = [], 0
    for value, members in itertools.groupby(mask):
        end = at + len(list(members))
        if value:
            found.append((at, end))
        at = end
    return found


def texts_of(batch: Batch) -> list[Text]:
    """The batch's texts, without features."""
    found = []
    for number in range(int(batch.documents.max()) + 1):
        own = batch.documents == number
        found.append(Text(batch.tokens[own].cpu(), tuple(spans_of(batch.loss_mask[own].tolist()))))
    return found


def rewritten(batch: Batch, drafter: Distilled, target: Target, most: int, generator: torch.Generator) -> Batch | None:
    """The batch with the last answer of each text drawn from the drafter at temperature 1.

    most: tokens of an answer. Texts are a row each; those without an answer, or with a prompt that does not fit, are
    left out. None where no text is left.
    """
    window = min(drafter.model.window, target.window)
    texts = [text for text in texts_of(batch) if text.spans and 0 < text.spans[-1][0] < window - 1]
    if not texts:
        return None
    prompts = [text.tokens[: text.spans[-1][0]].tolist() for text in texts]
    most = min(most, window - 1 - max(map(len, prompts)))
    answers = draw_answers(drafter, prompts, most, target.stop_tokens, generator)
    rows = []
    for text, prompt, answer in zip(texts, prompts, answers, strict=True):
        spans = (*text.spans[:-1], (len(prompt), len(prompt) + len(answer)))
        rows.append([Text(torch.tensor(prompt + answer), spans)])
    return collate(rows, target, ("final",), False, batch.number)


@torch.inference_mode()
def draw_answers(
    drafter: Distilled, prompts: Sequence[Sequence[int]], most: int, stops: Sequence[int], generator: torch.Generator
) -> list[list[int]]:
    """What the drafter writes after each prompt: up to `most` tokens, a stop token the last."""
    model, answers, going = drafter.model, [list[int]() for _ in prompts], list(range(len(prompts)))
    last = model.vocab_size - 1
    drafter.refresh()
    logits = model.start([[min(token, last) for token in prompt] for prompt in prompts], most).logits
    for _ in range(most):
        drawn: Tensor = drafter.draft_ids[draw(Sampling(1.0).probs(logits[:, -1]), generator)]
        for row, token in zip(going, drawn.tolist(), strict=True):
            answers[row].append(token)
        left = [at for at, token in enumerate(drawn.tolist()) if token not in stops]
        if not left or len(answers[going[left[0]]]) == most:
            break
        if len(left) < len(going):
            rows = torch.tensor(left, device=model.device)
            going, drawn = [going[at] for at in left], drawn[rows]
            model.select(rows)
        logits = model.read(TokenTree.chain(drawn[:, None])).logits
        model.keep(Paths(torch.zeros_like(drawn)[:, None], torch.ones_like(drawn)))
    return answers
