"""capture: the features a drafter reads of every training text, on disk, for a target too large to run beside training.

One safetensors file per shard of texts: "features" [N, S, D], text after text, "lengths" (rows of each) and "digests"
(of the ids each was computed from). A file gets its name once a sample of it was read back and computed again, so what
an interrupt leaves is whole and right. Texts beyond the quota are left to the fit step.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.artifact import MANIFEST, Stage, write_by
from data.texts import FEATURES, Stored, Text, shard_path
from specdec.errors import UserError, nearest
from specdec.target import Tap, Target

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GB = 1e9
DIGEST = 16  # bytes
BYTES_A_TEXT = DIGEST + 4  # beside its features: its digest and its length


@dataclass(frozen=True)
class CaptureConfig:
    """conf/config.yaml, `capture`."""

    enabled: bool = False
    """Store the features of all training texts before fitting; false computes them in each step."""
    dtype: str = "bfloat16"
    """What they are stored in: bfloat16, float16 or float32."""
    quota_gb: float = 20.0
    """Most that is stored, in GB of 1e9 bytes; texts beyond it are computed in each step."""
    batch_size: int = 8
    """Texts the target reads at a time."""
    shard_size: int = 256
    """Texts per file, which is held in memory until it is written; what an interrupt may lose."""
    verify: float = 0.01
    """Share of the stored texts that are computed again, alone, and compared; at least one per file."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise UserError(f"capture.dtype: '{self.dtype}' is not one of {known}.{nearest(self.dtype, DTYPES)}")
        if not self.quota_gb > 0:
            raise UserError(
                f"capture.quota_gb must be more than 0, got {self.quota_gb}; capture.enabled=false stores nothing"
            )
        for name in ("batch_size", "shard_size"):
            if getattr(self, name) < 1:
                raise UserError(f"capture.{name} must be 1 or more, got {getattr(self, name)}")
        if not 0 <= self.verify <= 1:
            raise UserError(f"capture.verify must be from 0 to 1, got {self.verify}")


@dataclass(frozen=True)
class Plan:
    """What will be stored: the first `fitting` of `texts`. tokens: feature rows of all texts."""

    texts: int
    fitting: int
    tokens: int
    bytes: int
    bytes_in_all: int
    bytes_a_token: int
    free_bytes: int
    quota_gb: float

    def describe(self) -> str:
        """One line for the user."""
        some = f"{self.fitting} of {self.texts} texts ({_in_words(self.bytes)}) fit"
        return (
            f"capture: {_in_words(self.bytes_in_all)} for {self.tokens:,} tokens ".replace(",", " ")
            + f"({self.bytes_a_token} bytes a token); "
            + (f"all {self.texts} texts fit" if self.fitting == self.texts else some)
            + f" capture.quota_gb={self.quota_gb:g}; {_in_words(self.free_bytes)} free"
        )


def rows_of(text: Text) -> int:
    """Features that are read of a text: positions 0 to (end of its last span) - 2, whose row scores the last label."""
    return max(text.spans[-1][1] - 1, 0) if text.spans else 0


def predict(texts: Sequence[Text], taps: int, width: int, dtype: str) -> int:
    """Bytes that all texts would take; files have a header of some hundred bytes on top."""
    return sum(map(rows_of, texts)) * _bytes_a_token(taps, width, dtype) + BYTES_A_TEXT * len(texts)


def plan(config: CaptureConfig, texts: Sequence[Text], taps: int, width: int, free_bytes: int) -> Plan:
    """The texts, from the first on, that fit the quota. Raises UserError where the disk has no room for them."""
    each = _bytes_a_token(taps, width, config.dtype)
    ends = list(itertools.accumulate(rows_of(text) * each + BYTES_A_TEXT for text in texts))
    fitting = sum(end <= config.quota_gb * GB for end in ends)
    needed = ends[fitting - 1] if fitting else 0
    if needed > free_bytes:
        raise UserError(
            f"capture needs {_in_words(needed)} and {_in_words(free_bytes)} are free: set capture.quota_gb to less "
            f"than {free_bytes / GB:.3g}, or capture.enabled=false to compute features in each step"
        )
    tokens, in_all = sum(map(rows_of, texts)), ends[-1] if ends else 0
    return Plan(len(texts), fitting, tokens, needed, in_all, each, free_bytes, config.quota_gb)


