"""Training batches: texts of similar length, padded on the right, in an order fixed by seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from data.distill import Text
from specdec.target import Tap, Target

PADDING = -1


@dataclass(frozen=True)
class Batch:
    """tokens [B, T]; loss_mask [B, T], true at tokens to predict; documents [B, T], -1 at padding; features
    [B, T, S, D].

    The feature of a text's last token may be missing (it was never read); it is zero and its slot predicts nothing.
    """

    tokens: Tensor
    loss_mask: Tensor
    documents: Tensor
    features: Tensor
    number: int = 0
    """Its place in the whole run: what a step draws is drawn from it, so that a resumed run draws the same."""


def epoch_order(texts: list[Text], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of each batch: shuffled, then grouped by length within windows so that little is padded."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = torch.randperm(len(texts), generator=generator).tolist()
    window = batch_size * 16
    batches = []
    for start in range(0, len(shuffled), window):
        block = sorted(shuffled[start : start + window], key=lambda index: len(texts[index].tokens))
        batches += [block[i : i + batch_size] for i in range(0, len(block), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def collate(texts: list[Text], target: Target, taps: tuple[Tap, ...], supervise_prompt: bool, number: int = 0) -> Batch:
    """One batch; features come from the texts, or from the target where they were not kept."""
    length = max(len(text.tokens) for text in texts)
    shape = (len(texts), length)
    tokens = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    documents = torch.full(shape, PADDING)
    for row, text in enumerate(texts):
        size = len(text.tokens)
        tokens[row, :size] = text.tokens
        mask[row, 0 if supervise_prompt else text.prompt_length : size] = True
        documents[row, :size] = row
    device = target.device
    if all(text.features is not None for text in texts):
        features = torch.zeros(*shape, len(taps), target.width)
        for row, text in enumerate(texts):
            if text.features is not None:
                features[row, : len(text.features)] = text.features
        features = features.to(device, target.model.dtype)
    else:
        features = target.features(tokens.to(device), taps)
    return Batch(tokens.to(device), mask.to(device), documents.to(device), features.clone(), number)


def batches(
    texts: list[Text],
    target: Target,
    taps: tuple[Tap, ...],
    batch_size: int,
    seed: int,
    supervise_prompt: bool,
    start: int = 0,
) -> Iterator[Batch]:
    """Endless batches from global batch number `start` on: resuming gives the batches a whole run would have had."""
    per_epoch = -(-len(texts) // batch_size)
    number = start
    while True:
        epoch, first = divmod(number, per_epoch)
        for indices in epoch_order(texts, batch_size, seed, epoch)[first:]:
            yield collate([texts[i] for i in indices], target, taps, supervise_prompt, number)
            number += 1
