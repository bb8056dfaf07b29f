"""Medusa: several heads on the target's final state, each guessing one token further, all at once.

Head k reads the final, normed state of position t (what the target's own head reads) and predicts x_{t+2+k}; the
target itself says x_{t+1}. Heads do not see one another's guesses, so a round costs the drafter one small product per
head, and a tree of guesses is a product of their laws. Source: Medusa (2401.10774 §2.1); training is
train/objectives/medusa.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.drafter import Context
from specdec.errors import UserError
from specdec.sampling import Sampling
from specdec.search import TreeConfig, grow
from specdec.target import Tap, Target
from specdec.tree import TokenTree
from specdec.vocab import choose_vocab


@dataclass(frozen=True)
class MedusaConfig:
    """conf/drafter/medusa.yaml, `model`."""

    heads: int = 4
    """Tokens guessed ahead."""
    layers: int = 1
    """Residual blocks of each head."""
    draft_vocab_size: int = 8192
    """Tokens the heads can propose; at most the target's vocabulary."""
    own_output: bool = False
    """Each head has its own output matrix; false: one for all, which starts as the target's."""

    def __post_init__(self) -> None:
        if self.heads < 1 or self.layers < 1:
            raise UserError("drafter.model.heads and drafter.model.layers must be 1 or more")
        if self.draft_vocab_size < 16:
            raise UserError(f"drafter.model.draft_vocab_size must be 16 or more, got {self.draft_vocab_size}")


@dataclass(frozen=True)
class MedusaShape:
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


class Medusa(nn.Module):
    """The drafter. Buffer draft_ids [draft_vocab_size]: the target's id of each draft token, ascending."""

    draft_ids: Tensor
    taps: tuple[Tap, ...] = ("final",)

    def __init__(self, shape: MedusaShape) -> None:
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

    # -- the network, shared by training and decoding ----------------------------------------------------------

    def hidden(self, head: int, final: Tensor) -> Tensor:
        """What a head's output matrix reads: final [..., D] -> [..., D]."""
        return self.blocks[head](final.to(self.dtype))

    def output(self, head: int) -> nn.Linear:
        found = self.outputs[head if self.shape.own_output else 0]
        assert isinstance(found, nn.Linear)
        return found

    @property
    def dtype(self) -> torch.dtype:
        return self.output(0).weight.dtype

    # -- the Drafter contract ----------------------------------------------------------------------------------

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

    @torch.inference_mode()
    def propose(self, context: Context, sampling: Sampling, generator: torch.Generator | None) -> TokenTree:
        """A tree whose level d holds head d's guesses. Raises ValueError without features."""
        if context.features is None:
            raise ValueError("Medusa needs the target's final state")
        rows = torch.arange(len(context.counts), device=context.counts.device)
        final = context.features[rows, context.counts - 1, -1]  # of the last position read
        laws: dict[int, Tensor] = {}

        def expand(tree: TokenTree, start: int) -> Tensor:
            depths = tree.depths()[:, start:]
            for head in range(int(depths.max()) + 1):
                if head not in laws:
                    laws[head] = self.output(head)(self.hidden(head, final))
            stacked = torch.stack([laws[head] for head in sorted(laws)], 1)  # [B, heads so far, V']
            return stacked[rows[:, None], depths]

        return grow(self.tree, context, expand, sampling, generator, self.draft_ids, self.shape.vocab_size)


Config = MedusaConfig  # the name the pipeline looks for


def taps_for(config: MedusaConfig, target: Target) -> tuple[Tap, ...]:  # noqa: ARG001
    """The target's states that this drafter reads beside the final one."""
    return ()


def create(
    config: MedusaConfig,
    target: Target,
    counts: Tensor,
    generator: torch.Generator,  # noqa: ARG001
    texts: Sequence[Tensor] = (),  # noqa: ARG001
) -> Medusa:
    """New heads that all say what the target's own head says: blocks zero, output matrices the target's.

    counts [V]: how often each token occurs in the training texts; the draft vocabulary is the most frequent of them.
    texts: a few of them, ids [T], for a drafter whose beginning is measured.
    """
    if config.draft_vocab_size > target.vocab_size:
        raise UserError(
            f"drafter.model.draft_vocab_size is {config.draft_vocab_size}, the target has {target.vocab_size} tokens"
        )
    drafter = Medusa(MedusaShape(hidden_size=target.width, vocab_size=target.vocab_size, **asdict(config)))
    draft_ids = choose_vocab(counts, config.draft_vocab_size, target.special_tokens)
    with torch.no_grad():
        for parameter in drafter.blocks.parameters():
            parameter.zero_()
        drafter.draft_ids.copy_(draft_ids)
        for output in drafter.outputs:
            assert isinstance(output, nn.Linear)
            output.weight.copy_(target.head_rows(draft_ids))
    return drafter.to(target.device)


def vocabulary(drafter: Medusa) -> Tensor:
    """Ids it can propose, [Vd]."""
    return drafter.draft_ids


def config_of(drafter: Medusa) -> dict[str, Any]:
    """What save_drafter writes beside the weights."""
    return {**asdict(drafter.shape), "tree": asdict(drafter.tree)}


def from_config(config: dict[str, Any], target: Target) -> Medusa:
    """An empty drafter of the saved shape. Raises UserError if it was made for a target of another shape."""
    shape = MedusaShape(**{key: value for key, value in config.items() if key != "tree"})
    for key, here in (("hidden_size", target.width), ("vocab_size", target.vocab_size)):
        if config[key] != here:
            raise UserError(f"this drafter was made for a target with {key} {config[key]}; {target.name} has {here}")
    drafter = Medusa(shape)
    drafter.tree = TreeConfig(**config["tree"])
    return drafter
