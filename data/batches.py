"""Training batches: rows of similar length, padded on the right, in an order fixed by seed and epoch.

A row is one text or, packed, several one after another. What is in which batch follows from the texts' lengths alone,
so every rank works it out for itself and takes its share.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.texts import Text
from specdec.errors import UserError
from specdec.target import Tap, Target

PADDING = -1
WINDOW = 64  # rows packed together: enough to fill them well, few enough that texts meet others in every epoch


@dataclass(frozen=True)
class Batch:
    """tokens [B, T]; loss_mask [B, T], true at tokens to predict; documents [B, T], the number of the text a position
    belongs to, another one for each text of the batch, -1 at padding; features [B, T, S, D].

    The feature of a text's last token may be missing (it was never read); it is zero and its slot predicts nothing.
    """

    tokens: Tensor
    loss_mask: Tensor
    documents: Tensor
    features: Tensor
    number: int = 0
    """Its place in the whole run: what a step draws is drawn from it, so that a resumed run draws the same."""


def epoch_order(
    lengths: Sequence[int], batch_size: int, seed: int, epoch: int, pack_tokens: int | None = None
) -> list[list[list[int]]]:
    """Batches of rows of indices: shuffled, packed, then grouped by length within windows so that little is padded."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    rows = [[index] for index in shuffled] if pack_tokens is None else _packed(shuffled, lengths, pack_tokens)
    window = batch_size * 16
    batches = []
    for start in range(0, len(rows), window):
        block = sorted(rows[start : start + window], key=lambda row: sum(lengths[index] for index in row))
        batches += [block[i : i + batch_size] for i in range(0, len(block), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _packed(order: list[int], lengths: Sequence[int], pack_tokens: int) -> list[list[int]]:
    """Rows of at most pack_tokens, or of one longer text: best fit, longest first, within windows of the order."""
    rows: list[list[int]] = []
    ends = itertools.accumulate(lengths[index] for index in order)
    windows = itertools.groupby(zip(order, ends, strict=True), lambda pair: pair[1] // (WINDOW * pack_tokens))
    for _, window in windows:
        room: list[tuple[int, int]] = []  # (tokens left, row), the fullest first
        for index in sorted((index for index, _ in window), key=lambda index: -lengths[index]):
            at = bisect_left(room, (lengths[index], 0))
            if at < len(room):
                left, row = room.pop(at)
            else:
                left, row = pack_tokens, len(rows)
                rows.append([])
            rows[row].append(index)
            insort(room, (left - lengths[index], row))
    return rows


def batches_per_epoch(texts: list[Text], batch_size: int, seed: int, pack_tokens: int | None = None) -> int:
    """Batches of the first epoch; packed, others may have a few more or less."""
    return len(epoch_order([len(text.tokens) for text in texts], batch_size, seed, 0, pack_tokens))


def collate(
    rows: list[list[Text]], target: Target, taps: tuple[Tap, ...], supervise_prompt: bool, number: int = 0
) -> Batch:
    """One batch; features come from the texts, or from the target for rows in which a text has none."""
    shape = (len(rows), max(sum(len(text.tokens) for text in row) for row in rows))
    tokens = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    documents = torch.full(shape, PADDING)
    features = torch.zeros(*shape, len(taps), target.width, dtype=target.model.dtype)
    lacking = [number for number, row in enumerate(rows) if any(text.features is None for text in row)]
    count = itertools.count()
    for row, texts in enumerate(rows):
        start = 0
        for text in texts:
            end = start + len(text.tokens)
            tokens[row, start:end] = text.tokens
            if supervise_prompt:
                mask[row, start : start + text.spans[-1][1]] = True  # features may end there
            else:
                mask[row, start:end] = text.mask()
            documents[row, start:end] = next(count)
            stored = text.stored() if row not in lacking else None
            if stored is not None:
                features[row, start : start + len(stored)] = stored
            start = end
    device = target.device
    tokens, mask, documents = tokens.to(device), mask.to(device), documents.to(device)
    features = features.to(device)
    if lacking:
        features[lacking] = target.features(tokens[lacking], taps, documents[lacking])
    return Batch(tokens, mask, documents, features, number)


def batches(
    texts: list[Text],
    target: Target,
    taps: tuple[Tap, ...],
    batch_size: int,
    seed: int,
    supervise_prompt: bool,
    start: int = 0,
    pack_tokens: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """Endless batches: of rank r among W those numbered start + r, start + r + W, and so on.

    batch_size counts rows. Numbers count the batches of all ranks from the run's first, so that resuming at `start`
    gives the batches a whole run would have had, for any number of ranks. Raises UserError where there are no texts.
    """
    if not texts:
        raise UserError("there are no texts to train on")
    lengths = [len(text.tokens) for text in texts]
    before = 0  # batches of the epochs gone by
    for epoch in itertools.count():
        order = epoch_order(lengths, batch_size, seed, epoch, pack_tokens)
        for number, rows in enumerate(order, before):
            if number >= start and (number - start) % world == rank:
                yield collate([[texts[i] for i in row] for row in rows], target, taps, supervise_prompt, number)
        before += len(order)
