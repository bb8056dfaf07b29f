"""Whether two decodes gave the same tokens, where they part if not, and whether that is a near tie or an error.

In fp32 and fp64 greedy output must be identical. In bf16 reading several tokens at once rounds differently from reading
one, so texts may part where the two best logits are closer than that rounding; the gap there tells the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.target import Target


@dataclass(frozen=True)
class Divergence:
    """The first token that differs. gap: how far apart the two logits are when the text before is read alone."""

    position: int
    expected: int | None
    found: int | None
    gap: float

    def near_tie(self, tolerance: float) -> bool:
        """Whether rounding of this size explains it."""
        return self.gap <= tolerance


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs (the shorter's end counts as one); None when identical."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def divergence(
    target: Target, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]
) -> Divergence | None:
    """Compare two answers to a prompt; None when they are the same.

    The gap is infinite where one answer ended earlier without having differed.
    """
    at = first_difference(expected, found)
    if at is None:
        return None
    one = expected[at] if at < len(expected) else None
    two = found[at] if at < len(found) else None
    gap = float("inf")
    if one is not None and two is not None:
        logits = target.start([[*prompt, *expected[:at]]], 1).logits[0, 0].float()
        gap = float((logits[one] - logits[two]).abs())
    return Divergence(at, one, two, gap)
