"""distill: the prompts are answered, in shards; token ids are kept, never text tokenised again.

A conversation is walked turn by turn with the writer's own earlier answers in context. A shard holds a fixed set of
conversations, so an interrupted run goes on after the last whole shard, with the same result. With the target as the
writer, the features a drafter reads are kept too, when asked for: it has just computed them to write the answer.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from data.artifact import Stage, write_text
from data.audit import Shares
from data.rows import Row
from data.server import ServerConfig
from data.texts import Text, metadata_of, read_texts, shard_path, write_texts
from data.walk import Walk
from data.writer import Request, Writer
from specdec.errors import UserError, nearest

BACKENDS = ("local", "openai", "recorded")


@dataclass(frozen=True)
class DistillConfig:
    """conf/config.yaml, `distill`."""

    backend: str = "local"
    """Who writes the answers: local (the target, here), openai (a server of the target) or recorded (nobody: the
    answers in the data are trained on as they are)."""
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    """One answer per prompt for each entry; 0 is greedy."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 128
    """Prompts answered at a time; the next one begins as soon as one ends."""
    shard_size: int = 256
    """Conversations per file; what an interrupt may lose."""
    features: bool = True
    """local: keep the features the drafter reads, which the target has just computed, where they fit features_gb;
    otherwise each step computes them."""
    features_gb: float = 4.0
    """Most disk for kept features, in GB of 1e9 bytes."""
    max_tokens: int | None = None
    """Stop after about this many answer tokens."""
    drop_loops: bool = False
    """Leave out answers that end repeating themselves; they are counted either way."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """openai: where it is."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise UserError(
                f"distill.backend: '{self.backend}' is not one of {known}.{nearest(self.backend, BACKENDS)}"
            )
        if not self.temperatures:
            raise UserError("distill.temperatures is empty; [0.0] makes one greedy answer per prompt")
        if not all(one == 0 or 0.01 <= one <= 100 for one in self.temperatures):
            raise UserError(f"distill.temperatures must be 0 (greedy) or from 0.01 to 100, got {self.temperatures}")
        for name in ("batch_size", "shard_size", "max_new_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"distill.{name} must be 1 or more, got {value}")
        if not self.features_gb >= 0:
            raise UserError(f"distill.features_gb must be 0 or more, got {self.features_gb}")
        if self.backend == "recorded" and (self.drop_loops or self.max_tokens is not None):
            name = "drop_loops" if self.drop_loops else "max_tokens"
            raise UserError(f"distill.{name} applies to answers that are written, not to recorded ones")


Progress = Callable[[int, int, int], None]
"""Called with (conversations finished, conversations in all, tokens written so far)."""


def distill(
    config: DistillConfig,
    writer: Writer,
    rows: Sequence[Row],
    make_walk: Callable[[Row, float], Walk],
    seed: int,
    stage: Stage,
    progress: Progress,
) -> None:
    """Answer every row at every temperature into shards."""
    count = len(rows) * len(config.temperatures)
    # Spread lengths and temperatures over the run, so that a token limit cuts all alike.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    totals: Counter[str] = Counter()
    finished = 0
    for number, jobs in enumerate(order.split(config.shard_size)):
        path = shard_path(stage.folder, number)
        if not path.is_file():
            turns = [divmod(job, len(rows)) for job in jobs.tolist()]
            walks = [make_walk(rows[row], config.temperatures[which]) for which, row in turns]

            advance = functools.partial(_advance, progress, finished, count, totals["answer_tokens"])
            _walk(walks, writer, seed * 100_003 + number, advance)
            if all(walk.cut and not walk.answered for walk in walks):
                raise UserError(f"distill: {writer.name} refused all {len(walks)} prompts of a shard: {walks[0].cut}")
            _write(path, walks, writer.name, config.drop_loops)
        totals += _noted(path, writer.name)
        finished += len(jobs)
        progress(finished, count, totals["answer_tokens"])
        if config.max_tokens is not None and totals["answer_tokens"] >= config.max_tokens:
            break
    finish(stage, {"conversations": finished, **totals, "writer": writer.name})


def _noted(path: Path, writer: str) -> Counter[str]:
    """The counts beside a shard. Raises UserError where somebody else wrote it."""
    noted = metadata_of(path)
    if noted["writer"] != writer:
        raise UserError(
            f"{path} was written by {noted['writer']}, and now it is {writer}: one drafter, one target. "
            "redo=[distill] writes all of it anew"
        )
    return Counter({key: int(n) for key, n in noted.items() if key != "writer" and not key.startswith("domain.")})


def finish(stage: Stage, counts: dict[str, Any]) -> None:
    """Check what is supervised and write the manifest. Raises UserError where nothing is."""
    shares = Shares()
    for text in read_texts(stage.folder):
        shares.add(text.domain, len(text.tokens), text.supervised)
    shares.check()
    stage.finish({**counts, "supervision": shares.counts()})


def _walk(walks: list[Walk], writer: Writer, seed: int, advance: Callable[[int, int], None]) -> None:
    """All conversations to their ends, one turn of each at a time."""
    turn = ended = tokens = 0
    going = walks
    while going:
        # A conversation with further turns does not end with this answer.
        ending = sum(not walk.goes_on for walk in going) / len(going)
        note = functools.partial(_note, advance, ended, tokens, ending)
        requests = [Request(walk.prompt, walk.temperature) for walk in going]
        answers = writer.answer(requests, seed + turn * 7_919, note)
        for walk, answer in zip(going, answers, strict=True):
            walk.take(answer)
            tokens += len(answer.tokens)
        ended += sum(walk.done for walk in going)
        going = [walk for walk in going if not walk.done]
        turn += 1


def _advance(progress: Progress, finished: int, count: int, tokens: int, ended: int, new: int) -> None:
    progress(finished + ended, count, tokens + new)


def _note(advance: Callable[[int, int], None], ended: int, tokens: int, ending: float, answers: int, new: int) -> None:
    advance(ended + int(answers * ending), tokens + new)


def _write(path: Path, walks: list[Walk], writer: str, drop_loops: bool) -> None:
    counts: Counter[str] = Counter()
    texts: list[Text] = []
    lines = []
    for walk in walks:
        counts += walk.counts()
        if walk.looped and drop_loops:
            counts["dropped"] += 1
        else:
            texts += walk.texts()
        lines.append(json.dumps(walk.record() | {"writer": writer}, ensure_ascii=False) + "\n")
    write_text(path.with_suffix(".jsonl"), "".join(lines))  # for people; training reads the ids
    counts["texts"] = len(texts)
    counts["answer_tokens"] = sum(text.supervised for text in texts)
    write_texts(path, texts, {"writer": writer, **{key: str(value) for key, value in counts.items()}})


def keep_recorded(config: DistillConfig, rows: Sequence[Row], stage: Stage, progress: Progress) -> None:
    """The recorded texts as shards, as if they had just been written."""
    totals: Counter[str] = Counter()
    for number, start in enumerate(range(0, len(rows), config.shard_size)):
        path = shard_path(stage.folder, number)
        some = rows[start : start + config.shard_size]
        if not path.is_file():
            texts = [
                Text(torch.tensor(tokens), tuple((a, b) for a, b in spans), None, row.domain)
                for row in some
                for tokens, spans in row.texts or []
            ]
            written = sum(text.supervised for text in texts)
            lines = [json.dumps({"id": row.id, "domain": row.domain, "writer": row.writer}) + "\n" for row in some]
            write_text(path.with_suffix(".jsonl"), "".join(lines))
            noted = {"writer": "recorded", "texts": str(len(texts)), "answer_tokens": str(written)}
            write_texts(path, texts, noted)
        totals += _noted(path, "recorded")
        progress(start + len(some), len(rows), totals["answer_tokens"])
    finish(stage, {"conversations": len(rows), **totals, "writer": "recorded"})
