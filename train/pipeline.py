"""prepare -> distill -> fit -> evaluate -> export: each stage a folder, run, continued or skipped.

A stage reads the folders before it and its own part of the configuration, never another stage's memory. The target is
loaded when the first stage needs it, so a finished run says so at once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from data.artifact import Stage, forget, open_stage, versions, write_text
from data.batches import Batch, batches
from data.distill import Text, distill, read_texts
from data.prepare import load_prompts, prepare, read_rows
from eval.evaluate import choose, evaluate
from eval.report import as_text, summarise, table, verdict, write_report
from specdec.drafter import drafter_module, open_drafter
from specdec.errors import UserError
from specdec.export import eagle3
from specdec.load import load_target
from specdec.search import TreeConfig
from specdec.source import locate
from specdec.target import Tap, Target
from train import checkpoint
from train.config import STAGES, RunConfig, objective_module
from train.log import Log, bar, say
from train.loop import fit


def run_pipeline(config: RunConfig) -> None:
    """Run the stages asked for. Raises UserError; an interrupt leaves every finished piece in place."""
    started = time.monotonic()
    load_prompts(config.data)  # a mistake in the prompts shows before anything is loaded or written
    locate(config.target.source)
    run = Run(config)
    say(f"run {config.out}")
    for name in config.redo:
        for stage in STAGES[STAGES.index(name) :]:
            forget(config.out / stage)
    try:
        for name in STAGES:
            if name in config.stages:
                getattr(run, name)()
    finally:
        run.log.close()
    say(f"done in {(time.monotonic() - started) / 60:.1f} min; everything is in {config.out}")


class Run:
    """One run folder and what its stages share: the configuration, the log and, once needed, the target."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        config.out.mkdir(parents=True, exist_ok=True)
        write_text(config.out / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config.plain)))
        self.log = Log(config.log, config.out, config.out.name)

    @functools.cached_property
    def target(self) -> Target:
        start = time.monotonic()
        target = load_target(self.config.target, say)
        say(f"target {target.name}: {target.layers} layers, loaded in {time.monotonic() - start:.1f} s")
        return target

    # -- stages ------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        stage = self._prepare_stage()
        if not self._skip(stage):
            prepare(self.config.data, self.target.tokenizer, self.target.window, stage)
            say(f"prepare   {_counts(stage)}")

    def distill(self) -> None:
        stage = self._distill_stage()
        if self._skip(stage):
            return
        rows = read_rows(self._finished(self._prepare_stage()).folder, "train")
        total = len(rows) * len(self.config.distill.temperatures)
        start = time.monotonic()
        with bar("distill", total, "answer") as progress:

            def show(answered: int, _: int, tokens: int) -> None:
                progress.update(answered - progress.n)
                progress.set_postfix_str(f"{tokens} tokens")
                self.log.record("distill", {"answers": answered, "tokens": tokens, "seconds": time.monotonic() - start})

            distill(self.config.distill, self.target, rows, self._taps(), self.config.seed, stage, show)
        say(f"distill   {_counts(stage)}")

    def fit(self) -> None:
        stage = self._fit_stage()
        if self._skip(stage):
            return
        config, target = self.config, self.target
        texts = read_texts(self._finished(self._distill_stage()).folder)
        steps = config.fit.steps(len(texts))
        generator = torch.Generator().manual_seed(config.seed)
        module = drafter_module(config.kind)
        drafter = module.create(config.model, target, _token_counts(texts, target.vocab_size), generator)
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
        config, stage = self.config, self._evaluate_stage()
        own = self._own_domains()
        if not self._skip(stage):
            rows = choose(read_rows(self._finished(self._prepare_stage()).folder, "heldout"), own, config.eval)
            drafter, records = self._drafter(), []
            with bar("evaluate", len(rows), "prompt") as progress:
                for record in evaluate(self.target, drafter, rows, config.eval, stage.folder):
                    records.append(record)
                    progress.update(1)
            summary = summarise(records, own)
            write_report(stage.folder, summary, f"Headstart: {config.out.name}", self._facts())
            for domain, values in summary["domains"].items():
                self.log.record(f"evaluate/{domain}", {"tau": values["tau"], "rounds": values["rounds"]})
            stage.finish({"prompts": len(rows), "identical": summary["identical"]})
        report = json.loads((stage.folder / "report.json").read_text())
        write_text(config.out / "report.md", (stage.folder / "report.md").read_text())
        say(f"\n{as_text(table(report))}\n\n{verdict(report)}\n")

    def export(self) -> None:
        stage = self._export_stage()
        commands = stage.folder / "serve.txt"
        if not self._skip(stage):
            drafter, counts = self._drafter(), {}
            for engine in self.config.export.engines:
                folder = stage.folder / engine
                differences = eagle3.export(drafter, self.target, folder, self.config.export.dtype)
                say(f"export    {folder}: checked, read back, largest difference {max(differences.values()):.0e}")
                counts[engine] = differences
                served = eagle3.launch_commands(folder, self.target.model.name_or_path, self.config.tree.longest)
                write_text(commands, "".join(f"{name}: {command}\n" for name, command in served.items()))
            stage.finish({"layouts": ", ".join(self.config.export.engines), "read_back_differences": counts})
        say(f"how to serve it: {commands}")

    # -- what each stage depends on ----------------------------------------------------------------------------

    def _prepare_stage(self) -> Stage:
        config = self.config
        inputs = {
            f"data.{key}": hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
            for key, path in (("path", config.data.path), ("heldout_path", config.data.heldout_path))
            if path is not None
        }
        if config.data.path is None:
            prompts = json.dumps([vars(p) for part in load_prompts(config.data) for p in part])
            inputs["bundled"] = hashlib.sha256(prompts.encode()).hexdigest()[:16]
        target = {"target": {"source": config.target.source, "dtype": config.target.dtype}}
        return open_stage(config.out / "prepare", "prepare", {"data": asdict(config.data), **target}, inputs)

    def _distill_stage(self) -> Stage:
        config = self.config
        settings = {"distill": asdict(config.distill), "drafter.kind": config.kind, "seed": config.seed}
        settings |= {"drafter.model.taps": getattr(config.model, "taps", None)}
        inputs = {"prepare": self._prepare_stage().fingerprint}
        return open_stage(config.out / "distill", "distill", settings, inputs)

    def _fit_stage(self) -> Stage:
        config = self.config
        drafter = {"kind": config.kind, "model": asdict(config.model), "objective": asdict(config.objective)}
        settings = {"fit": asdict(config.fit), "drafter": drafter, "seed": config.seed}
        inputs = {"distill": self._distill_stage().fingerprint}
        return open_stage(config.out / "fit", "fit", settings, inputs)

    def _evaluate_stage(self) -> Stage:
        inputs = {"fit": self._fit_stage().fingerprint}
        folder = self.config.out / "evaluate" / self.config.eval.name
        settings = {"eval": asdict(self.config.eval), "drafter.tree": asdict(self.config.tree)}
        return open_stage(folder, "evaluate", settings, inputs)

    def _export_stage(self) -> Stage:
        inputs = {"fit": self._fit_stage().fingerprint}
        return open_stage(self.config.out / "export", "export", {"export": asdict(self.config.export)}, inputs)

    # -- small parts -------------------------------------------------------------------------------------------

    def _taps(self) -> tuple[Tap, ...]:
        module = drafter_module(self.config.kind)
        return (*module.taps_for(self.config.model, self.target), "final")

    def _drafter(self) -> Any:
        fitted = self._finished(self._fit_stage())
        drafter = open_drafter(fitted.folder / fitted.counts["checkpoint"], self.target)
        drafter.tree = self.config.tree
        return drafter

    def _own_domains(self) -> list[str]:
        rows = read_rows(self._finished(self._prepare_stage()).folder, "train")
        return sorted({row.domain for row in rows})

    def _finished(self, stage: Stage) -> Stage:
        if not stage.finished and not (stage.folder / "manifest.json").is_file():
            raise UserError(f"stage {stage.kind} is not finished in {self.config.out}; add it to stages")
        return stage

    def _skip(self, stage: Stage) -> bool:
        if stage.finished:
            say(f"{stage.kind:9} finished before, reused ({_counts(stage)})")
        return stage.finished

    def _facts(self) -> dict[str, str]:
        config = self.config
        distilled, fitted = self._distill_stage().counts, self._fit_stage().counts
        return {
            "target": f"{config.target.name} ({config.target.source}), {config.target.dtype}",
            "drafter": f"{config.kind}, {fitted['parameters'] / 1e6:.1f}M parameters, {_tree(config.tree)}",
            "trained on": f"{', '.join(self._own_domains())}: {distilled['answer_tokens']} target-written tokens",
            "fit": f"{fitted['steps']} steps, seed {config.seed}",
            "decoding": f"greedy, {config.eval.max_new_tokens} new tokens, one prompt at a time",
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {self.target.device.type}",
            "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        }


def _token_counts(texts: list[Text], vocab_size: int) -> torch.Tensor:
    """How often each token is predicted: answers count whole, prompts a tenth (they may be quoted)."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for text in texts:
        counts += 0.1 * torch.bincount(text.tokens, minlength=vocab_size)
        counts += 0.9 * torch.bincount(text.tokens[text.prompt_length :], minlength=vocab_size)
    return counts


def _tree(tree: TreeConfig) -> str:
    if tree.kind == "chain":
        return f"chain of {tree.depth}"
    return f"{tree.kind} tree of {tree.most_nodes} nodes, {tree.longest} deep"


def _counts(stage: Stage) -> str:
    plain = {key: value for key, value in stage.counts.items() if not isinstance(value, dict)}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in plain.items())
