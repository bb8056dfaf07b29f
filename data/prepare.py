"""prepare: rows of any source to prompts the target can answer (or recorded texts), split into training and held-out.

One pass over the sources with a bounded memory. Every row ends as training, held-out, left out or rejected with a
reason in rejects.jsonl, and the counts add up to what was read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from data.artifact import Stage
from data.audit import preview
from data.chat import Template
from data.formats import FORMATS, check_mapping, format_of
from data.intake import Intake
from data.rows import Row
from data.sources import BUNDLED, Source, SourceConfig, bundled, bundled_domains
from data.split import Split
from specdec.errors import UserError

CHOICES = ("cut", "reject")
LOOK = 100
"""Rows whose layout is looked at before a source is read."""


@dataclass(frozen=True)
class DataConfig:
    """conf/data/*.yaml: what the drafter is trained for."""

    domains: list[str] = field(default_factory=lambda: ["maths"])
    """Bundled domains to train on; with `path`, the one name its rows get when they have no `domain`."""
    path: str | None = None
    """A file, folder or hub id of your own instead of the bundled prompts (see SourceConfig.path)."""
    format: str = "auto"
    """Layout of `path`: auto, or one of data.formats.FORMATS."""
    mapping: dict[str, str] | None = None
    """Columns of `path` under our names, e.g. {prompt: question, completion: answer}."""
    split: str | None = None
    """Of a hub id."""
    streaming: bool = False
    """Of a hub id."""
    rows: int | None = None
    """Read no more than this many rows of `path`."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Several sources instead of `path`, each with its own domain and weight."""
    heldout_path: str | None = None
    """Held-out rows for `path` or `sources`; null holds out `heldout` of their rows."""
    heldout: int = 30
    """Rows of each domain to hold out, at most a third of it."""
    limit: int | None = None
    """Use at most this many training rows of each domain."""
    max_prompt_tokens: int = 1024
    """Longest prompt."""
    max_tokens: int = 2048
    """distill.backend=recorded: longest text."""
    too_long: str = "cut"
    """distill.backend=recorded: cut over-long conversations at a turn (and plain texts), or reject them."""
    max_rejected: float = 0.2
    """Largest share of rejected rows; more stop the run."""
    system: str | None = None
    """System prompt of conversations that have none: the one that will be served with."""
    chat_template: dict[str, Any] | None = None
    """Options of the chat template, as in serving, e.g. {enable_thinking: false}."""
    text_prompt_tokens: int = 64
    """Of a plain text, how much the target is given to continue."""

    def __post_init__(self) -> None:
        if self.path is not None and not self.path.strip():
            raise UserError("data.path is empty")
        if not self.domains and not self.sources:
            known = ", ".join(bundled_domains())
            raise UserError(f"give data.path, data.sources or data.domains (bundled ones: {known})")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"data.limit must be 1 or more, got {self.limit}")
        for name in ("heldout", "max_prompt_tokens", "max_tokens", "text_prompt_tokens", "rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"data.{name} must be 1 or more, got {value}")
        if self.too_long not in CHOICES:
            raise UserError(f"data.too_long: '{self.too_long}' is not one of {', '.join(CHOICES)}")
        if not 0 <= self.max_rejected <= 1:
            raise UserError(f"data.max_rejected must be from 0 to 1, got {self.max_rejected}")
        if self.path is not None and self.sources:
            raise UserError("data.path and data.sources: give one of them")
        if self.path is not None and len(self.domains) > 1:
            raise UserError(f"data.domains: with data.path it names that file's one domain, got {self.domains}")
        if self.path is None:
            given: dict[str, Any] = {"mapping": self.mapping, "split": self.split, "streaming": self.streaming}
            given["rows"] = self.rows
            given["format"] = self.format if self.format != "auto" else None
            given["heldout_path"] = None if self.sources else self.heldout_path
            if unused := [name for name, value in given.items() if value]:
                where = "inside data.sources" if self.sources else "with data.path: bundled prompts need none"
                raise UserError(f"data.{unused[0]} applies {where}")
        check_mapping(self.mapping or {})
        weights = [source.weight is None for source in self.sources]
        if any(weights) and not all(weights):
            raise UserError("data.sources: give every source a weight, or none")

    @property
    def labels(self) -> list[str]:
        """What the domains are called before a row is read; names the run."""
        return list(dict.fromkeys(source.domain for source in self.entries)) or self.domains

    @property
    def own(self) -> bool:
        """Whether the rows are the user's, not the bundled ones."""
        return self.path is not None or bool(self.sources)

    @property
    def entries(self) -> list[Source]:
        """The user's own sources, found but not read. Raises UserError for one that is not there."""
        if self.path is None:
            return [Source(source) for source in self.sources]
        label = self.domains[0] if self.domains else None
        own = SourceConfig(self.path, label, format=self.format, mapping=self.mapping or {}, rows=self.rows)
        return [Source(dataclasses.replace(own, split=self.split, streaming=self.streaming))]


def open_sources(config: DataConfig) -> tuple[list[Source], list[Source]]:
    """(training, held-out) sources, found but not read. Held-out prompts of the bundled domains measure transfer.

    Raises UserError for what is not there.
    """
    transfer = [bundled(domain, "heldout") for domain in bundled_domains()]
    if not config.own:
        return [bundled(domain, "train") for domain in config.domains], transfer
    train = config.entries
    if config.heldout_path is None:
        return train, transfer
    first = train[0]
    own = SourceConfig(config.heldout_path, first.domain, None, first.config.format, first.config.mapping)
    try:
        return train, [Source(own), *transfer]
    except UserError as error:
        raise UserError(str(error).replace("data.path", "data.heldout_path", 1)) from error


def look(source: Source) -> str:
    """What layout the first rows have, in words. Raises UserError where none is known or there are no rows."""
    seen: dict[str, int] = {}
    names: dict[str, None] = {}
    looked, first = 0, ""
    for record in source.records():
        if looked == LOOK:
            break
        looked += 1
        if record.row is None:
            first = first or f"{record.where}: {record.reason} ({record.detail})"
            continue
        layout = (
            format_of(record.row, source.config.mapping) if source.config.format == "auto" else source.config.format
        )
        names |= dict.fromkeys(record.row)
        if layout is not None:
            seen[layout] = seen.get(layout, 0) + 1
    path, mapping = source.config.path, source.config.mapping
    if not looked:
        raise UserError(f'{path}: the file is empty; a row is e.g. {{"prompt": "What is 2 + 2?"}}')
    if not names:
        raise UserError(f"{path}: none of the first {looked} rows can be read. {first}")
    listed = ", ".join(name[:40] for name in list(names)[:20])
    absent = [theirs for theirs in mapping.values() if theirs not in names]
    if absent and not seen:
        raise UserError(f"data.mapping: {path} has no column '{absent[0]}'; its columns: {listed}")
    if not seen:
        layouts = "; ".join(" + ".join(needed) for needed in FORMATS.values())
        raise UserError(
            f"{path}: no known layout: its columns are {listed}. Known: {layouts}. Name the columns, "
            "e.g. 'data.mapping={prompt: question, completion: answer}'"
        )
    kinds = ", ".join(f"{name.replace('_', '/')} ({count} of the first {looked} rows)" for name, count in seen.items())
    notes = f"; none of them has a column '{absent[0]}'" if absent else ""
    notes += f"; {source.skipped} other files in the folder are not read" if source.skipped else ""
    return f"{path}: {kinds}{notes}"


def prepare(
    config: DataConfig,
    template: Template,
    window: int,
    recorded: bool,
    stage: Stage,
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> None:
    """Write train.jsonl, heldout.jsonl and rejects.jsonl into the stage's folder.

    recorded: train on the answers that are there. progress is called with (bytes read, rows read). Raises UserError
    when too many rows are rejected or none is left.
    """
    train, heldout = open_sources(config)
    for source in train + heldout[: config.heldout_path is not None]:
        say(f"          {look(source)}")
    stage.folder.mkdir(parents=True, exist_ok=True)
    with (stage.folder / "rejects.jsonl").open("w", encoding="utf-8") as rejects:
        own = Intake(config, template, window, recorded, rejects.write)
        split = Split(config, stage.folder, [(source.config.path, source.config.weight) for source in train])
        total = 0
        for number, source in enumerate(train):
            for batch in own.rows(source):
                for row, mark in batch:
                    split.add(number, row, mark)
                progress(total + own.read, own.count)
            total += source.size or 0
        rejects.flush()
        own.check_share(stage.folder / "rejects.jsonl")
    with (stage.folder / "rejects-heldout.jsonl").open("w", encoding="utf-8") as rejects:
        other = Intake(config, template, window, False, rejects.write)
        other.ids = own.ids  # records of an evaluation are told apart by them
        others, heldout_counts = _others(config, heldout, split, other, say)
        counts = own.counts() | split.finish(others, config.own and config.heldout_path is None)
        counts |= heldout_counts
    for warning in own.warnings():
        say(warning)
    stage.finish(counts)


def _others(
    config: DataConfig, sources: list[Source], split: Split, intake: Intake, say: Callable[[str], None]
) -> tuple[list[Row], dict[str, Any]]:
    """The held-out rows of other files, without those that are trained on, and their counts.

    A held-out row is a prompt: whatever is recorded as its answer is not looked at. Raises UserError where the user's
    held-out file gives none.
    """
    trained, found, asked_before = split.trained_marks(), [], 0
    for source in sources:
        given = source.path.parent != BUNDLED
        if config.own and not given and source.domain in split.names:
            continue  # the user's own domain of that name is measured
        own: list[Row] = []
        for batch in intake.rows(source):
            fresh = [row for row, mark in batch if mark not in trained]
            asked_before += len(batch) - len(fresh)
            own += fresh
        if given:
            intake.check_share(split.folder / "rejects-heldout.jsonl")
        if given and not own:
            raise UserError(
                f"data.heldout_path: none of the {intake.count} rows of {source.config.path} can be measured: "
                f"{asked_before} are trained on, {intake.rejected.total()} rejected ({intake.reasons()})"
            )
        found += own
    counts = {"rows": intake.count, "rejected": intake.rejected.total(), "trained_on": asked_before}
    if asked_before or intake.rejected:
        say(f"          held-out rows left out: {asked_before} that are trained on, {intake.rejected.total()} rejected")
    return found, {"heldout_files": counts}


def sample(config: DataConfig, template: Template, window: int, recorded: bool, colour: bool) -> Iterator[str]:
    """What prepare() would do, from the first rows of each source, in lines; writes nothing. Raises UserError."""
    for source in open_sources(config)[0]:
        yield look(source)
        rejected: list[str] = []
        intake = Intake(config, template, window, recorded, rejected.append)
        rows = [row for row, _ in next(intake.rows(source), [])]
        used = f"{len(rows)} of its first {intake.count} rows can be used"
        yield f"  {used}" + (f"; rejected: {intake.reasons()}" if rejected else "")
        for line in rejected[:3]:
            entry = json.loads(line)
            yield f"    {entry['where']}: {entry['reason']} ({entry['detail']})"
        if not rows:
            continue
        if recorded:
            shares = intake.shares
            yield f"  {shares.describe()}"
            yield from (f"  {warning}" for warning in shares.check())
        row = rows[0]
        tokens, spans = (row.texts or [[row.prompt, []]])[0]
        yield f"  row {row.id} ({row.domain}, {len(tokens)} tokens), supervised parts marked:"
        shown = preview(template.tokenizer, tokens, [(a, b) for a, b in spans], colour)
        shown += "" if recorded else "[the target's answer]"
        yield "\n".join(f"    {line}" for line in shown.splitlines())
