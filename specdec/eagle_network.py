"""EAGLE's network in two generations: what a step reads, what it says and what it feeds back.

Slot t pairs the feature of position t with token x_{t+1} and predicts x_{t+2}; the next slot takes the layer's own
output in the feature's place. Generation 3 (EAGLE-3, 2503.01840 §3; EAGLE-3.1, 2605.09992: per-tap norm, normed
feedback) fuses taps and has a head of its own. Generation 1 (EAGLE-1, 2401.15077 §4.1; the network of EAGLE-2 and HASS)
guesses the target's next final state and reads it with the target's head, which is neither trained nor saved. What
engines expect of the numerics: the embedding comes first, generation 3's residual is the un-normed feature, generation
1's layer has no input norm and nothing follows it. The drafter around it is specdec/drafters/eagle.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from specdec.layers import RMSNorm, rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value) [B, H, N, d] -> [B, N, H·d]; the caller owns keys, values and mask."""


@dataclass(frozen=True)
class EagleShape:
    """Everything that fixes the tensors and the numerics; saved as the drafter folder's config.json."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    taps: list[int]
    """Generation 3; empty for generation 1, which reads the final state."""
    target_layers: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    fc_norm: bool
    norm_output: bool
    generation: int = 3  # folders saved before there were two name none
    fc_bias: bool = False


class EagleLayer(nn.Module):
    """A Llama decoder layer whose attention input and residual are given apart.

    Generation 3 attends to [norm(embedding) ; norm(feature)], twice as wide; generation 1 to the residual itself.
    """

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        inputs = width
        self.head_dim, self.theta = shape.head_dim, shape.rope_theta
        if shape.generation == 3:
            inputs = 2 * width
            self.input_layernorm = RMSNorm(width, eps)
            self.hidden_norm = RMSNorm(width, eps)
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, width, bias=False)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.gate_proj = nn.Linear(width, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, width, bias=False)

    def paired(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Generation 3's attention input: embedded, hidden [..., D] -> [..., 2·D], the embedding first."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)

    def forward(self, x: Tensor, residual: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [B, N, D or 2·D], residual [B, N, D], positions [B, N] -> [B, N, D], un-normed."""
        query = rotate(self._split(self.q_proj(x)), positions, self.theta)
        key = rotate(self._split(self.k_proj(x)), positions, self.theta)
        hidden = residual + self.o_proj(attend(query, key, self._split(self.v_proj(x))))
        x = self.post_attention_layernorm(hidden)
        return hidden + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def frozen_head(width: int, rows: int) -> nn.Linear:
    """A linear layer whose weight [rows, width] is a buffer: neither trained nor saved. Zero until it is filled."""
    layer = nn.Linear(width, rows, bias=False, device="meta")
    del layer.weight
    layer.register_buffer("weight", torch.zeros(rows, width), persistent=False)
    return layer


class EagleNetwork(nn.Module):
    """What it borrows of the target is used and never saved: the embedding, and generation 1's head.

    Buffer draft_ids [draft_vocab_size]: the target's id of each draft token, ascending. head_rows: Target.head_rows,
    for generation 1.
    """

    draft_ids: Tensor

    def __init__(
        self, shape: EagleShape, embedding: nn.Module, head_rows: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        width, eps, third = shape.hidden_size, shape.rms_norm_eps, shape.generation == 3
        self.shape = shape
        self._embedding = [embedding]  # in a list: not a submodule, so neither saved nor trained
        self._head_rows = head_rows
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(len(shape.taps) if shape.fc_norm else 0))
        self.fc = nn.Linear((len(shape.taps) if third else 2) * width, width, bias=shape.fc_bias)
        self.layer = EagleLayer(shape)
        self.norm: nn.Module = RMSNorm(width, eps) if third else nn.Identity()
        rows = shape.draft_vocab_size
        self.lm_head = nn.Linear(width, rows, bias=False) if third else frozen_head(width, rows)
        self.register_buffer("draft_ids", torch.zeros(rows, dtype=torch.long))
        if not third:
            self.register_load_state_dict_post_hook(lambda module, _: cast(EagleNetwork, module).borrow_head())

    def borrow_head(self) -> None:
        """Generation 1: fill the head with the target's rows of draft_ids."""
        assert self._head_rows is not None
        with torch.no_grad():
            self.lm_head.weight.copy_(self._head_rows(self.draft_ids))

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding[0](tokens).to(self.fc.weight.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """States of `taps` [..., S, D], in any dtype, to the first step's feature [..., D]."""
        features = features.to(self.fc.weight.dtype)
        if self.shape.generation == 1:
            return features[..., 0, :]
        if self.shape.fc_norm:
            parts = [norm(features[..., index, :]) for index, norm in enumerate(self.fc_norm)]
            return self.fc(torch.cat(parts, -1))
        return self.fc(features.flatten(-2))

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One application of the layer: what the head reads, and the feature of the next step; both [B, N, D]."""
        embedded = self.embed(tokens)
        if self.shape.generation == 1:
            both = self.fc(torch.cat([embedded, hidden], -1))
            out = self.layer(both, both, positions, attend)
            return out, out
        out = self.layer(self.layer.paired(embedded, hidden), hidden, positions, attend)
        normed = self.norm(out)
        return normed, normed if self.shape.norm_output else out

    def logits(self, normed: Tensor) -> Tensor:
        """[..., D] to logits over the draft vocabulary."""
        return self.lm_head(normed)
