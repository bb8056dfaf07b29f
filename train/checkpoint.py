"""Checkpoints of a fit: step-000500/ with the drafter as it would be used and all that resuming needs.

drafter.safetensors and config.json hold the averaged weights, adapters merged; training.safetensors what is trained,
raw and averaged, with the optimiser's moments; state.json how far the fit is. A folder appears whole, by rename, and
holds no pickle.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdec.drafter import save_drafter
from specdec.errors import UserError
from train.optim import MOMENTS, Average, Optimizers

TRAINING = "training.safetensors"
STATE = "state.json"


@dataclass(frozen=True)
class Progress:
    """How far a fit is.

    step: steps done. tokens, supervised: positions read and positions that counted, with repeats. seconds: of training,
    evaluations apart. best_step, best: the evaluation with the best score so far and that score. stale: evaluations
    since. stopped: why the fit ended early.
    """

    step: int = 0
    tokens: int = 0
    supervised: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best: float | None = None
    stale: int = 0
    stopped: str | None = None


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def save(
    folder: Path,
    progress: Progress,
    kind: str,
    config: dict[str, Any],
    drafter: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    average: Average,
    optimizer: Optimizers,
    state: Callable[[], Mapping[str, Tensor]] | None = None,
) -> Path:
    """Write step-NNNNNN under `folder`; of the older ones only that of the best evaluation stays.

    parameters: what is trained, by name. state: gives the drafter's tensors where they are not its own state_dict
    (adapters are merged).
    """
    path = path_of(folder, progress.step)
    working = folder / f".{path.name}.partial"
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    tensors = {}
    for name, parameter in parameters.items():
        tensors[f"weight.{name}"], tensors[f"average.{name}"] = parameter.detach(), average.values[name]
        tensors |= {f"{key}.{name}": value for key, value in optimizer.moments(parameter).items()}
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, working / TRAINING)
    with averaged(parameters, average):
        save_drafter(drafter, kind, config, working, state() if state else None)
    (working / STATE).write_text(json.dumps(dataclasses.asdict(progress)) + "\n")
    shutil.rmtree(path, ignore_errors=True)
    os.replace(working, path)
    kept = {path} | ({path_of(folder, progress.best_step)} if progress.best_step is not None else set())
    for old in folder.glob("step-*"):
        if old not in kept:
            shutil.rmtree(old)
    return path


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    found = sorted(path for path in folder.glob("step-*") if (path / STATE).is_file())
    return found[-1] if found else None


def progress_of(path: Path) -> Progress:
    return Progress(**json.loads((path / STATE).read_text()))


def restore(path: Path, parameters: Mapping[str, nn.Parameter], average: Average, optimizer: Optimizers) -> Progress:
    """Load everything that is trained, and return how far it was. Raises UserError for another fit's checkpoint."""
    tensors = load_file(path / TRAINING)
    if missing := [name for name in parameters if f"weight.{name}" not in tensors]:
        raise UserError(f"{path / TRAINING} has no '{missing[0]}': it was saved by another fit. Use another out=FOLDER")
    average.load({name: tensors[f"average.{name}"] for name in parameters})
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"weight.{name}"])
            optimizer.load(parameter, _moments(tensors, name, parameter))
    return progress_of(path)


def load_averaged(path: Path, parameters: Mapping[str, nn.Parameter]) -> None:
    """Give what is trained the averaged weights of a checkpoint."""
    tensors = load_file(path / TRAINING)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"average.{name}"])


def _moments(tensors: Mapping[str, Tensor], name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
    found = {key: tensors[f"{key}.{name}"] for key in MOMENTS if f"{key}.{name}" in tensors}
    return {key: value.to(parameter.device) for key, value in found.items()}


class averaged:
    """Within this context what is trained has the averaged weights."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], average: Average) -> None:
        self.parameters, self.average = parameters, average

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            held = parameter.detach().clone()
            parameter.copy_(self.average.values[name])
            self.average.values[name].copy_(held)