Progress = Callable[[int, int, int], None]
"""Called with (texts done, texts in all that will be stored, bytes so far)."""


def capture(
    config: CaptureConfig,
    texts: Sequence[Text],
    target: Target,
    taps: tuple[Tap, ...],
    stage: Stage,
    say: Callable[[str], None],
    progress: Progress,
) -> None:
    """Store the features of the texts that fit, into shards.

    Raises UserError where the disk is too small, a value does not fit the dtype, or a shard does not hold what the
    target computes; that shard is not kept.
    """
    before = sum(path.stat().st_size for path in stage.folder.glob("shard-*.safetensors"))
    planned = plan(config, texts, len(taps), target.width, shutil.disk_usage(stage.folder).free + before)
    say(planned.describe())
    done = size = 0
    for number, start in enumerate(range(0, planned.fitting, config.shard_size)):
        some = texts[start : min(start + config.shard_size, planned.fitting)]
        shard = _Shard(shard_path(stage.folder, number), number, start, some)
        if not shard.path.is_file():
            features = _computed(shard, config, target, taps)
            write_by(shard.path, functools.partial(_write, shard, features, config.verify, target, taps))
        done += len(some)
        size += shard.path.stat().st_size
        progress(done, planned.fitting, size)
    made = {"texts": len(texts), "stored": done, "bytes": size, "bytes_a_token": planned.bytes_a_token}
    stage.finish({**made, "taps": [str(tap) for tap in taps], "dtype": config.dtype})


def attach(texts: Sequence[Text], folder: Path) -> list[Text]:
    """The same texts with the features that lie in a finished stage's folder; those not stored stay as they are.

    Raises UserError where the folder was made from other texts.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise UserError(f"{folder} is not finished; add capture to stages")
    counts = json.loads(manifest.read_text())["counts"]
    again = "redo=[capture] makes it again"
    if counts["texts"] != len(texts):
        raise UserError(f"{folder} was made from {counts['texts']} texts, not from these {len(texts)}; {again}")
    out: list[Text] = []
    for number in itertools.count():
        if len(out) >= counts["stored"]:
            break
        path = shard_path(folder, number)
        if not path.is_file():
            raise UserError(f"{path} is missing; {again}")
        with safe_open(path, framework="pt") as file:
            lengths, digests = file.get_tensor("lengths").tolist(), file.get_tensor("digests")
        at = 0
        for text, length, mark in zip(texts[len(out) : len(out) + len(lengths)], lengths, digests, strict=True):
            if length != rows_of(text) or not torch.equal(mark, digest(text)):
                raise UserError(f"{path} was made from other texts: text {len(out)} differs; {again}")
            out.append(replace(text, features=Stored(path, at, at + length)) if length else text)
            at += length
    return out + list(texts[len(out) :])


def digest(text: Text) -> Tensor:
    """uint8 [16] over a text's ids."""
    ids = text.tokens.long().numpy().tobytes()
    return torch.tensor(list(hashlib.blake2b(ids, digest_size=DIGEST).digest()), dtype=torch.uint8)


@dataclass(frozen=True)
class _Shard:
    """first: the number of its first text among all."""

    path: Path
    number: int
    first: int
    texts: Sequence[Text]

    @functools.cached_property
    def places(self) -> list[tuple[int, int]]:
        """(start, stop) of each text's rows."""
        ends = list(itertools.accumulate(map(rows_of, self.texts)))
        return list(itertools.pairwise([0, *ends]))

    @property
    def filled(self) -> list[int]:
        """The texts that have rows."""
        return [which for which, (start, stop) in enumerate(self.places) if stop > start]


