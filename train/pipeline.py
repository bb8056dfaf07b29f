"""prepare -> distill -> fit -> evaluate -> export: each stage a folder, run, continued or skipped.

A stage reads the folders before it and its own part of the configuration, never another stage's memory. The target is
loaded when the first stage needs it, so a finished run says so at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from data.artifact import write_text
from data.batches import Batch, batches, batches_per_epoch
from data.capture import attach
from data.draft_vocab import count_tokens, coverage, ranking
from data.prepare import look, open_sources
from data.rows import read_rows
from data.texts import read_texts
from eval.evaluate import choose, settle
from eval.evaluate import evaluate as measure
from eval.report import as_text, summarise, table, verdict, write_report
from specdec import fast
from specdec.drafter import drafter_module
from specdec.export import eagle3
from specdec.source import locate
from train import checkpoint, data_stages
from train.config import STAGES, RunConfig, objective_module
from train.facts import run_facts
from train.log import bar, say
from train.loop import fit as train_loop
from train.run import Run


def run_pipeline(config: RunConfig) -> None:
    """Run the stages asked for. Raises UserError; an interrupt leaves every finished piece in place."""
    started = time.monotonic()
    # A mistake in the data's place or layout shows before anything is loaded or written.
    for source in open_sources(config.data)[0]:
        if source.files:
            look(source)
    locate(config.target.source)
    run = Run(config)
    if config.dry_run:
        data_stages.dry_run(run)
        return
    say(f"run {config.out}")
    own = {"fit": fit, "evaluate": evaluate, "export": export}
    before = {"prepare": data_stages.prepare, "distill": data_stages.distill, "capture": data_stages.capture}
    functions = before | own
    try:
        for name in STAGES:
            if name in config.stages:
                functions[name](run)
    finally:
        run.close()
    say(f"done in {(time.monotonic() - started) / 60:.1f} min; everything is in {config.out}")


def fit(run: Run) -> None:
    source = run.need("distill").folder
    stage = run.open("fit")
    if run.skip(stage):
        return
    config, target = run.config, run.target
    texts = read_texts(source)
    if config.capture.enabled:
        texts = attach(texts, run.need("capture").folder)
    batch_size, pack = config.fit.batch_size, config.fit.pack_tokens
    steps = config.fit.steps(batches_per_epoch(texts, batch_size, config.seed, pack))
    generator = torch.Generator().manual_seed(config.seed)
    module = drafter_module(config.kind)
    counts = count_tokens(texts, target.vocab_size)
    ranked, some = ranking(texts, counts, target.vocab_size), [text.tokens for text in texts[:16]]
    drafter = module.create(config.model, target, ranked, generator, some)
    covered = coverage(module.vocabulary(drafter), counts)
    drafter.tree = config.tree
    if target.fast_mode != "off":
        fast.train_fast(drafter)
    objective = objective_module(config.kind).Objective(config.objective, drafter, target)
    torch.set_flush_denormal(True)  # tiny gradients slow a CPU's backward pass twofold
    resume = checkpoint.latest(stage.folder)
    first = int(resume.name.removeprefix("step-")) if resume else 0
    run.log.rewind("fit", first)
    parameters = sum(p.numel() for p in drafter.parameters())
    say(
        f"fit       {parameters / 1e6:.1f}M parameters, {len(texts)} texts, {steps} steps"
        + f" from {first}" * bool(first)
    )
    shares = ", ".join(f"{domain} {100 * share:.1f} %" for domain, share in covered.items())
    say(f"          draft vocabulary of {len(module.vocabulary(drafter))} tokens covers: {shares}")

    def make_batches(start: int) -> Iterator[Batch]:
        supervise_prompt = config.objective.supervise_prompt
        return batches(texts, target, run.taps(), batch_size, config.seed, supervise_prompt, start, pack)

    with bar("fit", steps, "step", first) as progress:

        def report(step: int, values: dict[str, float]) -> None:
            progress.update(step - progress.n)
            progress.set_postfix_str(" ".join(f"{k} {v:.3g}" for k, v in values.items() if k != "lr"))
            run.log.record("fit", values, step)

        def save(step: int, average: Any, optimizer: Any) -> Path:
            return checkpoint.save(
                stage.folder, step, config.kind, module.config_of(drafter), drafter, average, optimizer
            )

        path = train_loop(config.fit, drafter, objective, make_batches, steps, save, resume, report, config.log.every)
    made = {"steps": steps, "texts": len(texts), "parameters": parameters, "checkpoint": path.name}
    stage.finish({**made, "coverage": covered})


def evaluate(run: Run) -> None:
    config, fitted = run.config, run.need("fit")
    stage, own = run.open("evaluate"), run.own_domains()
    if not run.skip(stage):
        held_out = list(read_rows(run.need("prepare").folder, "heldout"))
        rows = choose(held_out, own, config.eval)
        records = []
        calibration = [row for row in held_out if row.domain in own]
        setting = settle(run.target, run.drafter(fitted), calibration, rows, config.eval, stage.folder)
        for choice in setting.considered[:1]:
            instead = f"; measured with {setting.plan}" if choice.plan.off else ""
            say(f"evaluate  plan: {choice}, of {len(setting.considered)} considered{instead}")
        with bar("evaluate", len(rows), "prompt") as progress:
            for record in measure(run.target, setting.drafter, rows, config.eval, stage.folder):
                records.append(record)
                progress.update(1)
        half = run.target.model.dtype in (torch.bfloat16, torch.float16)
        summary = summarise(records, own, setting, half)
        made = run.need("distill").counts, fitted.counts
        facts = run_facts(config, run.target, setting, own, *made)
        write_report(stage.folder, summary, f"Headstart: {config.out.name}", facts)
        for domain, values in summary["domains"].items():
            run.log.record(f"evaluate/{domain}", {"tau": values["tau"], "rounds": values["rounds"]})
        stage.finish({"prompts": len(rows), "identical": summary["identical"]})
    report = json.loads((stage.folder / "report.json").read_text())
    write_text(config.out / "report.md", (stage.folder / "report.md").read_text())
    say(f"\n{as_text(table(report))}\n\n{verdict(report)}\n")


def export(run: Run) -> None:
    fitted = run.need("fit")
    if problem := eagle3.refusal(run.config.kind, run.config.model):
        place = fitted.folder / fitted.counts["checkpoint"]
        say(f"export    {problem}; open_drafter() opens {place}")
        return
    stage = run.open("export")
    if not run.skip(stage):
        drafter, counts = run.drafter(fitted, torch.float32), {}
        for engine in run.config.export.engines:
            folder = stage.folder / engine
            differences = eagle3.export(drafter, run.target, folder, run.config.export.dtype)
            say(f"export    {folder}: checked, read back, largest difference {max(differences.values()):.0e}")
            counts[engine] = differences
        layouts = ", ".join(run.config.export.engines)
        served = {"path": str(Path(run.target.model.name_or_path).resolve())}
        if not Path(served["path"]).is_dir():
            served = {"path": run.target.model.name_or_path}  # a hub id
        stage.finish({"layouts": layouts, "read_back_differences": counts, "target": served})
    folder, target = (stage.folder / "eagle3").resolve(), stage.counts["target"]["path"]
    for engine, command in eagle3.launch_commands(folder, target, run.config.tree.longest).items():
        say(f"  {engine}: {command}")
