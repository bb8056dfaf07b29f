"""Counts behind the reduced draft vocabulary, and how much of each domain it covers.

Counted anew from the texts at hand in every fit, which belongs to one tokenizer, one set of texts and one size by its
fingerprint: there is no map on disk that could be taken for another's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data.texts import Text


def count_tokens(texts: list[Text], vocab_size: int) -> dict[str, Tensor]:
    """How often each token is to be predicted, by domain: {domain: [V] fp64}."""
    counts: dict[str, Tensor] = {}
    for text in texts:
        own = counts.setdefault(text.domain, torch.zeros(vocab_size, dtype=torch.float64))
        own += torch.bincount(text.tokens[text.mask()], minlength=vocab_size)
    return counts


def ranking(texts: list[Text], counts: dict[str, Tensor], vocab_size: int) -> Tensor:
    """[V]: what the vocabulary is chosen by. Between tokens of equal count those of the prompts go first: an answer may
    quote them."""
    total = torch.stack(list(counts.values())).sum(0)
    quoted = torch.zeros(vocab_size, dtype=torch.float64)
    for text in texts:
        quoted += torch.bincount(text.tokens, minlength=vocab_size)
    return total + quoted / (quoted.sum() + 1)


def coverage(ids: Tensor, counts: dict[str, Tensor]) -> dict[str, float]:
    """Share of the tokens to predict that can be proposed, by domain: no drafter accepts more."""
    return {domain: float(own[ids.cpu()].sum() / own.sum().clamp(min=1)) for domain, own in sorted(counts.items())}
