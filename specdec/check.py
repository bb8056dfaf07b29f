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
    text = [1 % target.vocab_size, 2 % target.vocab_size, 3 % target.vocab_size]
    with torch.inference_mode():
        with target.stock() as model:
            expected = model(input_ids=torch.tensor([text], device=target.device), use_cache=False).logits[0]
        start = target.start([text[:1]], 2).logits[0]
        tree = torch.tensor([text[1:]], device=target.device)
        found = torch.cat([start, target.read(TokenTree.chain(tree)).logits[0]])
    loose = target.model.dtype in (torch.bfloat16, torch.float16)
    if not torch.allclose(found.float(), expected.float(), rtol=1e-3, atol=0.5 if loose else 1e-3):
        raise UserError(
            f"target {target.name} ({type(target.model).__name__}): read in pieces it scores differently from read "
            "whole (scaled or soft-capped logits, or an unknown kind of attention): decoding would not be exact"
        )
