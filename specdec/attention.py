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
    """query [B, H, N, d], key and value [B, G, L, d], mask bool [B, 1, N, L] -> ([B, N, H, d], None).

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
    mask = attention_mask.repeat(1, 1, heads // groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, count, width).transpose(1, 2), None


AttentionInterface.register(NAME, grouped_attention)
