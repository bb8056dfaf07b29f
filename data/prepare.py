"""prepare: prompts to token ids, split into training and held-out, one jsonl file each."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.artifact import Stage, write_text
from data.chat import prompt_ids
from data.sources import Prompt, bundled, bundled_domains, read_jsonl, split_heldout
from specdec.errors import UserError


@dataclass(frozen=True)
class DataConfig:
    """conf/data/*.yaml: what the drafter is trained for."""

    domains: list[str] = field(default_factory=lambda: ["maths"])
    """Bundled domains to train on; with `path`, the one name its rows get when they have no `domain`."""
    path: str | None = None
    """A jsonl file of prompts instead of the bundled ones."""
    heldout_path: str | None = None
    """Held-out prompts for `path`; null holds out `heldout` of its rows."""
    heldout: int = 30
    """Rows of `path` to hold out."""
    limit: int | None = None
    """Use at most this many training prompts of each domain."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out, and counted."""

    def __post_init__(self) -> None:
        if not self.domains:
            raise UserError(f"data.domains is empty; bundled domains: {', '.join(bundled_domains())}")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"data.limit must be 1 or more, got {self.limit}")
        if self.heldout < 1 or self.max_prompt_tokens < 1:
            raise UserError("data.heldout and data.max_prompt_tokens must be 1 or more")
        if self.path is None and self.heldout_path is not None:
            raise UserError("data.heldout_path needs data.path: bundled domains have held-out prompts of their own")
        if self.path is not None and len(self.domains) > 1:
            raise UserError(f"data.domains: with data.path it names that file's one domain, got {self.domains}")


@dataclass(frozen=True)
class Row:
    """A prepared prompt."""

    id: str
    domain: str
    prompt: list[int]


def load_prompts(config: DataConfig) -> tuple[list[Prompt], list[Prompt]]:
    """(train, heldout). Held-out prompts of every bundled domain come along, to measure transfer.

    Raises UserError for anything wrong in a file; loads no model.
    """
    transfer = [prompt for domain in bundled_domains() for prompt in bundled(domain, "heldout")]
    if config.path is None:
        train = [prompt for domain in config.domains for prompt in bundled(domain, "train")]
        heldout = transfer
    else:
        train = read_jsonl(Path(config.path), config.domains[0])
        if config.heldout_path is not None:
            heldout = read_jsonl(Path(config.heldout_path), config.domains[0])
        else:
            train, heldout = split_heldout(train, config.heldout)
        heldout = heldout + [prompt for prompt in transfer if prompt.domain not in {p.domain for p in heldout}]
    if config.limit is not None:
        domains = dict.fromkeys(prompt.domain for prompt in train)
        train = [p for d in domains for p in [q for q in train if q.domain == d][: config.limit]]
    counts = Counter(prompt.id for prompt in [*train, *heldout])
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise UserError(
            f"prompt id '{repeated[0]}' is there {counts[repeated[0]]} times; ids must differ, or be left out"
        )
    return train, heldout


def prepare(config: DataConfig, tokenizer: Any, window: int, stage: Stage) -> None:
    """Write train.jsonl and heldout.jsonl into the stage's folder.

    Raises UserError when no training or no held-out prompt fits.
    """
    longest = min(config.max_prompt_tokens, window - 1)
    counts: dict[str, Any] = {}
    for name, prompts in zip(("train", "heldout"), load_prompts(config), strict=True):
        rows = [Row(p.id, p.domain, prompt_ids(tokenizer, p.messages, p.id)) for p in prompts]
        fitting = [row for row in rows if len(row.prompt) <= longest]
        if not fitting:
            raise UserError(
                f"data.max_prompt_tokens: none of the {len(rows)} {name} prompts has {longest} tokens or fewer"
            )
        write_text(stage.folder / f"{name}.jsonl", "".join(json.dumps(vars(row)) + "\n" for row in fitting))
        counts |= {name: len(fitting), f"{name}_too_long": len(rows) - len(fitting)}
    stage.finish(counts)


def read_rows(folder: Path, split: str) -> list[Row]:
    """Rows that prepare() wrote; split is 'train' or 'heldout'."""
    lines = (folder / f"{split}.jsonl").read_text().splitlines()
    return [Row(**json.loads(line)) for line in lines]
