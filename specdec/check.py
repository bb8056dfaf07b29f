"""The check that a target is made to pass when it is opened: read in pieces it scores as the model itself does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specdec.errors import UserError
from specdec.tree import TokenTree

if TYPE_CHECKING:
    from specdec.target import Target


def check_exact(target: Target) -> None:
    """Our attention, masks, packed weights and stored states must score as the model itself does; raises UserError if
    they do not.

    This is what catches scaled or capped logits, attention sinks, unusual positions: whatever we do not know about.
    """
    # Real words: after meaningless ids the scores of a half-precision model are mostly noise.
    words = target.tokenizer("The cat sat on the mat.")["input_ids"] if target.tokenizer is not None else []
    text = [token % target.vocab_size for token in (words[:8] if len(words) > 2 else [1, 2, 3])]
    with torch.inference_mode():
        with target.stock() as model:
            expected = model(input_ids=torch.tensor([text], device=target.device), use_cache=False).logits[0]
        start = target.start([text[:1]], 2).logits[0]
        tree = torch.tensor([text[1:]], device=target.device)
        found = torch.cat([start, target.read(TokenTree.chain(tree)).logits[0]])
    found, expected = found.float(), expected.float()
    allowed = 1e-3 + 1e-3 * expected.abs()
    if target.model.dtype in (torch.bfloat16, torch.float16):
        # Two kernels of the same model differ by up to a quarter of the scores' spread (SmolLM2-135M in bfloat16).
        allowed = allowed + 0.5 * expected.std(-1, keepdim=True).clamp(min=1.0)
    if not bool(((found - expected).abs() <= allowed).all()):
        raise UserError(
            f"target {target.name} ({type(target.model).__name__}): read in pieces it scores differently from read "
            "whole (scaled or soft-capped logits, or an unknown kind of attention): decoding would not be exact"
        )
