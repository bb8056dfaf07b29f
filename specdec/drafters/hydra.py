"""Hydra: heads on the target's final state that read the tokens they follow, each guessing one token further.

Head k reads the final, normed state of position t and the embeddings of x_{t+1} … x_{t+1+k}, and predicts x_{t+2+k}.
Medusa's heads do not see one another's guesses; these do, so that children of different nodes differ, and head k runs
on every node k edges below the root. Source: Hydra (2402.05109 §3); where we differ: what is read goes through one
matrix and then Medusa's blocks, and embeddings are brought to one size first. Training is train/objectives/hydra.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.drafter import Context
from specdec.errors import UserError
from specdec.layers import RMSNorm
from specdec.sampling import Sampling
from specdec.search import TreeConfig, grow
from specdec.target import Tap, Target
from specdec.tree import TokenTree
from specdec.vocab import choose_vocab


@dataclass(frozen=True)
class HydraConfig:
    """conf/drafter/hydra.yaml, `model`."""

    heads: int = 4
    """Tokens guessed ahead."""
    layers: int = 1
    """Residual blocks of each head, behind the matrix that reads state and tokens."""
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
class HydraShape:
    """Everything that fixes the tensors and the numerics; saved as the drafter folder's config.json."""

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


class Hydra(nn.Module):
    """The drafter. The target's embedding is used and never saved.

    Buffer draft_ids [draft_vocab_size]: the target's id of each draft token, ascending.
    """

    draft_ids: Tensor
    taps: tuple[Tap, ...] = ("final",)

    def __init__(self, shape: HydraShape, embedding: nn.Module) -> None:
        super().__init__()
        width, heads = shape.hidden_size, shape.heads
        self.shape = shape
        self.tree = TreeConfig(depth=heads)
        self._embedding = [embedding]  # in a list: not a submodule, so neither saved nor trained
        # Families scale their embeddings very differently; the heads would learn from small ones slowly.
        self.norm = RMSNorm(width, 1e-6)
        self.mix = nn.ModuleList(nn.Linear((2 + head) * width, width, bias=False) for head in range(heads))
        self.blocks = nn.ModuleList(nn.Sequential(*(Block(width) for _ in range(shape.layers))) for _ in range(heads))
        self.outputs = nn.ModuleList(
            nn.Linear(width, shape.draft_vocab_size, bias=False) for _ in range(heads if shape.own_output else 1)
        )
        self.register_buffer("draft_ids", torch.zeros(shape.draft_vocab_size, dtype=torch.long))

    # -- the network, shared by training and decoding ----------------------------------------------------------

    def hidden(self, head: int, final: Tensor, tokens: Tensor) -> Tensor:
        """What a head's output matrix reads: final [n, D] and the 1 + head tokens after it [n, 1 + head] -> [n, D]."""
        embedded = self.norm(self._embedding[0](tokens).to(self.dtype))
        return self.blocks[head](self.mix[head](torch.cat([final.to(self.dtype), embedded.flatten(1)], 1)))

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
        """A tree in which each node's children are guessed from its own path. Raises ValueError without features."""
        if context.features is None:
            raise ValueError("Hydra needs the target's final state")
        every = torch.arange(len(context.counts), device=context.counts.device)
        final = context.features[every, context.counts - 1, -1]  # of the last position read

        def expand(tree: TokenTree, start: int) -> Tensor:
            depths = tree.depths()[:, start:]
            logits = final.new_empty(*depths.shape, self.shape.draft_vocab_size, dtype=self.dtype)
            for head in depths.unique().tolist():
                rows, nodes = (depths == head).nonzero(as_tuple=True)
                tokens = path_tokens(tree, rows, nodes + start, head)
                logits[rows, nodes] = self.output(head)(self.hidden(head, final[rows], tokens))
            return logits

        return grow(self.tree, context, expand, sampling, generator, self.draft_ids, self.shape.vocab_size)


def path_tokens(tree: TokenTree, rows: Tensor, nodes: Tensor, depth: int) -> Tensor:
    """Tokens from the root down to nodes that lie `depth` edges below it: rows, nodes [n] -> [n, 1 + depth].

    A padding node counts as a root.
    """
    found = [tree.tokens[rows, nodes]]
    for _ in range(depth):
        nodes = tree.parents[rows, nodes]
        found.insert(0, tree.tokens[rows, nodes])
    return torch.stack(found, 1)


Config = HydraConfig  # the name the pipeline looks for


def taps_for(config: HydraConfig, target: Target) -> tuple[Tap, ...]:  # noqa: ARG001
    """The target's states that this drafter reads beside the final one."""
    return ()


def create(
    config: HydraConfig,
    target: Target,
    counts: Tensor,
    generator: torch.Generator,  # noqa: ARG001
    texts: Sequence[Tensor] = (),  # noqa: ARG001
) -> Hydra:
    """New heads that all say what the target's own head says, whatever the tokens: the state passed through, nothing
    of the embeddings, blocks zero, output matrices the target's.

    counts [V]: how often each token occurs in the training texts; the draft vocabulary is the most frequent of them.
    texts: a few of them, ids [T], for a drafter whose beginning is measured.
    """
    if config.draft_vocab_size > target.vocab_size:
        raise UserError(
            f"drafter.model.draft_vocab_size is {config.draft_vocab_size}, the target has {target.vocab_size} tokens"
        )
    shape = HydraShape(hidden_size=target.width, vocab_size=target.vocab_size, **asdict(config))
    drafter = Hydra(shape, target.embedding)
    draft_ids = choose_vocab(counts, config.draft_vocab_size, target.special_tokens)
    with torch.no_grad():
        for parameter in [*drafter.mix.parameters(), *drafter.blocks.parameters()]:
            parameter.zero_()
        for mix in drafter.mix:
            assert isinstance(mix, nn.Linear)
            mix.weight[:, : target.width].copy_(torch.eye(target.width))
        drafter.draft_ids.copy_(draft_ids)
        for output in drafter.outputs:
            assert isinstance(output, nn.Linear)
            output.weight.copy_(target.head_rows(draft_ids))
    return drafter.to(target.device)


def vocabulary(drafter: Hydra) -> Tensor:
    """Ids it can propose, [Vd]."""
    return drafter.draft_ids


def config_of(drafter: Hydra) -> dict[str, Any]:
    """What save_drafter writes beside the weights."""
    return {**asdict(drafter.shape), "tree": asdict(drafter.tree)}


def from_config(config: dict[str, Any], target: Target) -> Hydra:
    """An empty drafter of the saved shape. Raises UserError if it was made for a target of another shape."""
    shape = HydraShape(**{key: value for key, value in config.items() if key != "tree"})
    for key, here in (("hidden_size", target.width), ("vocab_size", target.vocab_size)):
        if config[key] != here:
            raise UserError(f"this drafter was made for a target with {key} {config[key]}; {target.name} has {here}")
    drafter = Hydra(shape, target.embedding)
    drafter.tree = TreeConfig(**config["tree"])
    return drafter
