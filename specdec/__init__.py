"""Lossless speculative decoding and the drafters for it.

What a user keeps after training. Imports torch, transformers and safetensors and nothing heavier.
"""

from specdec.controller import adaptive
from specdec.decode import Generation, Round, Step, generate, stream
from specdec.drafter import open_drafter
from specdec.errors import UserError
from specdec.load import TargetConfig, load_target
from specdec.paths import best_paths
from specdec.planned import measure
from specdec.sampling import Sampling
from specdec.search import TreeConfig
from specdec.stopping import Limits
from specdec.target import Target
from specdec.tree import TokenTree

__all__ = [
    "Generation",
    "Limits",
    "Round",
    "Sampling",
    "Step",
    "Target",
    "TargetConfig",
    "TokenTree",
    "TreeConfig",
    "UserError",
    "adaptive",
    "best_paths",
    "generate",
    "load_target",
    "measure",
    "open_drafter",
    "stream",
]
