"""Target: an unmodified causal LM of transformers, with a cache of slots and taps into its residual stream.

The only file that touches the target's cache. Rows have their own lengths: a node of a tree is written to slot
length + node, and a key is visible when its slot is before the row's length or holds an ancestor of the reading
node. Rejected nodes are simply never counted, and are overwritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import attention, fast
from specdec.align import positions_within, visible_within
from specdec.check import check_exact
from specdec.errors import UserError
from specdec.facts import Facts
from specdec.graphs import Graphs
from specdec.inside import common_start, decoder_layers, joined, query_heads_per_key, recorder, refuse_unsupported
from specdec.slots import LayerSlots, Plan, place_of, slot_cache
from specdec.tree import Paths, TokenTree

Tap = int | Literal["final"]
BUCKET = 32  # attention looks at a whole number of these slots


@dataclass(frozen=True)
class Reading:
    """What the target says about every node: logits [B, N, V] and features [B, N, S, D] (None without taps)."""

    logits: Tensor
    features: Tensor | None


class Target(Facts):
    """A causal LM that reads token trees.

    lengths [B]: positions read and kept, per row. Use: start(prompts) once, then read(trees) and keep(paths) in turns.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        name: str = "target",
        fast_mode: str = "auto",
        packing: Path | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.taps: tuple[Tap, ...] = ()
        self.lengths = torch.zeros(0, dtype=torch.long)
        self.session = object()
        """Another one after each start(): a stream that is continued after another began can tell."""
        self._plan = Plan(0, 0)
        self._cache = slot_cache(self._plan, 0)
        self._longest = self._shared = 0
        self._shared_features: Tensor | None = None
        refuse_unsupported(model)
        stock = model.config._attn_implementation
        # A model that another Target drives already (a target drafting for itself) has ours.
        self._stock_attention = "sdpa" if stock == attention.NAME else stock
        self.decoder_layers = decoder_layers(model)
        self._share = query_heads_per_key(model)
        model.set_attn_implementation(attention.NAME)
        self.fast_mode, self.packing = fast_mode, packing
        self.packed = fast.pack(model, fast_mode, packing)
        # Fewer shapes where each is recorded.
        self._bucket = BUCKET if fast_mode != "graph" else 8 * BUCKET
        self.graphs = Graphs() if fast_mode == "graph" else None
        check_exact(self)

    @contextlib.contextmanager
    def stock(self) -> Iterator[PreTrainedModel]:
        """The model as transformers made it, for `model.generate`."""
        self.model.set_attn_implementation(self._stock_attention)
        if self.packed:
            self.packed.release()
        try:
            yield self.model
        finally:
            self.model.set_attn_implementation(attention.NAME)
            if self.packed:
                self.packed.engage()

    # -- reading -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def start(
        self,
        prompts: Sequence[Sequence[int]],
        room: int,
        taps: tuple[Tap, ...] = (),
        later: Sequence[Sequence[int]] | None = (),
    ) -> Reading:
        """Forget everything and read prompts (B lists of ids), leaving `room` slots for what follows.

        later: prompts that admit() will bring; None where they are not known. What all prompts begin with is read
        once. Returns the logits of each row's last position [B, 1, V] and the features of all positions [B, P, S, D],
        right-padded. Raises UserError where a prompt is empty or does not fit the window.
        """
        everything = [*prompts, *(later or ())]
        sizes = [len(prompt) for prompt in everything]
        if not prompts:
            raise UserError("there are no prompts to decode")
        if min(sizes) == 0:
            raise UserError(f"prompt {sizes.index(0)} is empty: there is no token to start from")
        if max(sizes) >= self.window:
            raise UserError(
                f"prompt {sizes.index(max(sizes))} has {max(sizes)} tokens; the target's window is {self.window}"
            )
        self.taps = taps
        self.session = object()
        self.lengths = torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        self._plan = Plan(len(prompts), -(-(max(sizes) + room) // self._bucket) * self._bucket)
        self._cache = slot_cache(self._plan, self.layers, self._cache if self.graphs else None)
        if self.graphs and not all(layer.is_initialized for layer in self._cache.layers):
            self.graphs.known.clear()  # they wrote to memory that is gone
        self._shared_features = None
        self._shared = common_start(everything) if len(everything) > 1 and later is not None else 0
        if self._shared:
            first = torch.zeros(1, dtype=torch.long, device=self.device)
            _, self._shared_features = self._read_text(first, [everything[0][: self._shared]], 0)
            for layer in cast("list[LayerSlots]", self._cache.layers):
                layer.spread(self._shared)
        return self.admit(torch.arange(len(prompts), device=self.device), prompts)

    @torch.inference_mode()
    def admit(self, rows: Tensor, prompts: Sequence[Sequence[int]]) -> Reading:
        """Begin other texts in `rows`, some of those given to start() as `later`; returns as start() does."""
        sizes = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        lasts, pieces = [], []
        # A few prompts at a time: their activations stay in a CPU's cache, and fit a GPU's memory.
        longest = int(sizes.max()) - self._shared
        together = max(1, (1024 if self.device.type == "cpu" else 16384) // longest)
        for some in torch.arange(len(prompts), device=self.device).split(together):
            final, features = self._read_text(rows[some], [prompts[i] for i in some.tolist()], self._shared)
            lasts.append(final[torch.arange(len(some), device=self.device), sizes[some] - 1 - self._shared])
            if features is not None:
                pieces.append(features)
        self.lengths = self.lengths.index_copy(0, rows, sizes)
        self._longest = int(self.lengths.max())
        whole = joined(self._shared_features, pieces, int(sizes.max())) if pieces else None
        return Reading(self.head(torch.cat(lasts))[:, None], whole)

    def _read_text(self, rows: Tensor, texts: Sequence[Sequence[int]], start: int) -> tuple[Tensor, Tensor | None]:
        """Positions from `start` on of texts that begin in `rows`: final states and features, right-padded."""
        longest = max(map(len, texts))
        tokens = torch.zeros(len(texts), longest - start, dtype=torch.long)
        for row, text in enumerate(texts):
            tokens[row, : len(text) - start] = torch.as_tensor(text[start:])
        position = torch.arange(start, longest, device=self.device).expand(len(texts), -1)
        visible = min(-(-longest // self._bucket) * self._bucket, self._plan.capacity)
        mask = torch.arange(visible, device=self.device) <= position[..., None]
        self._plan.slots, self._plan.visible = position, visible
        # All rows in their order are read in place, without copying the cache.
        self._plan.only = None if torch.equal(rows, torch.arange(self._plan.rows, device=rows.device)) else rows
        try:
            return self._forward(tokens.to(self.device), position, mask)
        finally:
            self._plan.only = None

    @torch.inference_mode()
    def read(self, trees: TokenTree, start: int = 0) -> Reading:
        """Read the nodes from `start` on of every row's tree; nothing is kept until keep().

        Nodes before `start` must have been read since the last keep(), as part of the same growing tree.
        """
        count = trees.nodes
        if self._longest + count > self._plan.capacity:
            raise ValueError(f"{count} nodes after {self._longest} positions exceed {self._plan.capacity} slots")
        visible = min(-(-(self._longest + count) // self._bucket) * self._bucket, self._plan.capacity)
        slots = self.lengths[:, None] + torch.arange(start, count, device=self.device)
        # A guess past the window is never kept; learned positions end there.
        positions = (self.lengths[:, None] + trees.depths()).clamp(max=self.window - 1)
        mask = trees.visible(self.lengths, visible, start)
        inputs = (trees.tokens[:, start:], positions[:, start:], mask, slots)

        def forward(tokens: Tensor, positions: Tensor, mask: Tensor, slots: Tensor) -> tuple[Tensor, Tensor | None]:
            self._plan.slots, self._plan.visible = slots, visible
            return self._forward(tokens, positions, mask)

        if self.graphs is None:
            final, features = forward(*inputs)
        else:
            final, features = self.graphs.run((self.taps, *place_of(self._cache), visible), inputs, forward)
        return Reading(self.head(final), features)

    @torch.inference_mode()
    def keep(self, paths: Paths) -> None:
        """Move the accepted nodes to the row's next slots and forget the rest."""
        moved = torch.arange(paths.nodes.shape[1], device=self.device).expand_as(paths.nodes)
        accepted = moved < paths.lengths[:, None]
        if bool(((paths.nodes != moved) & accepted).any()):  # a chain already lies in place
            rows = torch.arange(self._plan.rows, device=self.device)[:, None]
            to = self.lengths[:, None] + moved
            source = self.lengths[:, None] + torch.where(accepted, paths.nodes, moved)
            for layer in cast("list[LayerSlots]", self._cache.layers):
                layer.move(rows, source, to)
        self.lengths = self.lengths + paths.lengths
        self._longest = int(self.lengths.max())

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        """Go on with these rows only (finished ones are dropped)."""
        self.lengths = self.lengths[rows]
        self._plan.rows = len(rows)
        self._longest = int(self.lengths.max()) if len(rows) else 0
        for layer in cast("list[LayerSlots]", self._cache.layers):
            layer.select(rows)

    def features(
        self, tokens: Tensor, taps: tuple[Tap, ...], documents: Tensor | None = None, *, gradients: bool = False
    ) -> Tensor:
        """Features of right-padded texts, without touching the cache: [B, T] -> [B, T, S, D].

        documents [B, T]: which text a position belongs to (negative: padding), where rows hold several; each is read
        as if it were alone. gradients: let them flow back into the model.
        """
        held, self.taps = self.taps, taps
        documents = torch.zeros_like(tokens) if documents is None else documents
        position, mask = positions_within(documents), visible_within(documents)
        with torch.inference_mode(not gradients):
            _, features = self._forward(tokens, position, mask, cached=False)
        self.taps = held
        return cast(Tensor, features)

    def _forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cached: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        seen: dict[Tap, Tensor] = {}
        hooks = [
            self.decoder_layers[tap].register_forward_pre_hook(recorder(seen, tap), with_kwargs=True)
            for tap in self.taps
            if tap != "final"
        ]
        try:
            output = self.model.base_model(
                input_ids=tokens,
                attention_mask=attention.fold_mask(mask, self._share, self.model.dtype),
                position_ids=positions,
                use_cache=cached,
                **({"cache": self._cache} if cached else {}),
            )
        finally:
            for hook in hooks:
                hook.remove()
        final = output.last_hidden_state
        seen["final"] = final
        features = torch.stack([seen[tap] for tap in self.taps], 2) if self.taps else None
        return final, features
