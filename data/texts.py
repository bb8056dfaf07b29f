"""Training texts on disk: ids, which of them are to be learned, and where their features are kept.

A shard is one safetensors file: "tokens" of all its texts one after another, "lengths", and the supervised spans of
each. Features are read when they are asked for, so a folder larger than memory can be trained on.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.artifact import write_by
from specdec.errors import UserError

Span = tuple[int, int]
FEATURES = "features"


@dataclass(frozen=True)
class Stored:
    """Rows start..stop of a file's "features" [N, S, D], one row per position of a text from its first on."""

    path: Path
    start: int
    stop: int

    def read(self) -> Tensor:
        return _opened(self.path, self.path.stat().st_mtime_ns).get_slice(FEATURES)[self.start : self.stop]


@dataclass(frozen=True)
class Text:
    """One training text.

    tokens: ids [T]. spans: (first, end) of each supervised part, ascending: an answer with its end-of-turn token.
    features: [F, S, D] of positions 0 to F - 1 with F ≤ T, where they lie on disk, or None where they are computed
    when needed.
    """

    tokens: Tensor
    spans: tuple[Span, ...]
    features: Tensor | Stored | None = None
    domain: str = ""

    def mask(self) -> Tensor:
        """bool [T]: true at tokens to predict."""
        mask = torch.zeros(len(self.tokens), dtype=torch.bool)
        for start, end in self.spans:
            mask[start:end] = True
        return mask

    def stored(self) -> Tensor | None:
        """Its features, read from disk if they are there."""
        return self.features.read() if isinstance(self.features, Stored) else self.features

    @property
    def supervised(self) -> int:
        return sum(end - start for start, end in self.spans)


def write_texts(path: Path, texts: Sequence[Text], metadata: Mapping[str, str]) -> None:
    """A shard of texts, whole or not at all; features go along where the texts have them in memory."""
    domains = sorted({text.domain for text in texts})
    tensors: dict[str, Tensor] = {
        "tokens": torch.cat([torch.zeros(0, dtype=torch.int32), *(text.tokens.int() for text in texts)]),
        "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int32),
        "spans": torch.tensor([span for text in texts for span in text.spans], dtype=torch.int32).reshape(-1, 2),
        "span_counts": torch.tensor([len(text.spans) for text in texts], dtype=torch.int32),
        "domains": torch.tensor([domains.index(text.domain) for text in texts], dtype=torch.int32),
    }
    kept = [text.features for text in texts if isinstance(text.features, Tensor)]
    if kept:
        tensors[FEATURES] = torch.cat(kept).cpu().contiguous()
        counts = [len(text.features) if isinstance(text.features, Tensor) else 0 for text in texts]
        tensors["feature_lengths"] = torch.tensor(counts, dtype=torch.int32)
    names = {f"domain.{number}": name for number, name in enumerate(domains)}
    write_by(path, lambda temporary: save_file(tensors, temporary, metadata={**metadata, **names}))


def shard_path(folder: Path, number: int) -> Path:
    """Where a folder keeps its shard of that number."""
    return folder / f"shard-{number:05d}.safetensors"


def read_texts(folder: Path) -> list[Text]:
    """All texts of a folder of shards, in a fixed order."""
    return [text for path in sorted(folder.glob("shard-*.safetensors")) for text in read_shard(path)]


def read_shard(path: Path) -> list[Text]:
    """The texts of one shard; features stay on disk."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        metadata = file.metadata()
        lengths = file.get_tensor("lengths").tolist()
        tokens = file.get_tensor("tokens").long().split(lengths)
        spans = file.get_tensor("spans").split(file.get_tensor("span_counts").tolist())
        domains = [metadata[f"domain.{number}"] for number in file.get_tensor("domains").tolist()]
        kept = file.get_tensor("feature_lengths").tolist() if FEATURES in names else [0] * len(lengths)
    texts, at = [], 0
    for ids, parts, domain, count in zip(tokens, spans, domains, kept, strict=True):
        features = Stored(path, at, at + count) if count else None
        texts.append(Text(ids, tuple((start, end) for start, end in parts.tolist()), features, domain))
        at += count
    return texts


def metadata_of(path: Path) -> dict[str, str]:
    """What a shard's writer noted beside its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata())
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); remove it to have it made again") from error


@functools.lru_cache(maxsize=64)
def _opened(path: Path, _: int) -> Any:
    return safe_open(path, framework="pt").__enter__()
