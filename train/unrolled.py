"""Attention of a drafter that is unrolled over a whole text: every slot goes on alone from the true features.

Slot t of step s sees the keys of step 0 up to its own position and its own keys of steps 1..s, exactly what the
decoder's cache holds at that moment (EAGLE-3, 2503.01840 §3.2). Scores are as many as slots times positions; of long
rows they are computed for some slots at a time and once more in the backward pass, so that they are never all held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdec.eagle_network import Attend
from specdec.layers import grouped

LONG = 1 << 24
"""Scores of a step from which on they are computed in parts."""
PART = 1 << 22
"""Scores of a part."""


class UnrolledAttention:
    """Keys and values of the steps so far; of(s) is what step s attends with.

    Step 0 covers all T slots; later steps only the slots [B, M] that are scored at all, since only step-0 keys are
    seen by other slots. starts [B, T]: where the document of each position begins; None: each row is one document.
    """

    def __init__(self, slots: Tensor, starts: Tensor | None) -> None:
        self.slots, self.starts = slots, starts
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def of(self, step: int) -> Attend:
        """query [B, H, M, d], key and value [B, G, M, d] -> [B, M, H·d]; M is T at step 0."""
        return lambda query, key, value: self._attend(step, query, key, value)

    def _attend(self, step: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if step == len(self.keys):  # else this is the step's second run, of the backward pass
            self.keys.append(key)
            self.values.append(value)
        keys, values = [*self.keys[:step], key], [*self.values[:step], value]
        if step == 0 and self.starts is None:
            return grouped(query, key, value, None)
        total = keys[0].shape[2]
        at = torch.arange(total, device=query.device)
        slots = self.slots if step else at.expand(len(query), -1)
        starts = torch.zeros_like(slots) if self.starts is None else self.starts.gather(1, slots)
        if query.shape[:3].numel() * total > LONG:
            return _InParts.apply(query, slots, starts, *keys, *values).transpose(1, 2).flatten(2)
        if step == 0:
            return grouped(query, key, value, (at >= starts[..., None]) & (at <= slots[..., None]))
        return _mixed(query, slots, starts, *keys, *values)


def _mixed(query: Tensor, slots: Tensor, starts: Tensor, *stored: Tensor) -> Tensor:
    """query [B, H, M, d] of slots [B, M], each of which sees keys starts..slots of step 0 and its own of later steps.

    stored: the keys of every step and then the values, [B, G, T, d] of step 0, [B, G, M, d] of later ones.
    """
    keys, values = stored[: len(stored) // 2], stored[len(stored) // 2 :]
    count = keys[0].shape[2]
    query = query.unflatten(1, (keys[0].shape[1], -1)) * query.shape[3] ** -0.5  # [B, G, share, M, d]
    at = torch.arange(count, device=query.device)
    unseen = (at > slots[..., None]) | (at < starts[..., None])
    first = query @ keys[0][:, :, None].transpose(-1, -2)
    scores = [first.masked_fill(unseen[:, None, None], -torch.inf)]
    scores += [(query * own[:, :, None]).sum(-1, keepdim=True) for own in keys[1:]]
    weights = torch.cat(scores, -1).softmax(-1)
    out = weights[..., :count] @ values[0][:, :, None]
    for step, own in enumerate(values[1:]):
        out = out + weights[..., count + step, None] * own[:, :, None]
    return out.flatten(1, 2).transpose(1, 2).flatten(2)


class _InParts(torch.autograd.Function):
    """_mixed() for some slots at a time: scores are computed again in the backward pass, from what they add up to."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, slots: Tensor, starts: Tensor, *stored: Tensor) -> Tensor:
        out = torch.empty_like(query)
        logsums = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for part in _parts(query, stored[0]):
            piece = _Piece(query, slots, starts, stored, part)
            top = torch.stack([piece.seen.amax(-1), *piece.own]).amax(0)
            total = piece.weigh(top)
            out[:, :, part] = (piece.output() / total[..., None]).flatten(1, 2)
            logsums[:, :, part] = (top + total.log()).flatten(1, 2)
        ctx.save_for_backward(query, slots, starts, out, logsums, *stored)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, slots, starts, out, logsums, *stored = ctx.saved_tensors
        to_query, to_stored = torch.empty_like(query), [torch.zeros_like(one, dtype=logsums.dtype) for one in stored]
        steps = len(stored) // 2
        for part in _parts(query, stored[0]):
            piece = _Piece(query, slots, starts, stored, part)
            piece.weigh(piece.grouped(logsums[:, :, part]))
            back = piece.grouped(gradient[:, :, part]).to(logsums.dtype)  # [B, G, share, m, d]
            common = (back * piece.grouped(out[:, :, part])).sum(-1)
            seen = slice(piece.low, piece.high)
            to_stored[steps][:, :, seen] += _folded(piece.seen).transpose(-1, -2) @ _folded(back)
            slope = _over(back, piece.values[0].transpose(-1, -2)).sub_(common[..., None]).mul_(piece.seen)
            to_stored[0][:, :, seen] += _folded(slope).transpose(-1, -2) @ _folded(piece.query)
            to_piece = _over(slope, piece.keys[0])
            for step in range(1, steps):
                key, value, weight = piece.keys[step][:, :, None], piece.values[step][:, :, None], piece.own[step - 1]
                to_stored[steps + step][:, :, part] = (weight[..., None] * back).sum(2)
                own = weight * ((back * value).sum(-1) - common)
                to_stored[step][:, :, part] = (own[..., None] * piece.query).sum(2)
                to_piece += own[..., None] * key
            to_query[:, :, part] = (to_piece * query.shape[3] ** -0.5).flatten(1, 2)
        return to_query, None, None, *(to.to(one.dtype) for to, one in zip(to_stored, stored, strict=True))


