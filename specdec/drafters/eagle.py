"""EAGLE: one decoder layer that reads the target's features and continues on its own.

Here is the drafter: its settings, how a new one begins, how it grows a tree. The network of both generations is
specdec/eagle_network.py, training train/objectives/eagle.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.align import read_ahead
from specdec.drafter import Context
from specdec.eagle_network import EagleNetwork, EagleShape
from specdec.errors import UserError
from specdec.layers import RMSNorm, SlotCache
from specdec.sampling import Sampling
from specdec.search import TreeConfig, grow
from specdec.target import Tap, Target
from specdec.tree import TokenTree
from specdec.vocab import choose_vocab


@dataclass(frozen=True)
class EagleConfig:
    """conf/drafter/eagle.yaml and eagle1.yaml, `model`."""

    generation: int = 3
    """3: EAGLE-3 and 3.1; 1: EAGLE-1, EAGLE-2 and HASS."""
    draft_vocab_size: int = 8192
    """Tokens the drafter can propose; at most the target's vocabulary."""
    taps: list[int] | None = None
    """Generation 3: residual-stream taps (after k layers), one to six, engines load three; null: 2, L/2 and L-3."""
    fc_norm: bool = True
    """Generation 3: norm each tap before they are fused (EAGLE-3.1)."""
    norm_output: bool = True
    """Generation 3: feed back the normed output (EAGLE-3.1)."""
    fc_bias: bool = False
    """Generation 1: fc has a bias, as in the paper's code; vLLM drops it."""

    def __post_init__(self) -> None:
        if self.draft_vocab_size < 16:
            raise UserError(f"drafter.model.draft_vocab_size must be 16 or more, got {self.draft_vocab_size}")
        if self.generation not in (1, 3):
            raise UserError(f"drafter.model.generation must be 1 or 3, got {self.generation}")
        if self.generation == 3 and self.fc_bias:
            raise UserError("drafter.model.fc_bias belongs to drafter.model.generation=1")
        if self.generation == 3 and self.taps is not None and not 1 <= len(self.taps) <= 6:
            raise UserError(f"drafter.model.taps must be one to six numbers, got {self.taps}")
        if self.generation == 1:
            if self.taps:
                raise UserError(
                    f"drafter.model.taps must be null for drafter.model.generation=1, which reads the final state; "
                    f"got {self.taps}"
                )
            object.__setattr__(self, "taps", [])  # other features than generation 3's null: runs must not share them


def shape_for(config: EagleConfig, target: Target) -> EagleShape:
    """The drafter's shape for a target. Raises UserError for taps or a vocabulary the target does not have."""
    c, count, third = target.model.config, target.layers, config.generation == 3
    known = c.to_dict()  # families that are not Llama-shaped leave some of it out
    taps = config.taps if config.taps is not None else [min(2, count - 1), count // 2, max(count - 3, 0)]
    if not all(0 <= tap < count for tap in taps):
        raise UserError(f"drafter.model.taps must be numbers from 0 to {count - 1}, got {taps}")
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
        taps=sorted(taps) if third else [],
        target_layers=count,
        rope_theta=target.rope_theta,
        rms_norm_eps=known.get("rms_norm_eps") or 1e-5,
        max_positions=target.window,
        fc_norm=third and config.fc_norm,
        norm_output=third and config.norm_output,
        generation=config.generation,
        fc_bias=config.fc_bias,
    )


class Eagle(EagleNetwork):
    """The network with its tree and its cache: the drafter."""

    def __init__(
        self, shape: EagleShape, embedding: nn.Module, head_rows: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__(shape, embedding, head_rows)
        self.taps: tuple[Tap, ...] = tuple(shape.taps) if shape.generation == 3 else ("final",)
        self.tree = TreeConfig()
        self._cache = SlotCache(0, 0)

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
    """The target's states that this drafter reads beside the final one."""
    return tuple(shape_for(config, target).taps)


def create(
    config: EagleConfig,
    target: Target,
    counts: Tensor,
    generator: torch.Generator,
    texts: Sequence[Tensor] = (),  # noqa: ARG001
) -> Eagle:
    """A new drafter: the feature (of generation 3: the last tap) passed through, the rest random.

    Generation 3's output matrix and final norm begin as the target's. counts [V]: how often each token occurs in the
    training texts; the draft vocabulary is the most frequent of them. texts: a few of them, ids [T], for a drafter
    whose beginning is measured.
    """
    draft_ids = choose_vocab(counts, config.draft_vocab_size, target.special_tokens)
    drafter = Eagle(shape_for(config, target), target.embedding, target.head_rows)
    width = drafter.shape.hidden_size
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2 and name != "lm_head.weight":
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        # Both branches start near zero so that the first output is the feature itself.
        drafter.layer.o_proj.weight.mul_(0.1)
        drafter.layer.down_proj.weight.mul_(0.1)
        drafter.fc.weight.mul_(0.1)[:, -width:].add_(torch.eye(width))
        if drafter.shape.fc_bias:
            drafter.fc.bias.zero_()
        drafter.draft_ids.copy_(draft_ids)
        drafter.lm_head.weight.copy_(target.head_rows(draft_ids))
        if isinstance(drafter.norm, RMSNorm):
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
    drafter = Eagle(shape, target.embedding, target.head_rows)
    drafter.tree = tree
    return drafter
