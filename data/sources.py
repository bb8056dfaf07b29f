"""Where rows come from: the bundled prompts, files, folders, saved data sets and hub ids.

`datasets` reads parquet, arrow and the hub; text files (json, csv) are read in records.py, which goes on behind what is
broken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.formats import FORMATS, check_mapping
from data.records import Record, lost, read_csv, read_json
from specdec.errors import UserError, nearest

BUNDLED = Path(__file__).parent / "prompts"
JSON = (".json", ".jsonl", ".ndjson")
CSV = (".csv", ".tsv")
TABLES = {".parquet": "parquet", ".arrow": "arrow"}
PACKED = (".gz", ".bz2", ".xz")


@dataclass(frozen=True)
class SourceConfig:
    """One entry of data.sources."""

    path: str
    """A json, jsonl, csv, tsv, parquet or arrow file, a folder of such files, a folder of Dataset.save_to_disk, or a
    hub id."""
    domain: str | None = None
    """Label of rows that carry none; null: the file's name."""
    weight: float | None = None
    """Share of the training rows, relative to the other sources' weights; null in all of them takes every row."""
    format: str = "auto"
    """auto, or one of data.formats.FORMATS."""
    mapping: dict[str, str] = field(default_factory=dict)
    """Names of our fields in its rows, e.g. {prompt: question, completion: answer}."""
    split: str | None = None
    """Of a hub id or saved data set, e.g. train[:10%]; null: train."""
    subset: str | None = None
    """Of a hub id: its configuration."""
    streaming: bool = False
    """Hub ids: read while downloading, never the whole."""
    rows: int | None = None
    """Read no more than this many rows."""

    def __post_init__(self) -> None:
        if self.format != "auto" and self.format not in FORMATS:
            known = ("auto", *FORMATS)
            raise UserError(
                f"data.format: '{self.format}' is not one of {', '.join(known)}.{nearest(self.format, known)}"
            )
        check_mapping(self.mapping)
        if self.weight is not None and not 1e-6 <= self.weight <= 1e6:
            raise UserError(f"data.sources: the weight of {self.path} must be from 1e-6 to 1e6, got {self.weight}")
        if self.rows is not None and self.rows < 1:
            raise UserError(f"data.sources: the rows of {self.path} must be 1 or more, got {self.rows}")


