"""prepare -> distill -> fit -> evaluate -> export: each stage a folder, run, continued or skipped.

A stage reads the folders before it and its own part of the configuration, never another stage's memory. The target is
loaded when the first stage needs it, so a finished run says so at once.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from data.artifact import write_text
from data.prepare import look, open_sources
from data.rows import read_rows
from eval.evaluate import choose, settle
from eval.evaluate import evaluate as measure
from eval.report import as_text, summarise, table, verdict, write_report
from specdec.export import eagle3
from specdec.source import locate
from train import data_stages, fit_stage
from train.config import STAGES, RunConfig
from train.facts import lossless_against, run_facts
from train.log import bar, say
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
    own = {"fit": fit_stage.fit, "evaluate": evaluate, "export": export}
    before = {"prepare": data_stages.prepare, "distill": data_stages.distill, "capture": data_stages.capture}
    functions = before | own
    try:
        for name in STAGES:
            if name in config.stages:
                functions[name](run)
    finally:
        run.close()
    say(f"done in {(time.monotonic() - started) / 60:.1f} min; everything is in {config.out}")


def evaluate(run: Run) -> None:
    config, fitted = run.config, run.need("fit")
    stage, own = run.open("evaluate"), run.own_domains()
    if not run.skip(stage):
        held_out = list(read_rows(run.need("prepare").folder, "heldout"))
        rows = choose(held_out, own, config.eval)
        target = run.deployed(fitted)
        records = []
        calibration = [row for row in held_out if row.domain in own]
        setting = settle(target, run.drafter(fitted), calibration, rows, config.eval, stage.folder)
        for choice in setting.considered[:1]:
            instead = f"; measured with {setting.plan}" if choice.plan.off else ""
            say(f"evaluate  plan: {choice}, of {len(setting.considered)} considered{instead}")
        with bar("evaluate", len(rows), "prompt") as progress:
            for record in measure(target, setting.drafter, rows, config.eval, stage.folder):
                records.append(record)
                progress.update(1)
        half = target.model.dtype in (torch.bfloat16, torch.float16)
        summary = summarise(records, own, setting, half)
        made = run.need("distill").counts, fitted.counts
        facts = run_facts(config, target, setting, own, *made)
        write_report(stage.folder, summary, f"Headstart: {config.out.name}", facts)
        for domain, values in summary["domains"].items():
            run.log.record(f"evaluate/{domain}", {"tau": values["tau"], "rounds": values["rounds"]})
        stage.finish({"prompts": len(rows), "identical": summary["identical"]})
    report = json.loads((stage.folder / "report.json").read_text())
    write_text(config.out / "report.md", (stage.folder / "report.md").read_text())
    say(f"\n{as_text(table(report))}\n\n{verdict(report)}\n")
    if config.target.train != "frozen":
        say(f"Lossless against {lossless_against(config, fitted.counts)}.\n")


def export(run: Run) -> None:
    fitted = run.need("fit")
    if problem := eagle3.refusal(run.config.kind, run.config.model):
        place = fitted.folder / fitted.counts["checkpoint"]
        say(f"export    {problem}; open_drafter() opens {place}")
        return
    stage = run.open("export")
    if not run.skip(stage):
        target, counts = run.deployed(fitted), {}
        drafter = run.drafter(fitted, torch.float32)
        for engine in run.config.export.engines:
            folder = stage.folder / engine
            differences = eagle3.export(drafter, target, folder, run.config.export.dtype)
            say(f"export    {folder}: checked, read back, largest difference {max(differences.values()):.0e}")
            counts[engine] = differences
        layouts = ", ".join(run.config.export.engines)
        served = {"path": str(Path(target.model.name_or_path).resolve())}
        if not Path(served["path"]).is_dir():
            served = {"path": target.model.name_or_path}  # a hub id
        stage.finish({"layouts": layouts, "read_back_differences": counts, "target": served})
    folder, target = (stage.folder / "eagle3").resolve(), stage.counts["target"]["path"]
    for engine, command in eagle3.launch_commands(folder, target, run.config.tree.longest).items():
        say(f"  {engine}: {command}")
