"""A stage's folder: when it is finished, when it may be continued, when it belongs to other settings.

plan.json is written when a stage begins and holds its settings and the fingerprints of its inputs; manifest.json is
written last, by rename. No manifest: not finished. Another plan: refused, naming the key that changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from specdec.errors import UserError

PLAN = "plan.json"
MANIFEST = "manifest.json"
PACKAGES = ("headstart", "torch", "transformers", "datasets", "safetensors", "numpy")


@dataclass(frozen=True)
class Stage:
    """One stage's folder. finished: nothing is left to do; otherwise whole pieces of an earlier run may be there."""

    folder: Path
    kind: str
    plan: dict[str, Any]
    finished: bool

    @property
    def counts(self) -> dict[str, Any]:
        """What a finished stage recorded."""
        return read_json(self.folder / MANIFEST)["counts"]

    def finish(self, counts: Mapping[str, Any]) -> None:
        """Write the manifest: from now on the stage is finished."""
        record = {
            "kind": self.kind,
            "fingerprint": fingerprint(self.plan),
            **self.plan,
            "counts": dict(counts),
            "versions": versions(),
        }
        write_text(self.folder / MANIFEST, json.dumps(record, indent=2) + "\n")


def fingerprint(value: Any) -> str:
    """16 hex digits over the canonical JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def open_stage(
    folder: Path, kind: str, config: Mapping[str, Any], inputs: Mapping[str, str], pieces: bool = True
) -> Stage:
    """Begin, continue or skip a stage. pieces: an unfinished one holds pieces worth keeping.

    Raises UserError when the folder holds the same stage made with other settings or from other inputs.
    """
    plan = plan_of(config, inputs)
    before = _read_plan(folder)
    if before is None and folder.is_dir() and not _empty(folder):
        raise UserError(f"{folder} holds files that no run made; move them away, or use another out=FOLDER")
    begun = pieces or (folder / MANIFEST).is_file()
    if before is not None and before != plan and begun and not _empty(folder):
        raise UserError(
            f"{folder} was made with {_difference(before, plan, kind)}. Use another out=FOLDER, or redo=[{kind}] "
            "to make this stage and those after it again"
        )
    if before != plan:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / PLAN, json.dumps(plan, indent=2) + "\n")
    return Stage(folder, kind, plan, (folder / MANIFEST).is_file())


def claim(folder: Path) -> IO[str]:
    """Keep other processes out of a run folder for as long as the returned file is open.

    Raises UserError where one is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise UserError(f"{folder} is in use by another process; wait for it, or use another out=FOLDER") from error
    return file


def stale(folder: Path, config: Mapping[str, Any], inputs: Mapping[str, str]) -> bool:
    """Whether making this stage again means removing what is there: it is finished, or of other settings."""
    before = _read_plan(folder)
    return before is not None and (before != plan_of(config, inputs) or (folder / MANIFEST).is_file())


def finished_as(folder: Path, plan: Mapping[str, Any]) -> bool:
    """Whether a folder holds this stage, finished by exactly this plan."""
    return (folder / MANIFEST).is_file() and _read_plan(folder) == plan


def forget(folder: Path) -> None:
    """Remove a stage's folder. It is renamed first: a removal that is interrupted leaves nothing that looks whole."""
    if folder.exists():
        trash = Path(tempfile.mkdtemp(prefix=f".{folder.name}.trash-", dir=folder.parent))
        folder.rename(trash / folder.name)
        shutil.rmtree(trash, ignore_errors=True)


def plan_of(config: Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, Any]:
    """What a stage is made from, as plan.json holds it; its fingerprint() identifies the result."""
    return json.loads(json.dumps({"config": dict(config), "inputs": dict(inputs)}, default=str))


def _read_plan(folder: Path) -> dict[str, Any] | None:
    path = folder / PLAN
    return read_json(path) if path.is_file() else None


def read_json(path: Path) -> Any:
    """A file that this program wrote. Raises UserError where it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove {path.parent} to make it again") from error


def _empty(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} <= {PLAN, f".{PLAN}.partial"}


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_by(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_by(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` on a temporary name beside `path`, then rename."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Python and the packages a result depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _difference(before: Any, after: Any, kind: str) -> str:
    old, new = _flat(before), _flat(after)
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key, "absent") != new.get(key, "absent"))
    # A changed input only says that an earlier stage differs; a changed setting says which, so it comes first.
    changed.sort(key=lambda key: key.startswith("inputs"))
    key = changed[0]
    name = key.removeprefix("config.")
    if name == "data.content":
        return f"other rows in its data files than there are now (stage {kind})"
    if key.startswith("inputs."):
        return f"another {key.removeprefix('inputs.')} than there is now (stage {kind})"
    return f"{name} = {old.get(key, 'nothing')}, now {new.get(key, 'nothing')} (stage {kind})"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): value}
