"""EAGLE-3 and 3.1: one decoder layer that reads the target's features and continues on its own.

Slot t pairs the feature of position t with token x_{t+1} and predicts x_{t+2}; the next slot takes the layer's own
output in the feature's place. What engines expect of the numerics: the embedding half comes first in the attention
input, the residual stream is the un-normed feature. Sources: EAGLE-3 (2503.01840 §3), EAGLE-3.1 (2605.09992: per-tap
norm, normed feedback). Training is train/objectives/eagle.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.align import read_ahead
from specdec.drafter import Context
from specdec.errors import UserError
from specdec.layers import RMSNorm, SlotCache, rotate
from specdec.sampling import Sampling
from specdec.search import TreeConfig, grow
from specdec.target import Tap, Target
from specdec.tree import TokenTree
from specdec.vocab import choose_vocab

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value) [B, H, N, d] -> [B, N, H·d]; the caller owns keys, values and mask."""


@dataclass(frozen=True)
class EagleConfig:
    """conf/drafter/eagle.yaml, `model`."""

    draft_vocab_size: int = 8192
    """Tokens the drafter can propose; at most the target's vocabulary."""
    taps: list[int] | None = None
    """Three residual-stream taps (after k layers); null takes 2, L/2 and L-3."""
    fc_norm: bool = True
    """EAGLE-3.1: norm each tap before they are fused."""
    norm_output: bool = True
    """EAGLE-3.1: feed back the normed output."""

    def __post_init__(self) -> None:
        if self.draft_vocab_size < 16:
            raise UserError(f"drafter.model.draft_vocab_size must be 16 or more, got {self.draft_vocab_size}")


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
    target_layers: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    fc_norm: bool
    norm_output: bool


def shape_for(config: EagleConfig, target: Target) -> EagleShape:
    """The drafter's shape for a target. Raises UserError for taps or a vocabulary the target does not have."""
    c, count = target.model.config, target.layers
    known = c.to_dict()  # families that are not Llama-shaped leave some of it out
    taps = config.taps if config.taps is not None else [min(2, count - 1), count // 2, max(count - 3, 0)]
    if len(taps) != 3 or not all(0 <= tap < count for tap in taps):
        raise UserError(f"drafter.model.taps must be three numbers from 0 to {count - 1}, got {taps}")
    if config.draft_vocab_size > target.vocab_size:
        raise UserError(
            f"drafter.model.draft_vocab_size is {config.draft_vocab_size}, the target has {target.vocab_size} tokens"
        )
    return EagleShape(
        hidden_size=c.hidden_size,
        intermediate_size=known.get("intermediate_size") or 4 * c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=known.get("num_key_value_heads") or c.num_attention_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        taps=sorted(taps),
        target_layers=count,
        rope_theta=target.rope_theta,
        rms_norm_eps=known.get("rms_norm_eps") or 1e-5,
        max_positions=target.window,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )


class Layer(nn.Module):
    """A Llama decoder layer whose attention reads [embedding ; feature] and whose residual is the feature."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.shape = shape
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.q_proj = nn.Linear(2 * width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, width, bias=False)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.gate_proj = nn.Linear(width, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, width, bias=False)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """embedded, hidden [B, N, D]; positions [B, N] -> [B, N, D], un-normed."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        theta = self.shape.rope_theta
        query = rotate(self._split(self.q_proj(x)), positions, theta)
        key = rotate(self._split(self.k_proj(x)), positions, theta)
        hidden = hidden + self.o_proj(attend(query, key, self._split(self.v_proj(x))))
        x = self.post_attention_layernorm(hidden)
        return hidden + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)


