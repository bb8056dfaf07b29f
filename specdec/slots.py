"""The target's keys and values in preallocated slots, as a cache of transformers. Only target.py uses it.

Each row has its own length; where the next forward writes is one plan that all layers share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class Plan:
    """Where the next forward writes and how far it looks; shared by the cache layers.

    slots [b, n]; only: the rows [b] that are read, None for all of them.
    """

    rows: int
    capacity: int
    slots: Tensor | None = None
    visible: int = 0
    only: Tensor | None = None


class LayerSlots(CacheLayerMixin):
    """One layer's keys and values, [B, heads, L, d], preallocated on first use."""

    def __init__(self, plan: Plan, old: LayerSlots | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.whole: tuple[Tensor, Tensor] | None = None
        """Keys and values as first allocated; select() may leave only a part of them in use."""
        if old is not None and old.whole is not None:
            store = old.whole[0]
            if store.shape[0] >= plan.rows and store.shape[2] >= plan.capacity:
                self.whole = old.whole
                self.keys, self.values = (one[: plan.rows] for one in old.whole)
                self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, capacity = self.plan.rows, self.plan.capacity
        self.keys = key_states.new_zeros(rows, key_states.shape[1], capacity, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], capacity, value_states.shape[3])
        self.whole = self.keys, self.values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values, only = cast(Tensor, self.keys), cast(Tensor, self.values), self.plan.only
        rows = torch.arange(keys.shape[0], device=keys.device) if only is None else only
        at = (rows[:, None], slice(None), cast(Tensor, self.plan.slots))
        keys[at] = key_states.transpose(1, 2)
        values[at] = value_states.transpose(1, 2)
        seen = slice(None) if only is None else only
        return keys[seen, :, : self.plan.visible], values[seen, :, : self.plan.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        return self.plan.visible, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.plan.capacity

    def move(self, rows: Tensor, source: Tensor, to: Tensor) -> None:
        """Copy slots `source` [B, M] to slots `to` [B, M] in each row."""
        for store in (cast(Tensor, self.keys), cast(Tensor, self.values)):
            store[rows, :, to] = store[rows, :, source]

    def spread(self, count: int) -> None:
        """Copy the first `count` slots of row 0 to every row."""
        for store in (cast(Tensor, self.keys), cast(Tensor, self.values)):
            store[1:, :, :count] = store[:1, :, :count]

    def select(self, rows: Tensor) -> None:
        self.keys, self.values = take_rows(cast(Tensor, self.keys), rows), take_rows(cast(Tensor, self.values), rows)


def take_rows(store: Tensor, rows: Tensor) -> Tensor:
    """store[rows], without copying those that stay where they are if the others come from behind the new end."""
    count = len(rows)
    moved = (rows != torch.arange(count, device=rows.device)).nonzero()[:, 0]
    if len(moved) and int(rows[moved].min()) < count:
        return store[rows]
    if len(moved):
        store[moved] = store[rows[moved]]
    return store[:count]


def slot_cache(plan: Plan, layers: int, old: Cache | None = None) -> Cache:
    """A cache of `layers` layers that follows `plan`, in the memory of an old one where that is large enough."""
    before: list[Any] = list(old.layers) if old is not None and len(old.layers) == layers else [None] * layers
    return Cache(layers=[LayerSlots(plan, layer) for layer in before])


def place_of(cache: Cache) -> tuple[tuple[int, ...], ...]:
    """Where in memory every layer lies and how it is laid out: what a recorded pass depends on."""
    layers = cast("list[LayerSlots]", cache.layers)
    stores = [cast(Tensor, store) for layer in layers for store in (layer.keys, layer.values)]
    return tuple((store.data_ptr(), *store.shape, *store.stride()) for store in stores)
