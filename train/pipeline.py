"""prepare -> distill -> fit -> evaluate -> export: each stage a folder, run, continued or skipped.

A stage reads the folders before it and its own part of the configuration, never another stage's memory. The target is
loaded when the first stage needs it, so a finished run says so at once.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data.artifact import Stage, fingerprint, forget, open_stage, plan_of, stale, write_text
from data.batches import Batch, batches
from data.distill import Text, distill, read_texts
from data.prepare import load_prompts, prepare, read_rows
from eval.evaluate import choose, evaluate, settle
from eval.report import as_text, summarise, table, verdict, write_report
from specdec import fast
from specdec.drafter import drafter_module, open_drafter
from specdec.errors import UserError
from specdec.export import eagle3
from specdec.load import load_target
from specdec.source import locate
from specdec.target import Tap, Target
from train import checkpoint
from train.config import STAGES, RunConfig, objective_module
from train.facts import run_facts
from train.log import Log, bar, say
from train.loop import fit

DEPENDS: dict[str, tuple[str, ...]] = {"prepare": (), "distill": ("prepare",), "fit": ("distill",)} | {
    "evaluate": ("fit",),
    "export": ("fit",),
}


def run_pipeline(config: RunConfig) -> None:
    """Run the stages asked for. Raises UserError; an interrupt leaves every finished piece in place."""
    started = time.monotonic()
    load_prompts(config.data)  # a mistake in the prompts shows before anything is loaded or written
    locate(config.target.source)
    run = Run(config)
    say(f"run {config.out}")
    try:
        for name in STAGES:
            if name in config.stages:
                getattr(run, name)()
    finally:
        run.close()
    say(f"done in {(time.monotonic() - started) / 60:.1f} min; everything is in {config.out}")


class Run:
    """One run folder and what its stages share: the configuration, the log and, once needed, the target."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @functools.cached_property
    def log(self) -> Log:
        """Begun with the first stage that may write here."""
        write_text(self.config.out / "config.yaml", self.config.text)
        return Log(self.config.log, self.config.out, self.config.out.name)

    def close(self) -> None:
        if "log" in vars(self):
            self.log.close()

    @functools.cached_property
    def target(self) -> Target:
        start = time.monotonic()
        target = load_target(self.config.target, say)
        say(f"target {target.name}: {target.layers} layers, loaded in {time.monotonic() - start:.1f} s")
        return target

    # -- stages ------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        stage = self._open("prepare")
        if not self._skip(stage):
            prepare(self.config.data, self.target.tokenizer, self.target.window, stage)
            say(f"prepare   {_counts(stage)}")

    def distill(self) -> None:
        rows = read_rows(self._need("prepare").folder, "train")
        stage = self._open("distill")
        if self._skip(stage):
            return
        self.log.rewind("distill", -1)
        total = len(rows) * len(self.config.distill.temperatures)
        start = last = time.monotonic()
        with bar("distill", total, "answer") as progress:

            def show(answered: int, _: int, tokens: int) -> None:
                nonlocal last
                now = time.monotonic()
                progress.set_postfix_str(f"{tokens} tokens", refresh=False)
                progress.update(answered - progress.n)
                if now - last > 5 or answered == total:
                    last = now
                    self.log.record("distill", {"answers": answered, "tokens": tokens, "seconds": now - start})

            distill(self.config.distill, self.target, rows, self._taps(), self.config.seed, stage, show)
        say(f"distill   {_counts(stage)}")

    def fit(self) -> None:
        source = self._need("distill").folder
        stage = self._open("fit")
        if self._skip(stage):
            return
        config, target = self.config, self.target
        texts = read_texts(source)
        steps = config.fit.steps(len(texts))
        generator = torch.Generator().manual_seed(config.seed)
        module = drafter_module(config.kind)
        drafter = module.create(config.model, target, _token_counts(texts, target.vocab_size), generator)
        drafter.tree = config.tree
        if target.fast_mode != "off":
            fast.train_fast(drafter)
        objective = objective_module(config.kind).Objective(config.objective, drafter, target)
        torch.set_flush_denormal(True)  # tiny gradients slow a CPU's backward pass twofold
        resume = checkpoint.latest(stage.folder)
        first = int(resume.name.removeprefix("step-")) if resume else 0
        self.log.rewind("fit", first)
        parameters = sum(p.numel() for p in drafter.parameters())
        say(
            f"fit       {parameters / 1e6:.1f}M parameters, {len(texts)} texts, {steps} steps"
            + f" from {first}" * bool(first)
        )

        def make_batches(start: int) -> Iterator[Batch]:
            supervise_prompt = config.objective.supervise_prompt
            return batches(texts, target, self._taps(), config.fit.batch_size, config.seed, supervise_prompt, start)

        with bar("fit", steps, "step", first) as progress:

            def report(step: int, values: dict[str, float]) -> None:
                progress.update(step - progress.n)
                progress.set_postfix_str(" ".join(f"{k} {v:.3g}" for k, v in values.items() if k != "lr"))
                self.log.record("fit", values, step)

            def save(step: int, average: Any, optimizer: Any) -> Path:
                return checkpoint.save(
                    stage.folder, step, config.kind, module.config_of(drafter), drafter, average, optimizer
                )

            path = fit(config.fit, drafter, objective, make_batches, steps, save, resume, report, config.log.every)
        stage.finish({"steps": steps, "texts": len(texts), "parameters": parameters, "checkpoint": path.name})

    def evaluate(self) -> None:
        config, fitted = self.config, self._need("fit")
        stage, own = self._open("evaluate"), self._own_domains()
        if not self._skip(stage):
            held_out = read_rows(self._need("prepare").folder, "heldout")
            rows = choose(held_out, own, config.eval)
            records = []
            calibration = [row for row in held_out if row.domain in own]
            setting = settle(self.target, self._drafter(fitted), calibration, rows, config.eval, stage.folder)
            for choice in setting.considered[:1]:
                instead = f"; measured with {setting.plan}" if choice.plan.off else ""
                say(f"evaluate  plan: {choice}, of {len(setting.considered)} considered{instead}")
            with bar("evaluate", len(rows), "prompt") as progress:
                for record in evaluate(self.target, setting.drafter, rows, config.eval, stage.folder):
                    records.append(record)
                    progress.update(1)
            half = self.target.model.dtype in (torch.bfloat16, torch.float16)
            summary = summarise(records, own, setting, half)
            made = self._need("distill").counts, fitted.counts
            facts = run_facts(config, self.target, setting, own, *made)
            write_report(stage.folder, summary, f"Headstart: {config.out.name}", facts)
            for domain, values in summary["domains"].items():
                self.log.record(f"evaluate/{domain}", {"tau": values["tau"], "rounds": values["rounds"]})
            stage.finish({"prompts": len(rows), "identical": summary["identical"]})
        report = json.loads((stage.folder / "report.json").read_text())
        write_text(config.out / "report.md", (stage.folder / "report.md").read_text())
        say(f"\n{as_text(table(report))}\n\n{verdict(report)}\n")

    def export(self) -> None:
        fitted = self._need("fit")
        stage = self._open("export")
        if not self._skip(stage):
            drafter, counts = self._drafter(fitted, torch.float32), {}
            for engine in self.config.export.engines:
                folder = stage.folder / engine
                differences = eagle3.export(drafter, self.target, folder, self.config.export.dtype)
                say(f"export    {folder}: checked, read back, largest difference {max(differences.values()):.0e}")
                counts[engine] = differences
            layouts = ", ".join(self.config.export.engines)
            served = {"path": str(Path(self.target.model.name_or_path).resolve())}
            if not Path(served["path"]).is_dir():
                served = {"path": self.target.model.name_or_path}  # a hub id
            stage.finish({"layouts": layouts, "read_back_differences": counts, "target": served})
        folder, target = (stage.folder / "eagle3").resolve(), stage.counts["target"]["path"]
        for engine, command in eagle3.launch_commands(folder, target, self.config.tree.longest).items():
            say(f"  {engine}: {command}")

    # -- what each stage is made from --------------------------------------------------------------------------

    @functools.cached_property
    def _prompts(self) -> str:
        """A fingerprint of the prompts themselves."""
        train, heldout = load_prompts(self.config.data)
        return fingerprint([vars(prompt) for prompt in (*train, *heldout)])

    def _settings(self, name: str) -> dict[str, Any]:
        config = self.config
        fast = {"target.fast": config.target.fast}  # it rounds in another order
        if name == "prepare":
            return {
                "data": asdict(config.data) | {"prompts": self._prompts},
                "target": {"source": config.target.source, "dtype": config.target.dtype},
            }
        if name == "distill":
            taps = {"drafter.model.taps": asdict(config.model).get("taps")}
            return {"distill": asdict(config.distill), "drafter.kind": config.kind, "seed": config.seed, **fast} | taps
        if name == "fit":
            drafter = {"kind": config.kind, "model": asdict(config.model), "objective": asdict(config.objective)}
            return {"fit": asdict(config.fit), "drafter": drafter, "seed": config.seed, **fast}
        if name == "evaluate":
            return {"eval": asdict(config.eval), "drafter.tree": asdict(config.tree), **fast}
        return {"export": asdict(config.export)}

    def _inputs(self, name: str) -> dict[str, str]:
        return {one: fingerprint(plan_of(self._settings(one), self._inputs(one))) for one in DEPENDS[name]}

    def _folder(self, name: str) -> Path:
        return self.config.out / name / self.config.eval.name if name == "evaluate" else self.config.out / name

    def _open(self, name: str) -> Stage:
        """Begin, continue or skip a stage; with redo, what is there goes first, and all that was made from it."""
        folder, settings, inputs = self._folder(name), self._settings(name), self._inputs(name)
        if name in self.config.redo and stale(folder, settings, inputs):
            _ = self.target  # a target that cannot be loaded must not cost what is there
            forget(folder)
            for later in STAGES:
                if name in _ancestors(later):
                    forget(self.config.out / later)
        stage = open_stage(folder, name, settings, inputs)
        _ = self.log
        return stage

    def _need(self, name: str) -> Stage:
        """A stage made before. Raises UserError when it is not finished or of other settings."""
        folder = self._folder(name)
        if not (folder / "manifest.json").is_file():
            raise UserError(f"stage {name} is not finished in {self.config.out}; add it to stages")
        return open_stage(folder, name, self._settings(name), self._inputs(name))

    # -- small parts -------------------------------------------------------------------------------------------

    def _taps(self) -> tuple[Tap, ...]:
        module = drafter_module(self.config.kind)
        return (*module.taps_for(self.config.model, self.target), "final")

    def _drafter(self, fitted: Stage, dtype: torch.dtype | None = None) -> Any:
        drafter = open_drafter(fitted.folder / fitted.counts["checkpoint"], self.target, dtype)
        drafter.tree = self.config.tree
        return drafter

    def _own_domains(self) -> list[str]:
        return sorted({row.domain for row in read_rows(self._need("prepare").folder, "train")})

    def _skip(self, stage: Stage) -> bool:
        if stage.finished:
            say(f"{stage.kind:9} finished before, reused ({_counts(stage)})")
        return stage.finished


def _ancestors(name: str) -> set[str]:
    return {one for parent in DEPENDS[name] for one in (parent, *_ancestors(parent))}


def _token_counts(texts: list[Text], vocab_size: int) -> torch.Tensor:
    """How often each token is predicted: answers count whole, prompts a tenth (they may be quoted)."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for text in texts:
        counts += 0.1 * torch.bincount(text.tokens, minlength=vocab_size)
        counts += 0.9 * torch.bincount(text.tokens[text.prompt_length :], minlength=vocab_size)
    return counts


def _counts(stage: Stage) -> str:
    plain = {key: value for key, value in stage.counts.items() if not isinstance(value, dict)}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in plain.items())
