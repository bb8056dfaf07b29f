"""The reduced draft vocabulary: which of the target's tokens a drafter can propose.

A draft head over all tokens would cost more than the rest of a one-layer drafter (algorithms §10, §13.1; EAGLE-3,
FR-Spec 2502.14856). Ids are sorted ascending, as every engine expects.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.errors import UserError


def choose_vocab(counts: Tensor, size: int, always: Iterable[int]) -> Tensor:
    """The `size` most frequent ids, sorted: counts [V] -> [min(size, V)].

    `always` (end of turn, template tokens) are in whatever their count; ties go to the lower id, which in a BPE
    vocabulary is the commoner token.
    """
    required = torch.tensor(sorted(set(always)), dtype=torch.long)
    if len(required) > size:
        raise UserError(f"draft_vocab_size {size} is too small: {len(required)} special tokens must be in it")
    weight = counts.double().clone()
    weight[required] = torch.inf
    return weight.sort(descending=True, stable=True).indices[:size].sort().values


def places(ids: Tensor, vocab_size: int) -> Tensor:
    """Where each token lies in a draft vocabulary, -1 for those outside: ids [Vd] -> [V]."""
    place = torch.full((vocab_size,), -1, device=ids.device)
    place[ids] = torch.arange(len(ids), device=ids.device)
    return place