def _computed(shard: _Shard, config: CaptureConfig, target: Target, taps: tuple[Tap, ...]) -> Tensor:
    """[N, S, D] of a shard's texts in their order; those of similar length are read together."""
    dtype = DTYPES[config.dtype]
    out = torch.empty(shard.places[-1][1], len(taps), target.width, dtype=dtype)
    order = sorted(shard.filled, key=lambda which: -rows_of(shard.texts[which]))
    for at in range(0, len(order), config.batch_size):
        together = order[at : at + config.batch_size]
        tokens = torch.zeros(len(together), rows_of(shard.texts[together[0]]), dtype=torch.long)
        for row, which in enumerate(together):
            count = rows_of(shard.texts[which])
            tokens[row, :count] = shard.texts[which].tokens[:count]
        found = target.features(tokens.to(target.device), taps)
        for row, which in enumerate(together):
            start, stop = shard.places[which]
            exact = found[row, : stop - start]
            rounded = exact.to(dtype)
            if not rounded.isfinite().all():
                raise UserError(_does_not_fit(shard.first + which, exact, config.dtype))
            out[start:stop] = rounded
    return out


def _does_not_fit(number: int, exact: Tensor, dtype: str) -> str:
    if not exact.isfinite().all():
        return f"text {number}: the target computes features that are not finite; try target.dtype=bfloat16 or float32"
    largest, most = exact.abs().max().item(), torch.finfo(DTYPES[dtype]).max
    return (
        f"text {number}: a feature of {largest:.4g} does not fit capture.dtype={dtype} (at most {most:.4g}); "
        "set capture.dtype=bfloat16"
    )


def _write(shard: _Shard, features: Tensor, share: float, target: Target, taps: tuple[Tap, ...], path: Path) -> None:
    """Write a shard to `path` and read some of it back."""
    digests = torch.stack([digest(text) for text in shard.texts])
    lengths = torch.tensor([rows_of(text) for text in shard.texts], dtype=torch.int32)
    save_file({FEATURES: features, "lengths": lengths, "digests": digests}, path)
    order = torch.randperm(len(shard.filled), generator=torch.Generator().manual_seed(shard.number))
    with safe_open(path, framework="pt") as file:
        digests, rows = file.get_tensor("digests"), file.get_slice(FEATURES)
        for which in (shard.filled[i] for i in order[: max(1, round(share * len(order)))].tolist()):
            start, stop = shard.places[which]
            name = f"{shard.path.name}, text {shard.first + which}"
            text = shard.texts[which]
            if not torch.equal(digests[which], digest(text)):
                raise UserError(f"{name}: its ids are not those it was computed from; the shard was removed")
            alone = target.features(text.tokens[None, : stop - start].to(target.device), taps)[0].cpu()
            _compare(rows[start:stop], features[start:stop], alone, taps, name)


def _compare(read: Tensor, written: Tensor, alone: Tensor, taps: tuple[Tap, ...], name: str) -> None:
    """Raise UserError unless rows [F, S, D] read back are what was written, and what the text gives alone.

    Alone, a text is added up in another order than in a batch: its features differ by some roundings of the target's
    dtype, which grow from layer to layer (SmolLM2, 30 layers: 2 % of a row's norm in bfloat16, 2e-6 in float32), and
    at single positions altogether, where a router is nearly undecided. Rows of another text, position or layer, or
    ones that see other rows, differ by about their norm. So 9 of 10 positions must agree to half the digits of the
    target's dtype (0.18, 7e-4), besides the rounding to the dtype of the file.
    """
    limit = torch.finfo(read.dtype).eps + 2 * torch.finfo(alone.dtype).eps ** 0.5
    exact = alone.double()
    difference = read.double() - exact
    size = exact.norm(dim=-1).clamp(min=torch.finfo(torch.double).tiny)
    typical = (difference.norm(dim=-1) / size).sort(0).values[int(0.9 * (len(read) - 1))]
    same = (read == written).flatten(2).all(-1).all(0)
    wrong = ~(typical <= limit) | ~same  # NaN is wrong as well
    if wrong.any():
        tap = int(wrong.nonzero()[0])
        largest = difference[:, tap].abs().max().item()
        what = "differs from what the target computes for it alone" if same[tap] else "was not read back as written"
        raise UserError(
            f"{name}: tap {taps[tap]} {what} (largest difference {largest:.3g}); the shard was removed. "
            "Try again, with capture.batch_size=1, or set capture.enabled=false"
        )


def _bytes_a_token(taps: int, width: int, dtype: str) -> int:
    return taps * width * DTYPES[dtype].itemsize


def _in_words(size: float) -> str:
    return f"{size / GB:.2f} GB" if size >= GB / 10 else f"{size / 1e6:.2f} MB"
