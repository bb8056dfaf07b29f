"""Medusa: several heads on the target's final state, each guessing one token further, all at once.

Head k reads the final, normed state of position t (what the target's own head reads) and predicts x_{t+2+k}; the
target itself says x_{t+1}. Heads do not see one another's guesses, so a round costs the drafter one small product per
head, and a tree of guesses is a product of their laws. Source: Medusa (2401.10774 §2.1); training is
train/objectives/medusa.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.drafter import Context
from specdec.heads import (
    Heads,
    HeadsConfig,
    config_of,
    last_state,
    saved_shape,
    shape_for,
    taps_for,
    vocabulary,
)
from specdec.sampling import Sampling
from specdec.search import grow
from specdec.target import Target
from specdec.tree import TokenTree

__all__ = ["Config", "config_of", "create", "from_config", "taps_for", "vocabulary"]


class Medusa(Heads):
    """The drafter."""

    def hidden(self, head: int, final: Tensor) -> Tensor:
        """What a head's output matrix reads: final [..., D] -> [..., D]."""
        return self.blocks[head](final.to(self.dtype))

    @torch.inference_mode()
    def propose(self, context: Context, sampling: Sampling, generator: torch.Generator | None) -> TokenTree:
        """A tree whose level d holds head d's guesses. Raises ValueError without features."""
        final = last_state(context)
        rows = torch.arange(len(final), device=final.device)
        laws: dict[int, Tensor] = {}

        def expand(tree: TokenTree, start: int) -> Tensor:
            depths = tree.depths()[:, start:]
            for head in range(int(depths.max()) + 1):
                if head not in laws:
                    laws[head] = self.output(head)(self.hidden(head, final))
            stacked = torch.stack([laws[head] for head in sorted(laws)], 1)  # [B, heads so far, V']
            return stacked[rows[:, None], depths]

        return grow(self.tree, context, expand, sampling, generator, self.draft_ids, self.shape.vocab_size)


MedusaConfig = Config = HeadsConfig  # Config is the name the pipeline looks for


def create(
    config: HeadsConfig,
    target: Target,
    counts: Tensor,
    generator: torch.Generator,  # noqa: ARG001
    texts: Sequence[Tensor] = (),  # noqa: ARG001
) -> Medusa:
    """New heads that all say what the target's own head says.

    counts [V]: how often each token occurs in the training texts; the draft vocabulary is the most frequent of them.
    texts: a few of them, ids [T], for a drafter whose beginning is measured.
    """
    drafter = Medusa(shape_for(config, target))
    drafter.begin(target, counts)
    return drafter.to(target.device)


def from_config(config: dict[str, Any], target: Target) -> Medusa:
    """An empty drafter of the saved shape. Raises UserError if it was made for a target of another shape."""
    shape, tree = saved_shape(config, target)
    drafter = Medusa(shape)
    drafter.tree = tree
    return drafter
