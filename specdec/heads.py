"""What drafters of several heads on the target's final state share: Medusa's and Hydra's.

Head k guesses the token k + 2 behind the state's position. Nothing is kept between rounds. What a head reads and how
its tree grows is each drafter's own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.drafter import Context
from specdec.errors import UserError
from specdec.search import TreeConfig
from specdec.target import Tap, Target
from specdec.vocab import choose_vocab


@dataclass(frozen=True)
class HeadsConfig:
    """conf/drafter/medusa.yaml and hydra.yaml, `model`."""

    heads: int = 4
    """Tokens guessed ahead."""
    layers: int = 1
    """Residual blocks of each head."""
    draft_vocab_size: int = 8192
    """Tokens the heads can propose; at most the target's vocabulary."""
    own_output: bool = False
    """Each head has its own output matrix; false: one for all, which starts as the target's."""

    def __post_init__(self) -> None:
        for name in ("heads", "layers"):
            if getattr(self, name) < 1:
                raise UserError(f"drafter.model.{name} must be 1 or more, got {getattr(self, name)}")
        if self.draft_vocab_size < 16:
            raise UserError(f"drafter.model.draft_vocab_size must be 16 or more, got {self.draft_vocab_size}")


@dataclass(frozen=True)
class HeadsShape:
    """Everything that fixes the tensors; saved as the drafter folder's config.json."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    heads: int
    layers: int
    own_output: bool


class Block(nn.Module):
    """x + SiLU(Wx + b); with W and b zero it changes nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class Heads(nn.Module):
    """Blocks and output matrices.

    Buffer draft_ids [draft_vocab_size]: the target's id of each draft token, ascending.
    """

    draft_ids: Tensor
    taps: tuple[Tap, ...] = ("final",)

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.shape = shape
        self.tree = TreeConfig(depth=shape.heads)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Block(shape.hidden_size) for _ in range(shape.layers))) for _ in range(shape.heads)
        )
        self.outputs = nn.ModuleList(
            nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
            for _ in range(shape.heads if shape.own_output else 1)
        )
        self.register_buffer("draft_ids", torch.zeros(shape.draft_vocab_size, dtype=torch.long))

    def output(self, head: int) -> nn.Linear:
        found = self.outputs[head if self.shape.own_output else 0]
        assert isinstance(found, nn.Linear)
        return found

    @property
    def dtype(self) -> torch.dtype:
        return self.output(0).weight.dtype

    @torch.no_grad()
    def begin(self, target: Target, counts: Tensor) -> None:
        """Say what the target's own head says: blocks zero, output matrices the target's.

        counts [V]: how often each token occurs in the training texts; the draft vocabulary is the most frequent.
        """
        draft_ids = choose_vocab(counts, self.shape.draft_vocab_size, target.special_tokens)
        for parameter in self.blocks.parameters():
            parameter.zero_()
        self.draft_ids.copy_(draft_ids)
        for output in self.outputs:
            assert isinstance(output, nn.Linear)
            output.weight.copy_(target.head_rows(draft_ids))

    @property
    def nodes(self) -> int:
        return self.tree.most_nodes

    def reset(self, rows: int, capacity: int) -> None:  # noqa: ARG002
        """Nothing is kept between rounds. Raises UserError for a tree deeper than there are heads."""
        if self.tree.longest > self.shape.heads:
            raise UserError(f"drafter.tree is {self.tree.longest} deep, but there are {self.shape.heads} heads")

    def renew(self, rows: Tensor) -> None:
        """Nothing is kept per row."""

    def select(self, rows: Tensor) -> None:
        """Nothing is kept per row."""


def last_state(context: Context) -> Tensor:
    """The target's final state of the last position read, [B, D]. Raises ValueError without features."""
    if context.features is None:
        raise ValueError("these heads need the target's final state")
    rows = torch.arange(len(context.counts), device=context.counts.device)
    return context.features[rows, context.counts - 1, -1]


def taps_for(config: HeadsConfig, target: Target) -> tuple[Tap, ...]:  # noqa: ARG001
    """The target's states that such a drafter reads beside the final one."""
    return ()


def shape_for(config: HeadsConfig, target: Target) -> HeadsShape:
    """Raises UserError for more tokens than the target has."""
    if config.draft_vocab_size > target.vocab_size:
        raise UserError(
            f"drafter.model.draft_vocab_size is {config.draft_vocab_size}, the target has {target.vocab_size} tokens"
        )
    return HeadsShape(hidden_size=target.width, vocab_size=target.vocab_size, **asdict(config))


def vocabulary(drafter: Heads) -> Tensor:
    """Ids it can propose, [Vd]."""
    return drafter.draft_ids


def config_of(drafter: Heads) -> dict[str, Any]:
    """What save_drafter writes beside the weights."""
    return {**asdict(drafter.shape), "tree": asdict(drafter.tree)}


def saved_shape(config: dict[str, Any], target: Target) -> tuple[HeadsShape, TreeConfig]:
    """What config_of() wrote. Raises UserError if it was made for a target of another shape."""
    for key, here in (("hidden_size", target.width), ("vocab_size", target.vocab_size)):
        if config[key] != here:
            raise UserError(f"this drafter was made for a target with {key} {config[key]}; {target.name} has {here}")
    shape = HeadsShape(**{key: value for key, value in config.items() if key != "tree"})
    return shape, TreeConfig(**config["tree"])
