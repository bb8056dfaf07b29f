"""The only time shifts.

    position t      0     1     2     3     4     5
    tokens          x0    x1    x2    x3    x4    x5
    features        f0    f1    f2    f3    f4    f5     f_t has read x0..x_t
    logits          ->x1  ->x2  ->x3  ->x4  ->x5  ->x6   row t scores x_{t+1}
    loss_mask       0     0     0     1     1     1      belongs to the token in its own column

A slot t with horizon h has x_{t+h-1} as its newest input, predicts x_{t+h}, is taught by teacher row t+h-1 and
counts if mask[t+h].

                     horizon   at slot 1 it reads       predicts   teacher     counts if
    draft model      1         x1                       x2         logits[1]   mask[2]
    Medusa head k    2 + k     f1                       x3 + k     logits[2+k] mask[3+k]
    EAGLE step s     2 + s     f1 (then its own), x2+s  x3 + s     logits[2+s] mask[3+s]

Sources: EAGLE (2401.15077, §4.1), Medusa (2401.10774, §2.1), EAGLE-3 (2503.01840, §3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """Training slots, all [B, T]; slots that run past the end are filled with position T-1 and not scored.

    inputs: newest token the drafter reads. labels: token it predicts. teacher: [B, T, ...] rows of the
    target that score the label. scored: bool, whether the slot counts in the loss.
    """

    inputs: Tensor
    labels: Tensor
    teacher: Tensor
    scored: Tensor


def align(tokens: Tensor, loss_mask: Tensor, documents: Tensor, logits: Tensor, horizon: int) -> Slots:
    """Line up inputs, labels and teacher rows for predictions `horizon` tokens ahead.

    tokens [B, T] ids; loss_mask [B, T] bool, true where the token is to be predicted; documents [B, T]
    ids of the text a position belongs to (negative: padding); logits [B, T, ...] any per-position tensor of the
    target, row t scoring token t+1.
    """
    if horizon < 1:
        raise ValueError(f"horizon must be at least 1, got {horizon}")
    count = tokens.shape[1]
    position = torch.arange(count, device=tokens.device)
    label_at = (position + horizon).clamp(max=count - 1)
    input_at = (position + horizon - 1).clamp(max=count - 1)
    inside = (position + horizon < count) & (documents[:, label_at] == documents) & (documents >= 0)
    return Slots(
        inputs=tokens[:, input_at],
        labels=tokens[:, label_at],
        teacher=logits[:, input_at],
        scored=loss_mask[:, label_at].bool() & inside,
    )


def positions_within(documents: Tensor) -> Tensor:
    """Positions that begin anew with each document: [B, T] -> [B, T].

    Padding goes on from the document before it, though no further than a document of the batch reaches: learned
    positions end somewhere.
    """
    position = torch.arange(documents.shape[1], device=documents.device) - starts_within(documents)
    return position.clamp(max=position.masked_fill(documents < 0, 0).amax())


def starts_within(documents: Tensor) -> Tensor:
    """Where the document of each position begins: [B, T] -> [B, T]. Padding counts to the document before it."""
    at = torch.arange(documents.shape[1], device=documents.device)
    return torch.where(_begins(documents), at, 0).cummax(1).values


def visible_within(documents: Tensor) -> Tensor:
    """Who sees whom: documents [B, T] -> bool [B, T, T], true where the key is of the query's document and not later.

    Padding counts to the document before it. With one document a row this is plain causal attention.
    """
    at = torch.arange(documents.shape[1], device=documents.device)
    order = _begins(documents).cumsum(1)
    return (at[:, None] >= at) & (order[:, :, None] == order[:, None])


def any_packed(documents: Tensor) -> bool:
    """Whether a row [B, T] holds more than one document."""
    return bool(_begins(documents).any())


def _begins(documents: Tensor) -> Tensor:
    """bool [B, T]: a row's second and later documents begin here."""
    changes = (documents[:, 1:] != documents[:, :-1]) & (documents[:, 1:] >= 0)
    return torch.nn.functional.pad(changes, (1, 0))


def runs(flags: Tensor, most: int) -> Tensor:
    """How many positions in a row from each one on are true, counted up to `most`: bool [B, T] -> [B, T]."""
    length = torch.zeros_like(flags, dtype=torch.long)
    for _ in range(most):
        length = flags * (1 + torch.nn.functional.pad(length[:, 1:], (0, 1)))
    return length


def read_ahead(tokens: Tensor, starts: Tensor, count: int) -> Tensor:
    """The token after each of `count` positions from `starts`: [B, P], [B] -> [B, count].

    The decoding side of horizon 2: a slot t pairs the feature of t with x_{t+1}. Positions past the end repeat the
    last column; the caller knows how many are real.
    """
    at = starts[:, None] + 1 + torch.arange(count, device=tokens.device)
    return tokens.gather(1, at.clamp(max=tokens.shape[1] - 1))
