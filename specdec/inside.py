"""What must be known of a transformers model before it can be driven: its decoder layers, and that it can be at all."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from specdec.errors import UserError


def query_heads_per_key(model: PreTrainedModel) -> int:
    """How many query heads share one key and value head."""
    settings = model.config.to_dict()
    heads = model.config.num_attention_heads
    return heads // (settings.get("num_key_value_heads") or heads)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    count = model.config.num_hidden_layers
    found = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise UserError(f"cannot find the {count} decoder layers of {type(model).__name__}")
    return found[0]


def refuse_unsupported(model: PreTrainedModel) -> None:
    config = model.config
    kinds = set(config.layer_types or []) if "layer_types" in config.to_dict() else set()
    if kinds - {"full_attention"}:
        raise UserError(
            f"{type(model).__name__} has {', '.join(sorted(kinds - {'full_attention'}))} layers: their cache cannot "
            "be rolled back, so speculative decoding with it would not be exact"
        )
    settings = config.to_dict()
    if settings.get("sliding_window") and settings.get("use_sliding_window", True):
        raise UserError(
            f"{type(model).__name__} has a sliding window of {settings['sliding_window']} tokens: its cache cannot be "
            "rolled back, so speculative decoding with it would not be exact"
        )
