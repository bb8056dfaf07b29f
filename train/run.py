"""One run: its folder, its log, its target, and what each stage is made from (the fingerprints)."""

from __future__ import annotations

import functools
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import torch

from data.artifact import Stage, claim, fingerprint, finished_as, forget, open_stage, plan_of, stale, write_text
from data.chat import Template, tokenizer_hash
from data.prepare import open_sources
from specdec.drafter import drafter_module, open_drafter
from specdec.errors import UserError
from specdec.load import TextSide, load_target, load_text_side
from specdec.source import content, resolve
from specdec.target import Tap, Target
from train.config import STAGES, RunConfig
from train.log import Log, say

TUNED = "target"
"""Folder in a checkpoint: the target that was tuned with the drafter."""
REUSED = ("prepare", "distill", "capture")
DEPENDS: dict[str, tuple[str, ...]] = {
    "prepare": (),
    "distill": ("prepare",),
    "capture": ("distill",),
    "fit": ("distill", "capture"),
    "evaluate": ("fit",),
    "export": ("fit",),
}


class Run:
    """What the stages share: the configuration, the log and, once needed, the target."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._tuned: Target | None = None

    @functools.cached_property
    def log(self) -> Log:
        """Begun with the first stage that may write here."""
        write_text(self.config.out / "config.yaml", self.config.text)
        return Log(self.config.log, self.config.out, self.config.out.name)

    @functools.cached_property
    def _claim(self) -> IO[str]:
        return claim(self.config.out)

    def close(self) -> None:
        if "_claim" in vars(self):
            self._claim.close()
        if "log" in vars(self):
            self.log.close()

    @functools.cached_property
    def target(self) -> Target:
        start = time.monotonic()
        target = load_target(self.config.target, say)
        say(f"target {target.name}: {target.layers} layers, loaded in {time.monotonic() - start:.1f} s")
        return target

    def target_to_train(self) -> Target:
        """The target as it is trained: its weights are read as they are, not packed."""
        self.forget_target()
        self.target = load_target(replace(self.config.target, fast="off"), say)
        return self.target

    def forget_target(self) -> None:
        """Load it again when it is needed next."""
        vars(self).pop("target", None)

    def deployed(self, fitted: Stage) -> Target:
        """The target that the drafter was trained for: the tuned one where the fit tuned it."""
        config = self.config.target
        if config.train == "frozen":
            return self.target
        if self._tuned is None:
            self.forget_target()
            folder = fitted.folder / fitted.counts["checkpoint"] / TUNED
            self._tuned = load_target(replace(config, source=str(folder), name=f"{config.name}-tuned"), say)
        return self._tuned

    @functools.cached_property
    def text_side(self) -> Target | TextSide:
        """The target's tokenizer and sizes, without its weights where they are not needed yet."""
        return self.target if "target" in vars(self) else load_text_side(self.config.target, say)

    @functools.cached_property
    def template(self) -> Template:
        data = self.config.data
        return Template(self.text_side.tokenizer, data.chat_template, data.system)

    # -- what each stage is made from --------------------------------------------------------------------------

    @functools.cached_property
    def _content(self) -> list[str]:
        """Hashes of what the sources hold."""
        return [source.content() for sources in open_sources(self.config.data) for source in sources]

    @property
    def recorded(self) -> bool:
        return self.config.distill.backend == "recorded"

    def _settings(self, name: str) -> dict[str, Any]:
        config = self.config
        fast = {"target.fast": config.target.fast}  # it rounds in another order
        if name == "prepare":
            tokenizer = tokenizer_hash(self.text_side.tokenizer)
            return {
                "data": asdict(config.data) | {"content": self._content, "recorded": self.recorded},
                "target": {"source": config.target.source, "dtype": config.target.dtype, "tokenizer": tokenizer},
            }
        if name == "distill":
            return {"distill": self._made(), "seed": config.seed, "target.weights": self._weights}
        if name == "capture":
            taps = {"drafter.kind": config.kind, "drafter.model.taps": asdict(config.model).get("taps")}
            kept = asdict(config.capture) | {"verify": None, "batch_size": None}  # they change nothing in what is kept
            own = {"capture": kept, **taps, **fast} if config.capture.enabled else {"capture": None}
            return own | {"target.weights": self._weights}
        if name == "fit":
            drafter = {"kind": config.kind, "model": asdict(config.model), "objective": asdict(config.objective)}
            joint = None if config.target.train == "frozen" else asdict(config.joint)
            tuned = {"target.train": config.target.train, "joint": joint}
            return {"fit": asdict(config.fit), "drafter": drafter, "seed": config.seed, **tuned, **fast}
        if name == "evaluate":
            return {"eval": asdict(config.eval), "drafter.tree": asdict(config.tree), **fast}
        return {"export": asdict(config.export)}

    def _made(self) -> dict[str, Any]:
        """What of the settings changes the answers or what is kept with them."""
        config, made = self.config, asdict(self.config.distill)
        made["server"] = config.distill.server.model if config.distill.backend == "openai" else None
        if config.distill.backend != "local":
            return made | {"features": None, "features_gb": None, "batch_size": None}
        made["target.fast"] = config.target.fast
        if config.distill.features and not config.capture.enabled:
            made["taps"] = [config.kind, asdict(config.model).get("taps")]
        else:
            made["features"] = made["features_gb"] = None
        return made

    @functools.cached_property
    def _weights(self) -> str:
        """Of the target: other weights write other answers."""
        return content(resolve(self.config.target.source, Path(self.config.target.cache), say))

    def _inputs(self, name: str) -> dict[str, str]:
        return {one: fingerprint(plan_of(self._settings(one), self._inputs(one))) for one in DEPENDS[name]}

    def folder(self, name: str) -> Path:
        """Where a stage is: here, or in a run of `reuse` that finished the same."""
        own = self.config.out / name / self.config.eval.name if name == "evaluate" else self.config.out / name
        if name in REUSED and name not in self.config.redo and not (own / "manifest.json").is_file():
            plan = plan_of(self._settings(name), self._inputs(name))
            for other in self.config.reuse:
                if finished_as(Path(other) / name, plan):
                    return Path(other) / name
        return own

    def open(self, name: str) -> Stage:
        """Begin, continue or skip a stage; with redo, what is there goes first, and all that was made from it."""
        folder, settings, inputs = self.folder(name), self._settings(name), self._inputs(name)
        _ = self._claim
        if name in self.config.redo and stale(folder, settings, inputs):
            _ = self.target  # a target that cannot be loaded must not cost what is there
            forget(folder)
            for later in STAGES:
                if name in _ancestors(later):
                    forget(self.config.out / later)
        stage = open_stage(folder, name, settings, inputs, pieces=name != "prepare")
        _ = self.log
        return stage

    def need(self, name: str) -> Stage:
        """A stage made before. Raises UserError when it is not finished or of other settings."""
        folder = self.folder(name)
        if not (folder / "manifest.json").is_file():
            raise UserError(f"stage {name} is not finished in {self.config.out}; add it to stages")
        return open_stage(folder, name, self._settings(name), self._inputs(name))

    # -- small parts -------------------------------------------------------------------------------------------

    def taps(self) -> tuple[Tap, ...]:
        module = drafter_module(self.config.kind)
        return (*module.taps_for(self.config.model, self.target), "final")

    def drafter(self, fitted: Stage, dtype: torch.dtype | None = None) -> Any:
        drafter = open_drafter(fitted.folder / fitted.counts["checkpoint"], self.deployed(fitted), dtype)
        # A tree measured by the fit stays, where it is of the kind asked for.
        if not self.config.tree.unmeasured or replace(drafter.tree, paths=[]) != self.config.tree:
            drafter.tree = self.config.tree
        return drafter

    def own_domains(self) -> list[str]:
        return sorted(self.need("prepare").counts["domains"])

    def skip(self, stage: Stage) -> bool:
        if stage.finished:
            say(f"{stage.kind:9} finished before, reused ({in_words(stage)})")
        return stage.finished


def _ancestors(name: str) -> set[str]:
    return {one for parent in DEPENDS[name] for one in (parent, *_ancestors(parent))}


def in_words(stage: Stage) -> str:
    plain = {key: value for key, value in stage.counts.items() if not isinstance(value, dict)}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in plain.items())
