"""What must be known of a transformers model to drive it, and whether it can be; Target's small helpers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
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


def common_start(texts: Sequence[Sequence[int]]) -> int:
    """How many tokens all texts begin with, at most one less than the shortest; 0 where it is not worth a pass."""
    short, long = min(map(tuple, texts)), max(map(tuple, texts))
    most = min(map(len, texts)) - 1
    same = next((i for i in range(most) if short[i] != long[i]), most)
    return same if same >= 8 else 0


def recorder(seen: dict[Any, Tensor], tap: int) -> Any:
    """A hook that stores what goes into a decoder layer under `tap`."""

    def record(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        seen[tap] = args[0] if args else kwargs["hidden_states"]

    return record


def joined(start: Tensor | None, pieces: Sequence[Tensor], length: int) -> Tensor:
    """Features [b, n, S, D] of groups of texts, behind a start [1, s, S, D] that all share, as one right-padded
    [B, length, S, D]."""
    shared = 0 if start is None else start.shape[1]
    whole = pieces[0].new_zeros(sum(map(len, pieces)), length, *pieces[0].shape[2:])
    if start is not None:
        whole[:, :shared] = start
    row = 0
    for piece in pieces:
        whole[row : row + len(piece), shared : shared + piece.shape[1]] = piece
        row += len(piece)
    return whole