class Eagle(nn.Module):
    """The drafter. The target's embedding is used and never saved.

    Buffer draft_ids [draft_vocab_size]: the target's id of each draft token, ascending.
    """

    draft_ids: Tensor

    def __init__(self, shape: EagleShape, embedding: nn.Module) -> None:
        super().__init__()
        width = shape.hidden_size
        self.shape = shape
        self.taps: tuple[Tap, ...] = tuple(shape.taps)
        self.tree = TreeConfig()
        self._embedding = [embedding]  # in a list: not a submodule, so neither saved nor trained
        count = len(shape.taps) if shape.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(width, shape.rms_norm_eps) for _ in range(count))
        self.fc = nn.Linear(len(shape.taps) * width, width, bias=False)
        self.layer = Layer(shape)
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        self.lm_head = nn.Linear(width, shape.draft_vocab_size, bias=False)
        self.register_buffer("draft_ids", torch.zeros(shape.draft_vocab_size, dtype=torch.long))
        self._cache = SlotCache(0, 0)

    # -- the network, shared by training and decoding ----------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding[0](tokens).to(self.fc.weight.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """Taps [..., S, D], in any dtype, to the first step's feature [..., D]."""
        features = features.to(self.fc.weight.dtype)
        if self.shape.fc_norm:
            parts = [norm(features[..., index, :]) for index, norm in enumerate(self.fc_norm)]
            return self.fc(torch.cat(parts, -1))
        return self.fc(features.flatten(-2))

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One application of the layer: what the head reads, and the feature of the next step; both [B, N, D]."""
        out = self.layer(self.embed(tokens), hidden, positions, attend)
        normed = self.norm(out)
        return normed, normed if self.shape.norm_output else out

    def logits(self, normed: Tensor) -> Tensor:
        """[..., D] to logits over the draft vocabulary."""
        return self.lm_head(normed)

    # -- the Drafter contract ----------------------------------------------------------------------------------

    @property
    def nodes(self) -> int:
        return self.tree.most_nodes

    def reset(self, rows: int, capacity: int) -> None:
        self._cache = SlotCache(rows, capacity + self.tree.most_slots)

    def renew(self, rows: Tensor) -> None:
        """A new text's features overwrite the slots of the old one."""

    def select(self, rows: Tensor) -> None:
        self._cache.select(rows)

    @torch.inference_mode()
    def propose(self, context: Context, sampling: Sampling, generator: torch.Generator | None) -> TokenTree:
        """A tree grown from the last true feature. Raises ValueError without features."""
        if context.features is None:
            raise ValueError("EAGLE needs the target's features")
        longest = int(context.lengths.max()) - 1  # the only number that has to come from the device
        normed, hidden = self._catch_up(context, longest + 1)
        # The root's slot is that of the last true feature; node n lies n behind it.
        base = context.lengths - 2

        def expand(tree: TokenTree, start: int) -> Tensor:
            nonlocal hidden
            if start == 0:
                return self.logits(normed)
            parent = tree.parents[:, start:, None].expand(-1, -1, hidden.shape[2])
            slots = base[:, None] + torch.arange(start, tree.nodes, device=base.device)
            positions = base[:, None] + tree.depths()[:, start:]
            mask = tree.visible(base, self._cache.width(longest + tree.nodes), start)
            out, new = self._cached(tree.tokens[:, start:], hidden.gather(1, parent), positions, slots, mask)
            hidden = torch.cat([hidden, new], 1)
            return self.logits(out)

        return grow(self.tree, context, expand, sampling, generator, self.draft_ids, self.shape.vocab_size)

    def _catch_up(self, context: Context, end: int) -> tuple[Tensor, Tensor]:
        """Run over the new true features; output and next feature of each row's last one, [B, 1, D]."""
        assert context.features is not None
        count = context.features.shape[1]
        starts = context.lengths - 1 - context.counts
        # What lies past a row's count is padding: its keys are overwritten before they are seen, or fall off the end.
        positions = (starts[:, None] + torch.arange(count, device=starts.device)).clamp(max=self._cache.capacity - 1)
        width = self._cache.width(end)
        mask = torch.arange(width, device=starts.device) <= positions[..., None]
        tokens = read_ahead(context.tokens, starts, count)
        normed, hidden = self._cached(tokens, self.fuse(context.features), positions, positions, mask)
        last = (context.counts - 1)[:, None, None].expand(-1, 1, normed.shape[2])
        return normed.gather(1, last), hidden.gather(1, last)

    def _cached(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.step(tokens, hidden, positions, lambda q, k, v: self._cache.attend(q, k, v, slots, mask))


Config = EagleConfig  # the name the pipeline looks for


def taps_for(config: EagleConfig, target: Target) -> tuple[Tap, ...]:
    """The target's states that this drafter reads."""
    return tuple(shape_for(config, target).taps)


def create(
    config: EagleConfig,
    target: Target,
    counts: Tensor,
    generator: torch.Generator,
    texts: Sequence[Tensor] = (),  # noqa: ARG001
) -> Eagle:
    """A new drafter: output matrix and final norm from the target, the last tap passed through, the rest random.

    counts [V]: how often each token occurs in the training texts; the draft vocabulary is the most frequent of them.
    texts: a few of them, ids [T], for a drafter whose beginning is measured.
    """
    draft_ids = choose_vocab(counts, config.draft_vocab_size, target.special_tokens)
    drafter = Eagle(shape_for(config, target), target.embedding)
    width = drafter.shape.hidden_size
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2 and name != "lm_head.weight":
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        # Both branches start near zero so that the first output is the fused feature itself.
        drafter.layer.o_proj.weight.mul_(0.1)
        drafter.layer.down_proj.weight.mul_(0.1)
        drafter.fc.weight.mul_(0.1)[:, -width:].add_(torch.eye(width))
        drafter.draft_ids.copy_(draft_ids)
        drafter.lm_head.weight.copy_(target.head_rows(draft_ids))
        drafter.norm.weight.copy_(target.final_norm())
    return drafter.to(target.device)


def vocabulary(drafter: Eagle) -> Tensor:
    """Ids it can propose, [Vd]."""
    return drafter.draft_ids


def config_of(drafter: Eagle) -> dict[str, Any]:
    """What save_drafter writes beside the weights."""
    return {**asdict(drafter.shape), "tree": asdict(drafter.tree)}


def from_config(config: dict[str, Any], target: Target) -> Eagle:
    """An empty drafter of the saved shape. Raises UserError if it was made for a target of another shape."""
    tree = TreeConfig(**config["tree"])
    shape = EagleShape(**{key: value for key, value in config.items() if key != "tree"})
    for key, here in (
        ("hidden_size", target.width),
        ("vocab_size", target.vocab_size),
        ("target_layers", target.layers),
    ):
        if config[key] != here:
            raise UserError(f"this drafter was made for a target with {key} {config[key]}; {target.name} has {here}")
    drafter = Eagle(shape, target.embedding)
    drafter.tree = tree
    return drafter
