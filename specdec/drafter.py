"""The contract of a drafter, and the folder a trained one is kept in.

A drafter of kind X is the module specdec/drafters/X.py. There is no registry: the file name is the key.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdec import fast
from specdec.errors import UserError, nearest
from specdec.sampling import Sampling
from specdec.target import Tap, Target
from specdec.tree import TokenTree

WEIGHTS = "drafter.safetensors"
CONFIG = "config.json"


@dataclass(frozen=True)
class Context:
    """What is decided so far, for B rows.

    tokens: [B, P] ids, the pending token last; what lies past lengths is meaningless. lengths: [B], pending included.
    features: [B, F, S, D] of the positions the target has read since the last proposal, right-padded (None for a
    drafter without taps). counts: [B], how many of the F are real; they end at position lengths - 2.
    """

    tokens: Tensor
    lengths: Tensor
    features: Tensor | None
    counts: Tensor

    def pending(self) -> Tensor:
        """[B]: the newest token of each row."""
        return self.tokens.gather(1, (self.lengths - 1)[:, None])[:, 0]


class Drafter(Protocol):
    """Proposes trees. There is no commit: each proposal starts by bringing the drafter's state up to the context."""

    taps: tuple[Tap, ...]

    @property
    def nodes(self) -> int:
        """Most nodes a tree of this drafter has, root included."""
        ...

    def reset(self, rows: int, capacity: int) -> None:
        """Forget everything; `rows` new rows of at most `capacity` tokens follow."""

    def renew(self, rows: Tensor) -> None:
        """These rows hold other texts now; the next context has the features of all their positions."""

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only."""

    def propose(self, context: Context, sampling: Sampling, generator: torch.Generator | None) -> TokenTree:
        """The tree for this round. generator None: without chance, so that the tree carries no draft_probs."""
        ...


def kinds() -> list[str]:
    """The drafters there are: the modules in specdec/drafters."""
    import specdec.drafters as package

    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def drafter_module(kind: str) -> Any:
    """The module of a kind. Raises UserError for an unknown one."""
    if kind not in kinds():
        raise UserError(
            f"drafter kind '{kind}' does not exist; there are: {', '.join(kinds())}.{nearest(kind, kinds())}"
        )
    return importlib.import_module(f"specdec.drafters.{kind}")


def save_drafter(
    drafter: nn.Module, kind: str, config: dict[str, Any], folder: Path, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write weights (safetensors) and config.json into an existing folder. state: the weights, where they are not what
    state_dict() gives."""
    state = drafter.state_dict() if state is None else state
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(described(kind, config))


def described(kind: str, config: Mapping[str, Any]) -> str:
    """The text of config.json."""
    return json.dumps({"kind": kind, **config}, indent=2) + "\n"


def open_drafter(folder: str | Path, target: Target, dtype: torch.dtype | None = None) -> Any:
    """Open a folder that save_drafter wrote, on the target's device and in its dtype unless another is given.

    Raises UserError when it is not such a folder or was made for another target.
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder} is not a drafter folder: it has no {name}")
    try:
        config = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise UserError(f"{folder / CONFIG} is not JSON: {error}") from error
    if "kind" not in config:
        raise UserError(f"{folder / CONFIG} names no drafter kind: it is not a folder that training saved")
    module = drafter_module(config.pop("kind"))
    drafter = module.from_config(config, target)
    state = load_file(folder / WEIGHTS)
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if expected != found:
        wrong = sorted(set(expected.items()) ^ set(found.items()))[0][0]
        raise UserError(f"{folder / WEIGHTS}: tensor '{wrong}' is missing, unknown or of another shape")
    drafter.load_state_dict(state)
    drafter = drafter.to(device=target.device, dtype=dtype or target.model.dtype).eval()
    fast.pack(drafter, target.fast_mode, target.packing)
    return drafter
