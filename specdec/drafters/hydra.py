"""Hydra: heads on the target's final state that read the tokens they follow, each guessing one token further.

Head k reads the final, normed state of position t and the embeddings of x_{t+1} … x_{t+1+k}, and predicts x_{t+2+k}.
Medusa's heads do not see one another's guesses; these do, so that children of different nodes differ, and head k runs
on every node k edges below the root. Source: Hydra (2402.05109 §3); where we differ: what is read goes through one
matrix and then Medusa's blocks, and embeddings are brought to one size first. Training is train/objectives/hydra.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdec.drafter import Context
from specdec.heads import (
    Heads,
    HeadsConfig,
    HeadsShape,
    config_of,
    last_state,
    saved_shape,
    shape_for,
    taps_for,
    vocabulary,
)
from specdec.layers import RMSNorm
from specdec.sampling import Sampling
from specdec.search import grow
from specdec.target import Target
from specdec.tree import TokenTree

__all__ = ["Config", "config_of", "create", "from_config", "taps_for", "vocabulary"]


class Hydra(Heads):
    """The drafter. The target's embedding is used and never saved."""

    def __init__(self, shape: HeadsShape, embedding: nn.Module) -> None:
        super().__init__(shape)
        width = shape.hidden_size
        self._embedding = [embedding]  # in a list: not a submodule, so neither saved nor trained
        # Families scale their embeddings very differently; the heads would learn from small ones slowly.
        self.norm = RMSNorm(width, 1e-6)
        self.mix = nn.ModuleList(nn.Linear((2 + head) * width, width, bias=False) for head in range(shape.heads))

    def hidden(self, head: int, final: Tensor, tokens: Tensor) -> Tensor:
        """What a head's output matrix reads: final [n, D] and the 1 + head tokens after it [n, 1 + head] -> [n, D]."""
        embedded = self.norm(self._embedding[0](tokens).to(self.dtype))
        return self.blocks[head](self.mix[head](torch.cat([final.to(self.dtype), embedded.flatten(1)], 1)))

    @torch.inference_mode()
    def propose(self, context: Context, sampling: Sampling, generator: torch.Generator | None) -> TokenTree:
        """A tree in which each node's children are guessed from its own path. Raises ValueError without features."""
        final = last_state(context)

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


HydraConfig = Config = HeadsConfig  # Config is the name the pipeline looks for


def create(
    config: HeadsConfig,
    target: Target,
    counts: Tensor,
    generator: torch.Generator,  # noqa: ARG001
    texts: Sequence[Tensor] = (),  # noqa: ARG001
) -> Hydra:
    """New heads that all say what the target's own head says, whatever the tokens: the state passed through, nothing
    of the embeddings.

    counts [V]: how often each token occurs in the training texts; the draft vocabulary is the most frequent of them.
    texts: a few of them, ids [T], for a drafter whose beginning is measured.
    """
    drafter = Hydra(shape_for(config, target), target.embedding)
    drafter.begin(target, counts)
    with torch.no_grad():
        for mix in drafter.mix:
            assert isinstance(mix, nn.Linear)
            mix.weight.zero_()[:, : target.width].copy_(torch.eye(target.width))
    return drafter.to(target.device)


def from_config(config: dict[str, Any], target: Target) -> Hydra:
    """An empty drafter of the saved shape. Raises UserError if it was made for a target of another shape."""
    shape, tree = saved_shape(config, target)
    drafter = Hydra(shape, target.embedding)
    drafter.tree = tree
    return drafter
