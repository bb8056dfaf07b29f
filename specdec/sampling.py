"""Sampling: from logits to the distribution tokens are drawn from (the only place), and the coins that draw them.

Temperature 0 gives one-hot rows, so that nothing else has a branch for greedy decoding. The order of the processors is
that of transformers: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from specdec.errors import UserError
from specdec.tree import TokenTree


@dataclass(frozen=True)
class Sampling:
    """How the target's logits become a distribution.

    temperature: 0 is greedy. top_k: keep the k likeliest tokens (0 keeps all; ties at the border stay). top_p: keep the
    smallest set of likeliest tokens with at least this mass. min_p: keep tokens at least this share of the likeliest.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the text so far (CTRL, 1909.05858).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.repetition_penalty <= 0:
            raise UserError(f"repetition_penalty must be above 0 (1 is off), got {self.repetition_penalty}")

    @property
    def needs_history(self) -> bool:
        """Whether probs() must be told which tokens the text before each row holds."""
        return self.repetition_penalty != 1

    def without_history(self) -> Sampling:
        """The same without the repetition penalty, for logits that already had it."""
        return dataclasses.replace(self, repetition_penalty=1.0)

    def penalise(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Apply the repetition penalty where `seen` (bool, the logits' shape) is true."""
        scaled = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
        return torch.where(seen, scaled, logits)

    def probs(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Logits [..., V] to probabilities [..., V], in the logits' own precision but at least fp32.

        seen: bool [..., V], tokens of the text each row continues; required when needs_history.
        """
        if self.needs_history:
            if seen is None:
                raise ValueError("a repetition penalty needs the tokens seen so far")
            logits = self.penalise(logits.to(torch.promote_types(logits.dtype, torch.float32)), seen)
        if self.temperature == 0:
            best = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
            # A token stays if the mass of the tokens before it has not yet reached top_p.
            outside = (ordered.cumsum(-1) - ordered) >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
        if self.min_p > 0:
            probs = logits.softmax(-1)
            logits = logits.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), -torch.inf)
        return logits.softmax(-1)


def seen_on_paths(tokens: Tensor, lengths: Tensor, tree: TokenTree, vocab_size: int) -> Tensor:
    """Which tokens the text up to and including each node holds: [B, P], [B], tree -> bool [B, N, V].

    A node's history is the decided text and its own ancestors, never its siblings (algorithms §1.8).
    """
    rows, count = tree.tokens.shape
    decided = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    seen = torch.zeros(rows, vocab_size, dtype=torch.long, device=tokens.device)
    seen = seen.scatter_add_(1, tokens.clamp(min=0), decided.long()) > 0
    out = seen[:, None].repeat(1, count, 1)
    ancestors = tree.ancestors()  # [B, N, N]
    held = torch.zeros_like(out, dtype=torch.long)
    held.scatter_add_(2, tree.tokens[:, None].expand(-1, count, -1), ancestors.long())
    return out | (held > 0)


class Coins(Protocol):
    """Where chance comes from."""

    def flip(self, positions: Tensor, prompts: list[int] | None = None) -> Tensor:
        """positions [B] (absolute index of the token being decided) -> uniform [B], fp64.

        prompts: whose tokens they are; by default one of each row.
        """
        ...

    def renew(self, rows: Tensor, prompts: list[int]) -> None:
        """These rows now belong to these prompts."""

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only."""


class Stream:
    """Coins from a generator, one after the other; `None` is torch's global one."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def flip(self, positions: Tensor, prompts: list[int] | None = None) -> Tensor:  # noqa: ARG002
        return uniform(positions.shape, positions.device, self.generator)

    def renew(self, rows: Tensor, prompts: list[int]) -> None:
        """The next coins go to whatever is asked for next."""

    def select(self, rows: Tensor) -> None:
        """The same."""


class Coupled:
    """Coins tied to (seed, row, position): the same token is drawn there whatever was proposed.

    With a rule that draws from the target's own distribution (the target walk) the text is then exactly that of plain
    decoding with the same seed, for every drafter (algorithms §1.8). A row is its index among the prompts.
    """

    def __init__(self, seed: int, rows: int) -> None:
        self.seed = seed
        self.rows = torch.arange(rows)

    def flip(self, positions: Tensor, prompts: list[int] | None = None) -> Tensor:
        mixed = [
            _mix(_mix(_mix(self.seed & _WORD) ^ row) ^ position)
            for row, position in zip(prompts or self.rows.tolist(), positions.tolist(), strict=True)
        ]
        return torch.tensor([value / 2**64 for value in mixed], dtype=torch.float64, device=positions.device)

    def renew(self, rows: Tensor, prompts: list[int]) -> None:
        self.rows[rows.cpu()] = torch.tensor(prompts)

    def select(self, rows: Tensor) -> None:
        self.rows = self.rows[rows.cpu()]


_WORD = 2**64 - 1


def _mix(value: int) -> int:
    """splitmix64's finaliser (Steele et al., OOPSLA 2014): neighbouring inputs give unrelated outputs."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def pick(probs: Tensor, coins: Tensor) -> Tensor:
    """One token per row by inverse transform: probs [..., V], coins [...] in [0, 1) -> ids [...].

    Mass is summed in blocks first, so that only one block is gone through token by token: in fp64, because fp32 loses
    tokens below 1e-7. (torch.multinomial draws V exponentials per row, which costs more than a drafting step.)
    """
    blocks = probs
    if probs.shape[-1] % _BLOCK:
        blocks = nn.functional.pad(probs, (0, -probs.shape[-1] % _BLOCK))
    blocks = blocks.unflatten(-1, (-1, _BLOCK))
    masses = blocks.sum(-1).double()
    ends = masses.cumsum(-1)
    at = _below(coins * ends[..., -1], ends[..., -1])[..., None]
    # right=True: the first place whose cumulative mass exceeds the coin, never one of probability 0.
    block = torch.searchsorted(ends, at, right=True)
    mass = masses.gather(-1, block)
    inside = blocks.gather(-2, block[..., None].expand(*block.shape, _BLOCK)).squeeze(-2)
    inside = inside.cumsum(-1, dtype=torch.float64)
    share = (at - (ends.gather(-1, block) - mass)).clamp(min=0) / mass
    index = torch.searchsorted(inside, _below(share * inside[..., -1:], inside[..., -1:]), right=True)
    return (block * _BLOCK + index).squeeze(-1)


_BLOCK = 256


def _below(value: Tensor, bound: Tensor) -> Tensor:
    """value, kept below the bound: rounding must not run past the last token that has mass."""
    return torch.minimum(value, torch.nextafter(bound, torch.zeros_like(bound)))


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token per row with coins from a generator: probs [..., V] -> ids [...]."""
    return pick(probs, uniform(probs.shape[:-1], probs.device, generator))


def uniform(shape: torch.Size, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Coins in [0, 1), fp64, drawn where the generator lives and brought to `device`."""
    source = device if generator is None else generator.device
    return torch.rand(shape, dtype=torch.float64, device=source, generator=generator).to(device)
