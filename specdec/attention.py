"""Grouped-query attention without copying keys: what the target's own layers call while we drive them.

transformers' sdpa path repeats the keys and values of each group whenever a mask is given; with a cache of slots
that copy costs more than the attention itself. Folding a group's query heads into the query axis reads each key
once. Registered under NAME through transformers' public attention interface.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from specdec.errors import UserError

NAME = "headstart"


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [B, H, N, d], key and value [B, G, L, d], mask of fold_mask() [B, 1, H/G·N, L] -> ([B, N, H, d], None).

    Raises UserError for what it would leave out: soft-capping, windows, attention sinks.
    """
    if softcap is not None or sliding_window is not None or s_aux is not None:
        raise UserError(
            f"{type(module).__name__} soft-caps its scores, has a sliding window or attention sinks: it cannot be "
            "decoded exactly here"
        )
    batch, heads, count, width = query.shape
    groups = key.shape[1]
    if attention_mask is None:
        raise ValueError("this attention is driven by Target, which always gives a mask")
    folded = query.reshape(batch, groups, heads // groups * count, width)
    if attention_mask.shape[2] != folded.shape[2]:
        raise ValueError(f"the mask has {attention_mask.shape[2]} rows, {folded.shape[2]} queries are folded together")
    out = attend(folded, key, value, attention_mask, scaling)
    return out.reshape(batch, heads, count, width).transpose(1, 2), None


def fold_mask(visible: Tensor, share: int, dtype: torch.dtype) -> Tensor:
    """bool [B, N, L] to what is added to the scores of `share` folded query heads: [B, 1, share·N, L], 0 or -inf."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    return (bias if share == 1 else bias.repeat(1, share, 1))[:, None]


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float | None = None) -> Tensor:
    """Attention of folded queries [B, G, M, d] over key and value [B, G, L, d] with bias [B, 1, M, L]."""
    batch, _, count, width = query.shape
    if query.device.type == "cpu" and batch > 4 and count <= 16:
        query = query * (width**-0.5 if scale is None else scale)
        parts = zip(*(tensor.split(_TOGETHER) for tensor in (query, key, value, bias)), strict=True)
        return torch.cat([_products(*part) for part in parts])
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)


_TOGETHER = 32  # rows whose keys and values fit a cache between the two products


def _products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Many rows of few queries: torch's blocked CPU kernel takes twice as long as two products, and the first of them
    goes faster with the keys on the left."""
    scores = torch.matmul(key, query.transpose(-1, -2)).transpose(-1, -2) + bias
    return torch.matmul(scores.softmax(-1), value)


AttentionInterface.register(NAME, grouped_attention)