class Source:
    """A source that was found. files: what it is read from, empty for a hub id or saved data set."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config
        self.path = Path(config.path).expanduser()
        self.files: list[Path] = []
        self.skipped = 0
        """Other files in the folder."""
        self.saved = any((self.path / name).is_file() for name in ("state.json", "dataset_dict.json"))
        if not config.path.strip():
            raise UserError("data.path is empty")
        if self.path.is_file():
            self.files = [self.path]
        elif self.path.is_dir() and not self.saved:
            self.files = sorted(path for path in self.path.rglob("*") if _is_data(path.relative_to(self.path), path))
            if not self.files:
                raise UserError(f"data.path: folder {self.path} holds no json, jsonl, csv, tsv, parquet or arrow file")
            everything = [path for path in self.path.rglob("*") if not path.is_dir()]
            self.skipped = len(everything) - len(self.files)
        elif not self.saved and not _looks_like_hub(config.path):
            raise UserError(f"data.path: no file {config.path}, nor a folder, nor a hub id (OWNER/NAME)")
        for path in self.files:
            if lost(str(path)):
                raise UserError(f"data.path: the name of {path!r} is not UTF-8; rename it")
        if self.files and (config.split or config.subset or config.streaming):
            raise UserError(f"data.path: {config.path} is read from files; split, subset and streaming do not apply")
        if self.saved and (config.subset or config.streaming):
            raise UserError(f"data.path: {config.path} is a saved data set; subset and streaming do not apply")
        for path in self.files:
            if _kind(path) is None:
                raise UserError(f"data.path: {path} has no known ending ({', '.join((*JSON, *CSV, *TABLES))})")

    @property
    def domain(self) -> str:
        """What rows without a domain are called."""
        return self.config.domain or self.path.name.split(".")[0]

    @property
    def size(self) -> int | None:
        """Bytes that Record.read counts up to, where it is known."""
        kinds = {_kind(path) for path in self.files}
        plain = kinds == {"json"} and not any(path.suffix in PACKED for path in self.files)
        return sum(path.stat().st_size for path in self.files) if plain else None

    def content(self) -> str:
        """A hash of what it holds; of a hub id only its name."""
        digest = hashlib.sha256(str((self.config.split, self.config.subset, self.config.rows)).encode())
        for path in self.files or sorted(self.path.rglob("*") if self.saved else []):
            if path.is_file():
                digest.update(str(path.relative_to(self.path)).encode() + b"\0")
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:16] if self.files or self.saved else self.config.path

    def records(self) -> Iterator[Record]:
        """Every record, in order; `where` names the file when there are several."""
        count = before = 0
        for path in self.files or [self.path]:
            for record in _READERS.get(_kind(path) or "", self._table)(path):
                if count == self.config.rows:
                    return
                count += 1
                where = f"{path.name}, {record.where}" if len(self.files) > 1 else record.where
                yield Record(where, record.row, record.reason, record.detail, before + record.read)
            before += path.stat().st_size if self.files else 0

    def _table(self, path: Path) -> Iterator[Record]:
        """Rows as `datasets` gives them. Raises UserError where it cannot."""
        try:
            for number, row in enumerate(self._opened(path), 1):
                yield Record(f"row {number}", dict(row))
        except UserError:
            raise
        except Exception as error:  # its loaders raise what their parsers raise
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"data.path: `datasets` cannot read {self.config.path}: {first}") from error

    def _opened(self, path: Path) -> Any:
        import datasets  # pandas and pyarrow come along: seconds, and only tables need them

        datasets.disable_progress_bars()
        config = self.config
        if self.saved:
            found = datasets.load_from_disk(str(self.path))
            name, _, part = (config.split or "train").partition("[")
            if isinstance(found, datasets.DatasetDict):
                if name not in found:
                    raise UserError(f"data.split: {self.path} has no split '{name}'; it has {', '.join(found)}")
                found = found[name]
            elif name != "train":
                raise UserError(f"data.split: {self.path} is one data set without splits, got '{config.split}'")
            if part:
                raise UserError("data.split: a saved data set is read whole; use `rows` for a part")
            return found
        if not self.files:
            return datasets.load_dataset(
                config.path, config.subset, split=config.split or "train", streaming=config.streaming
            )
        kind = _kind(path)
        assert kind is not None
        return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)


_READERS = {"json": read_json, "csv": read_csv}


def _kind(path: Path) -> str | None:
    name = path.with_suffix("") if path.suffix in PACKED else path
    if name.suffix.lower() in JSON:
        return "json"
    return "csv" if path.suffix.lower() in CSV else TABLES.get(path.suffix.lower())


def _is_data(inside: Path, path: Path) -> bool:
    return path.is_file() and _kind(path) is not None and not any(part.startswith(".") for part in inside.parts)


def _looks_like_hub(path: str) -> bool:
    if path.startswith((".", "/", "~")) or _kind(Path(path)) or path.count("/") > 1:
        return False
    return "/" in path or not Path(path).suffix


def bundled_domains() -> list[str]:
    """The domains the project ships prompts for."""
    return sorted(path.name.removesuffix("-train.jsonl") for path in BUNDLED.glob("*-train.jsonl"))


def bundled(domain: str, split: str) -> Source:
    """Shipped prompts of a domain; split is 'train' or 'heldout'. Raises UserError for an unknown domain."""
    if domain not in bundled_domains():
        known = bundled_domains()
        raise UserError(
            f"data.domains: '{domain}' is not a bundled domain ({', '.join(known)}).{nearest(domain, known)} "
            "For prompts of your own: data=jsonl data.path=FILE"
        )
    return Source(SourceConfig(str(BUNDLED / f"{domain}-{split}.jsonl"), domain))
