"""A smaller causal LM of the same tokenizer as the drafter (2211.17192), chains and trees.

It keeps its own cache of the text. A round first reads the tokens decided since the last one, the pending token among
them, in one pass; guesses are read behind them and forgotten. One that is trained: specdec/drafters/draft_model.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec.drafter import Context
from specdec.errors import UserError
from specdec.sampling import Sampling
from specdec.search import TreeConfig, grow
from specdec.target import Tap, Target
from specdec.tree import PAD, Paths, TokenTree


class DraftModel(nn.Module):
    """`model` drafts for a target, as it is; nothing of it is trained or saved.

    Vocabularies padded to different sizes are fine: ids past the smaller one are never proposed and read as its last.
    Raises UserError when both have tokenizers and they differ.
    """

    taps: tuple[Tap, ...] = ()

    def __init__(self, model: Target, target: Target, tree: TreeConfig | None = None) -> None:
        super().__init__()
        if model is target:
            raise ValueError("a target that drafts for itself needs a second Target around the model: each has a cache")
        _same_tokenizer(model.tokenizer, target.tokenizer, model.name)
        self.model = model
        self.vocab_size = target.vocab_size
        self.shared = min(model.vocab_size, target.vocab_size)
        self.tree = tree or TreeConfig()
        self._capacity = 0
        self._fresh = True
        self._renewed = torch.zeros(0, dtype=torch.bool)

    def ids(self) -> Tensor | None:
        """Target ids of the columns of the model's logits; None where they are the first `shared`."""
        return None

    @property
    def nodes(self) -> int:
        return self.tree.most_nodes

    def reset(self, rows: int, capacity: int) -> None:
        self._fresh = True
        self._renewed = torch.zeros(rows, dtype=torch.bool, device=self.model.device)
        self._capacity = capacity + self.tree.most_slots

    def renew(self, rows: Tensor) -> None:
        self._renewed[rows] = True

    def select(self, rows: Tensor) -> None:
        self._renewed = self._renewed[rows]
        if not self._fresh and len(rows):
            self.model.select(rows)

    @torch.inference_mode()
    def propose(self, context: Context, sampling: Sampling, generator: torch.Generator | None) -> TokenTree:
        if int(context.lengths.max()) + self.tree.longest >= self.model.window:
            return TokenTree.chain(context.pending()[:, None])  # the text has outgrown the draft model
        first = self._catch_up(context)

        def expand(tree: TokenTree, start: int) -> Tensor:
            if start == 0:
                return first
            inside = TokenTree(self._known(tree.tokens), tree.parents)
            return self.model.read(inside, start).logits[..., : self.shared]

        return grow(self.tree, context, expand, sampling, generator, self.ids(), self.vocab_size)

    def _known(self, tokens: Tensor) -> Tensor:
        return tokens.clamp(max=self.model.vocab_size - 1)

    def _catch_up(self, context: Context) -> Tensor:
        """Read what was decided since the last round, pending token included; its logits [B, 1, V'].

        Afterwards the pending token's keys lie in the slot behind the model's length: the root of the tree to come.
        """
        model, lengths = self.model, context.lengths
        tokens = self._known(context.tokens)
        rows = torch.arange(len(lengths), device=lengths.device)

        def text_of(row: int) -> list[int]:
            return tokens[row, : int(lengths[row]) - 1].tolist()

        if self._fresh:
            texts = [text_of(row) for row in rows.tolist()]
            model.start(texts, self._capacity - min(map(len, texts)), later=None)
        elif int(model.lengths.max() + (lengths - model.lengths).max()) > self._capacity:
            # One row far behind, another near the end: catching up would not fit, so the first is read afresh.
            self._renewed |= (lengths - model.lengths) > self.tree.most_slots
        if bool(self._renewed.any()) and not self._fresh:
            again = self._renewed.nonzero()[:, 0]
            model.admit(again, [text_of(row) for row in again.tolist()])
        self._fresh, self._renewed = False, torch.zeros_like(self._renewed)
        new = lengths - model.lengths
        at = model.lengths[:, None] + torch.arange(int(new.max()), device=lengths.device)
        chain = TokenTree.chain(tokens.gather(1, at.clamp(max=tokens.shape[1] - 1)))
        real = torch.arange(chain.nodes, device=lengths.device) < new[:, None]
        reading = model.read(TokenTree(chain.tokens, chain.parents.masked_fill(~real, PAD)))
        model.keep(Paths(torch.arange(chain.nodes, device=lengths.device).expand_as(chain.tokens), new - 1))
        return reading.logits[rows, new - 1][:, None, : self.shared]


def _same_tokenizer(own: Any, other: Any, name: str) -> None:
    if own is other or own is None or other is None:
        return
    if own.get_vocab() != other.get_vocab():
        raise UserError(
            f"draft model {name} has another tokenizer than the target; its guesses would be other texts. "
            "Use a model of the same family"
        )
