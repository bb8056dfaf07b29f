"""prepare, distill and capture: from the user's rows to the texts and features a drafter is trained on."""

from __future__ import annotations

import functools
import sys
import time

from data.audit import look_at, warnings_of
from data.capture import capture as store_features
from data.distill import distill as write_answers
from data.distill import keep_recorded
from data.prepare import open_sources, sample
from data.prepare import prepare as prepare_rows
from data.questions import first_questions
from data.remote import Remote
from data.rows import Row, read_rows
from data.texts import read_texts
from data.walk import Walk
from data.writer import Local, Writer
from specdec.errors import UserError
from train.log import bar, say
from train.run import Run, in_words


def dry_run(run: Run) -> None:
    """Say what the data is; writes nothing."""
    for line in sample(run.config.data, run.template, run.text_side.window, run.recorded, sys.stdout.isatty()):
        say(line)


def prepare(run: Run) -> None:
    stage = run.open("prepare")
    if run.skip(stage):
        return
    data = run.config.data
    sizes = [source.size for source in open_sources(data)[0]]
    total = sum(size or 0 for size in sizes) if None not in sizes else None
    with bar("prepare", total, "B" if total else "row") as progress:

        def show(read: int, rows: int) -> None:
            progress.set_postfix_str(f"{rows} rows", refresh=False)
            progress.update((read if total else rows) - progress.n)

        prepare_rows(data, run.template, run.text_side.window, run.recorded, stage, say, show)
    say(f"prepare   {in_words(stage)}")


def distill(run: Run) -> None:
    config, prepared = run.config.distill, run.need("prepare")
    rows = read_rows(prepared.folder, "train")
    if len(rows) != prepared.counts["train"]:
        raise UserError(
            f"{rows.path} has {len(rows)} rows, {prepared.counts['train']} were written; redo=[prepare] makes it again"
        )
    stage = run.open("distill")
    if run.skip(stage):
        return
    run.log.rewind("distill", -1)
    total = len(rows) * (1 if run.recorded else len(config.temperatures))
    start = last = time.monotonic()
    with bar("distill", total, "row") as progress:

        def show(finished: int, _: int, tokens: int) -> None:
            nonlocal last
            now = time.monotonic()
            progress.set_postfix_str(f"{tokens} tokens", refresh=False)
            progress.update(finished - progress.n)
            if now - last > 5 or finished == total:
                last = now
                run.log.record("distill", {"conversations": finished, "tokens": tokens, "seconds": now - start})

        if run.recorded:
            keep_recorded(config, rows, stage, show)
        else:
            write_answers(config, _writer(run), rows, functools.partial(_walk, run), run.config.seed, stage, show)
    say(f"distill   {in_words(stage)}")
    names = (run.config.target.name, run.config.target.source)
    warnings = warnings_of(stage.counts, prepared.counts, names)
    for line in (*look_at(read_texts(stage.folder), run.text_side.tokenizer, sys.stdout.isatty()), *warnings):
        say(line)


def _writer(run: Run) -> Writer:
    """Who answers: the target itself, or a server."""
    config = run.config.distill
    if config.backend == "local":
        taps = run.taps() if _keep_features(run) else ()
        return Local(run.target, config.max_new_tokens, config.batch_size, taps)
    side = run.text_side
    remote = Remote(config.server, side.tokenizer, side.stop_tokens, config.max_new_tokens, say)
    for messages, tools, ids in first_questions(open_sources(run.config.data)[0][0], run.template, 4):
        if not remote.check_serving(run.template.opened(messages), tools, run.template.options, ids):
            say("          the server cannot show how it renders a conversation; its template was not compared")
            break
    return remote


def _keep_features(run: Run) -> bool:
    """Whether the features fit the disk they may take; the same in every run, so that a resumed one agrees."""
    config, counts = run.config.distill, run.need("prepare").counts
    if not config.features or run.config.capture.enabled:
        return False
    answers = counts["train"] * len(config.temperatures)
    tokens = counts["prompt_tokens"] * len(config.temperatures) + answers * config.max_new_tokens
    size = tokens * len(run.taps()) * run.target.width * 2 / 1e9
    if size <= config.features_gb:
        return True
    say(
        f"          features would take up to {size:.1f} GB, more than distill.features_gb={config.features_gb:g}: "
        "each step of fit computes them (or capture.enabled=true stores what fits its quota)"
    )
    return False


def _walk(run: Run, row: Row, temperature: float) -> Walk:
    side = run.text_side
    longest = min(run.config.data.max_prompt_tokens, side.window - 1)
    return Walk(row, temperature, run.template, longest, side.stop_tokens)


def capture(run: Run) -> None:
    config = run.config.capture
    if not config.enabled:
        if run.config.stages == ["capture"] or "capture" in run.config.redo:
            raise UserError("the stage capture runs with capture.enabled=true")
        return
    texts = read_texts(run.need("distill").folder)
    stage = run.open("capture")
    if run.skip(stage):
        return
    with bar("capture", len(texts), "text") as progress:

        def show(done: int, fitting: int, stored: int) -> None:
            progress.total = fitting
            progress.set_postfix_str(f"{stored / 1e9:.2f} GB", refresh=False)
            progress.update(done - progress.n)

        store_features(config, texts, run.target, run.taps(), stage, say, show)
    say(f"capture   {in_words(stage)}")
