"""Where a run's numbers go: metrics.jsonl always, a progress bar, and Weights & Biases when asked."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.artifact import write_text
from specdec.errors import UserError

WANDB = ("off", "offline", "online")


@dataclass(frozen=True)
class LogConfig:
    """conf/config.yaml, `log`."""

    wandb: str = "off"
    """off, offline (files under the run folder, nothing is sent) or online."""
    project: str = "headstart"
    """Weights & Biases project."""
    every: int = 10
    """Steps between training records."""

    def __post_init__(self) -> None:
        if self.wandb not in WANDB:
            raise UserError(f"log.wandb: '{self.wandb}' is not one of {', '.join(WANDB)}")
        if self.every < 1:
            raise UserError(f"log.every must be 1 or more, got {self.every}")


class Log:
    """One run's record. Lines of a stage that is resumed from an earlier step are dropped, not doubled."""

    def __init__(self, config: LogConfig, folder: Path, name: str) -> None:
        self.path = folder / "metrics.jsonl"
        self.every = config.every
        self._wandb = _start_wandb(config, folder, name) if config.wandb != "off" else None

    def rewind(self, stage: str, step: int) -> None:
        """Forget this stage's records from `step` on: they are about to be made again."""
        if self.path.is_file():
            kept = []
            for line in self.path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # a last line that was cut off
                    entry = json.loads(line)
                    if entry.get("stage") != stage or entry.get("step", 0) <= step:
                        kept.append(json.dumps(entry) + "\n")
            write_text(self.path, "".join(kept))

    def record(self, stage: str, values: Mapping[str, float], step: int | None = None) -> None:
        entry: dict[str, Any] = {"stage": stage, **({} if step is None else {"step": step}), **values}
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if self._wandb is not None:
            self._wandb.log({f"{stage}/{key}": value for key, value in entry.items() if key != "stage"})

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()


def say(text: str = "") -> None:
    """A line for the user; through tqdm, so that it does not tear a progress bar."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def bar(label: str, total: int | None, unit: str, start: int = 0) -> tqdm:
    """A progress bar with rate and time left; on a log file one line every half minute."""
    interactive = sys.stderr.isatty()
    return tqdm(
        desc=label,
        total=total,
        initial=start,
        unit=unit,
        unit_scale=unit == "B",
        mininterval=0.5 if interactive else 30,
        dynamic_ncols=interactive,
        ncols=None if interactive else 100,
        file=sys.stderr,
    )


def _start_wandb(config: LogConfig, folder: Path, name: str) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UserError("log.wandb needs the package: .venv/bin/pip install -e '.[wandb]'") from error
    return wandb.init(project=config.project, name=name, dir=str(folder), mode=config.wandb)
