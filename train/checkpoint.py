"""Checkpoints of a fit: step-000500/ with the drafter as it would be used and all that resuming needs.

drafter.safetensors and config.json hold the averaged weights; training.safetensors the raw weights and the optimiser's
moments; state.json the step. A folder appears whole, by rename; no pickle anywhere.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdec.drafter import save_drafter
from train.optim import MOMENTS, Average, Optimizers

TRAINING = "training.safetensors"
STATE = "state.json"


def save(
    folder: Path,
    step: int,
    kind: str,
    config: dict[str, Any],
    drafter: nn.Module,
    average: Average,
    optimizer: Optimizers,
    keep: int = 1,
) -> Path:
    """Write step-NNNNNN under `folder` and remove older ones beyond `keep`."""
    path = folder / f"step-{step:06d}"
    working = folder / f".{path.name}.partial"
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    parameters = dict(drafter.named_parameters())
    tensors = {f"weight.{name}": p.detach().cpu() for name, p in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.moments(parameter).items():
            tensors[f"{key}.{name}"] = value.detach().cpu()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, working / TRAINING)
    with averaged(drafter, average):
        save_drafter(drafter, kind, config, working)
    (working / STATE).write_text(json.dumps({"step": step}) + "\n")
    shutil.rmtree(path, ignore_errors=True)
    os.replace(working, path)
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old)
    return path


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    found = sorted(path for path in folder.glob("step-*") if (path / STATE).is_file())
    return found[-1] if found else None


def restore(path: Path, drafter: nn.Module, average: Average, optimizer: Optimizers) -> int:
    """Load everything and return the step to go on from."""
    tensors = load_file(path / TRAINING)
    parameters = dict(drafter.named_parameters())
    saved = load_file(path / "drafter.safetensors")
    average.load({name: saved[name] for name in parameters})
    drafter.load_state_dict(saved)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"weight.{name}"])
            optimizer.load(parameter, _moments(tensors, name, parameter))
    return json.loads((path / STATE).read_text())["step"]


def _moments(tensors: Mapping[str, Tensor], name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
    found = {key: tensors[f"{key}.{name}"] for key in MOMENTS if f"{key}.{name}" in tensors}
    return {key: value.to(parameter.device) for key, value in found.items()}


class averaged:
    """Within this context the drafter has the averaged weights."""

    def __init__(self, drafter: nn.Module, average: Average) -> None:
        self.parameters, self.average = dict(drafter.named_parameters()), average

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