def _parts(query: Tensor, keys: Tensor) -> Iterator[slice]:
    size = max(1, PART // (query.shape[0] * query.shape[1] * keys.shape[2]))
    return (slice(begin, begin + size) for begin in range(0, query.shape[2], size))


class _Piece:
    """The scores of some slots, m of M: seen [B, G, share, m, t] of step 0's keys low..high, own: of each later step
    [B, G, share, m]. weigh() turns them into weights.
    """

    def __init__(self, query: Tensor, slots: Tensor, starts: Tensor, stored: Sequence[Tensor], part: slice) -> None:
        slots, starts, steps = slots[:, part], starts[:, part], len(stored) // 2
        # No slot of the part sees a key outside these: of one document per row, half of the scores.
        self.low, self.high = int(starts.min()), int(slots.max()) + 1
        wide = torch.promote_types(query.dtype, torch.float32)
        cuts = [slice(self.low, self.high), *[part] * (steps - 1)]
        pieces = [one[:, :, cut].to(wide) for one, cut in zip(stored, cuts * 2, strict=True)]
        self.keys, self.values = pieces[:steps], pieces[steps:]
        self.query = self.grouped(query[:, :, part]).to(wide) * query.shape[3] ** -0.5  # [B, G, share, m, d]
        at = torch.arange(self.low, self.high, device=query.device)
        unseen = (at > slots[..., None]) | (at < starts[..., None])
        self.seen = _over(self.query, self.keys[0].transpose(-1, -2)).masked_fill_(unseen[:, None, None], -torch.inf)
        self.own = [(self.query * own[:, :, None]).sum(-1) for own in self.keys[1:]]

    def grouped(self, x: Tensor) -> Tensor:
        """[B, H, m, ...] -> [B, G, share, m, ...]."""
        return x.unflatten(1, (self.keys[0].shape[1], -1))

    def weigh(self, less: Tensor) -> Tensor:
        """Scores become exp(score - less); returns their sums [B, G, share, m]."""
        self.seen.sub_(less[..., None]).exp_()
        self.own = [(own - less).exp() for own in self.own]
        return torch.stack([self.seen.sum(-1), *self.own]).sum(0)

    def output(self) -> Tensor:
        """Σ weight · value, [B, G, share, m, d]."""
        out = _over(self.seen, self.values[0])
        for weight, own in zip(self.own, self.values[1:], strict=True):
            out += weight[..., None] * own[:, :, None]
        return out


def _folded(x: Tensor) -> Tensor:
    """[B, G, share, m, n] -> [B, G, share·m, n]: the query heads of a group share its keys."""
    return x.flatten(2, 3)


def _over(x: Tensor, matrix: Tensor) -> Tensor:
    """x [B, G, share, m, i] times matrix [B, G, i, o] -> [B, G, share, m, o]."""
    return (_folded(x) @ matrix).unflatten(2, x.shape[2:4])
