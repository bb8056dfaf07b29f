"""distill: the target answers the training prompts, in batches; token ids are kept, never text tokenised again.

The features a drafter reads are kept too, when asked for: the target has just computed them to write the answer, so
they cost nothing now and a whole forward pass later. A shard holds the answers to a fixed set of prompts, so an
interrupted run goes on after the last whole shard, with the same result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.artifact import Stage, write_by, write_text
from data.prepare import Row
from specdec.decode import Generation, stream
from specdec.drafters.none import Plain
from specdec.errors import UserError
from specdec.sampling import Sampling
from specdec.stopping import Limits
from specdec.target import Tap, Target


@dataclass(frozen=True)
class DistillConfig:
    """conf/config.yaml, `distill`."""

    temperatures: list[float] = field(default_factory=lambda: [0.0])
    """One answer per prompt for each entry; 0 is greedy."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 128
    """Prompts answered at a time; the next one begins as soon as one ends."""
    shard_size: int = 256
    """Answers per file; what an interrupt may lose."""
    features: bool = True
    """Keep the features the drafter reads (2 bytes × width × taps a token); false recomputes them in each step."""
    max_tokens: int | None = None
    """Stop after about this many answer tokens."""

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise UserError("distill.temperatures is empty; [0.0] makes one greedy answer per prompt")
        if min(self.temperatures) < 0:
            raise UserError(f"distill.temperatures must be 0 (greedy) or more, got {self.temperatures}")
        for name in ("batch_size", "shard_size", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"distill.{name} must be 1 or more, got {getattr(self, name)}")


@dataclass(frozen=True)
class Text:
    """One training text: ids [T], how many of them are the prompt, features [T - 1 or T, S, D] or None."""

    tokens: Tensor
    prompt_length: int
    features: Tensor | None


def distill(
    config: DistillConfig,
    target: Target,
    rows: list[Row],
    taps: tuple[Tap, ...],
    seed: int,
    stage: Stage,
    progress: Callable[[int, int, int], None],
) -> None:
    """Answer every row at every temperature into shards.

    progress is called with (answers finished, answers in all, tokens so far).
    """
    jobs = [(row, t) for t in config.temperatures for row in rows]
    # Spread lengths and temperatures over the run, so that a token limit cuts all alike.
    order = torch.randperm(len(jobs), generator=torch.Generator().manual_seed(seed)).tolist()
    shards = [[jobs[i] for i in order[at : at + config.shard_size]] for at in range(0, len(jobs), config.shard_size)]
    drafter = Plain(taps if config.features else ())
    answered = tokens = stopped = 0
    for number, shard in enumerate(shards):
        path = stage.folder / f"shard-{number:05d}.safetensors"
        if not path.is_file():
            generator = torch.Generator(target.device).manual_seed(seed * 100_003 + number)
            before = answered, tokens

            def advance(answers: int, written: int, before: tuple[int, int] = before) -> None:
                progress(before[0] + answers, len(jobs), before[1] + written)

            _write(path, shard, _answer(config, target, drafter, shard, generator, advance), target)
        size = _sizes(path)
        answered, tokens, stopped = (
            answered + len(shard),
            tokens + size["answer_tokens"],
            stopped + size["stopped"],
        )
        progress(answered, len(jobs), tokens)
        if config.max_tokens is not None and tokens >= config.max_tokens:
            break
    stage.finish({"answers": answered, "answer_tokens": tokens, "ended_by_stop": stopped})


def _answer(
    config: DistillConfig,
    target: Target,
    drafter: Plain,
    jobs: list[tuple[Row, float]],
    generator: torch.Generator,
    advance: Callable[[int, int], None],
) -> list[Generation]:
    """Each job's answer. advance is called with (answers finished, tokens written) after each of them."""
    limits = Limits(config.max_new_tokens, target.stop_tokens)
    answers = [Generation() for _ in jobs]
    finished = written = 0
    for temperature in sorted({t for _, t in jobs}):
        # Long prompts first: none is left to run alone at the end.
        at = [i for i, (_, t) in enumerate(jobs) if t == temperature]
        at.sort(key=lambda i: -len(jobs[i][0].prompt))
        prompts = [jobs[i][0].prompt for i in at]
        steps = stream(
            target,
            drafter,
            prompts,
            limits,
            Sampling(temperature),
            generator,
            rows=config.batch_size,
            keep_features=config.features,
        )
        for step in steps:
            answer = answers[at[step.row]]
            answer.tokens += step.tokens
            answer.finish, answer.features = step.finish, step.features
            written += len(step.tokens)
            if step.finish:
                finished += 1
                advance(finished, written)
    return answers


def _write(path: Path, batch: list[tuple[Row, float]], answers: list[Generation], target: Target) -> None:
    texts = [row.prompt + answer.tokens for (row, _), answer in zip(batch, answers, strict=True)]
    tensors = {
        "tokens": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "prompt_lengths": torch.tensor([len(row.prompt) for row, _ in batch], dtype=torch.int32),
    }
    if answers[0].features is not None:
        stacked = [answer.features for answer in answers if answer.features is not None]
        features = torch.cat(stacked)
        # Half precision where the values fit it: some models have residual streams beyond its range.
        narrow = features.half()
        tensors["features"] = (narrow if bool(narrow.isfinite().all()) else features.float()).cpu()
        tensors["feature_lengths"] = torch.tensor([len(f) for f in stacked], dtype=torch.int32)
    counts = {
        "answer_tokens": str(sum(len(answer.tokens) for answer in answers)),
        "stopped": str(sum(answer.finish == "stop" for answer in answers)),
    }
    lines = []
    for (row, temperature), answer in zip(batch, answers, strict=True):
        record: dict[str, Any] = {"id": row.id, "domain": row.domain, "temperature": temperature}
        record |= {"finish": answer.finish, "answer": target.tokenizer.decode(answer.tokens)}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    write_text(path.with_suffix(".jsonl"), "".join(lines))  # for people; training reads the ids
    write_by(path, lambda temporary: save_file(tensors, temporary, metadata=counts))


def _sizes(path: Path) -> dict[str, int]:
    with safe_open(path, framework="pt") as file:
        return {key: int(value) for key, value in file.metadata().items()}


def read_texts(folder: Path) -> list[Text]:
    """All texts of a distilled folder, in a fixed order."""
    texts = []
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            keys = set(file.keys())
            lengths = file.get_tensor("lengths").tolist()
            tokens = file.get_tensor("tokens").long().split(lengths)
            prompts = file.get_tensor("prompt_lengths").tolist()
            features: tuple[Tensor | None, ...] = (None,) * len(lengths)
            if "features" in keys:
                features = file.get_tensor("features").split(file.get_tensor("feature_lengths").tolist())
        texts += [Text(t, p, f) for t, p, f in zip(tokens, prompts, features, strict=True)]
    return texts
