"""Lossless speculative decoding and the drafters for it.

What a user keeps after training. Imports torch, transformers and safetensors and nothing heavier.
"""

from specdec.decode import Generation, Limits, Round, generate
from specdec.drafter import open_drafter
from specdec.errors import UserError
from specdec.load import TargetConfig, load_target
from specdec.sampling import Sampling
from specdec.target import Target
from specdec.tree import TokenTree

__all__ = [
    "Generation",
    "Limits",
    "Round",
    "Sampling",
    "Target",
    "TargetConfig",
    "TokenTree",
    "UserError",
    "generate",
    "load_target",
    "open_drafter",
]
