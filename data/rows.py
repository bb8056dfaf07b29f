"""Prepared rows on disk: one JSON line each, read by number without loading the file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from data.formats import Message


@dataclass(frozen=True)
class Row:
    """One prepared conversation.

    prompt: ids up to the first answer's header. messages: the whole conversation, where there is more to answer than
    the first turn. texts: what is trained on as it was recorded: [[ids, spans], …]; writer: who wrote it, if known.
    """

    id: str
    domain: str
    prompt: list[int]
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    texts: list[Any] | None = None
    writer: str | None = None

    def line(self) -> str:
        """As it is written."""
        kept = {key: value for key, value in vars(self).items() if value is not None}
        return json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n"


class Rows(Sequence[Row]):
    """The rows of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        ends, total = [], 0
        with path.open("rb") as file:
            for line in file:
                total += len(line)
                ends.append(total)
        self.starts = np.array([0, *ends], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        with self.path.open("rb") as file:
            file.seek(int(self.starts[index]))
            return Row(**json.loads(file.read(int(self.starts[index + 1] - self.starts[index]))))


def read_rows(folder: Path, split: str) -> Rows:
    """What prepare() wrote; split is 'train' or 'heldout'."""
    return Rows(folder / f"{split}.jsonl")
