"""What more than one drafter needs: RMSNorm, rotary positions, attention over a cache of slots."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BUCKET = 64


class RMSNorm(nn.Module):
    """x / rms(x) · weight, the mean square in fp32 at least (as Llama)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions, half-split layout (as Llama in transformers): x [B, H, N, d], positions [B, N]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].to(torch.float32) * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention: query [B, H, N, d], key and value [B, G, L, d] -> [B, N, H·d].

    mask: bool, broadcast to [B, N, L]; None means causal with N == L.
    """
    batch, heads, count, width = query.shape
    share = heads // key.shape[1]
    if mask is None:
        key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        folded = query.reshape(batch, key.shape[1], share * count, width)
        out = nn.functional.scaled_dot_product_attention(
            folded, key, value, attn_mask=mask[:, None].repeat(1, 1, share, 1)
        )
        out = out.reshape(batch, heads, count, width)
    return out.transpose(1, 2).reshape(batch, count, heads * width)


class SlotCache:
    """Keys and values of a drafter's one layer in slots, for B rows.

    The text's positions are their slots; guesses lie behind them and are overwritten: that is how they give way to the
    target's true features.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, -(-capacity // BUCKET) * BUCKET
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        self.rows = len(rows)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def width(self, end: int) -> int:
        """Slots to look at when the last written one is before `end`."""
        return min(-(-end // BUCKET) * BUCKET, self.capacity)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
        """Write key/value [B, G, N, d] to slots [B, N] and attend under mask bool [B, N, width]: [B, N, H·d]."""
        if self.keys is None or self.values is None:
            shape = (self.rows, key.shape[1], self.capacity, key.shape[3])
            self.keys, self.values = key.new_zeros(shape), value.new_zeros(shape)
        at = (torch.arange(self.rows, device=key.device)[:, None], slice(None), slots)
        self.keys[at] = key.transpose(1, 2)
        self.values[at] = value.transpose(1, 2)
        width = mask.shape[-1]
        return grouped(query, self.keys[:, :, :width], self.values[:, :, :width], mask)
