"""JSON text to records, one broken record at a time: what `datasets` cannot do, since it gives up the whole file.

A file is either lines of JSON or one array (the usual ShareGPT dump, often gigabytes); both are read as a stream. What
cannot be read becomes a record with a reason and its place, and reading goes on behind it.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from specdec.errors import UserError

BROKEN, BROKEN_ROW, CUT, NOT_OBJECT, ENCODING, NUL = (
    "broken JSON",
    "broken row",
    "cut off",
    "not an object",
    "not UTF-8",
    "NUL byte",
)
CHUNK = 1 << 20
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
MOST_KEYS = 64
LONGEST = 1 << 26  # characters of one record: what is longer is broken, not unfinished
_SPACE = re.compile(r"[\s,\[\]]*")  # also brackets: a file may hold several arrays, or lines behind one
_KEY = re.compile(r'\{\s*("[^"]*")\s*:')


@dataclass(frozen=True)
class Record:
    """One record of a source: its row, or why there is none. where: "line 3" or "row 3"; read: bytes so far."""

    where: str
    row: dict[str, Any] | None
    reason: str = ""
    detail: str = ""
    read: int = 0


def read_json(path: Path) -> Iterator[Record]:
    """The records of a .json or .jsonl file, also compressed ones (.gz, .bz2, .xz).

    Raises UserError where it cannot be decompressed at all.
    """
    read = count = 0
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            start = _sniffed(file)
            if start.startswith(_UTF16):
                yield Record("line 1", None, ENCODING, "the file is UTF-16; save it as UTF-8")
                return
            begin = len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0
            file.seek(begin)
            lines = start[begin:].lstrip()[:1] != b"["
            for record in _lines(file, begin) if lines else _Array(file, begin).records():
                read, count = record.read, count + 1
                yield record
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        if not count:
            raise UserError(f"{path} cannot be decompressed: {error}") from error
        yield Record(f"record {count + 1}", None, CUT, f"the compressed file ends early: {error}", read)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _sniffed(file: BinaryIO) -> bytes:
    """Some bytes of the beginning, however little of a compressed file is there."""
    start = b""
    while len(start) < 4096 and (byte := file.read(1)):
        start += byte
        if start.strip(b"\xef\xbb\xbf \t\r\n") and len(start) >= 4:
            break
    return start


def read_csv(path: Path) -> Iterator[Record]:
    """The rows of a .csv or .tsv file; every cell is the text it is: 007 stays 007, NA stays NA.

    A quote that is never closed costs its own row: reading goes on with the next line.
    """
    csv.field_size_limit(LONGEST)
    with path.open("rb") as file:
        if file.read(2) in _UTF16:
            yield Record("line 1", None, ENCODING, "the file is UTF-16; save it as UTF-8")
            return
    names: list[str] | None = None
    skip = 0  # lines before this one are done with
    while True:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            rows = csv.reader(
                itertools.islice(file, skip, None), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True
            )
            first = skip
            while True:
                begin = first + rows.line_num
                where = f"line {begin + 1}"
                try:
                    cells = next(rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    yield Record(where, None, BROKEN_ROW, str(error))
                    skip = begin + 1
                    break
                if not cells:
                    continue
                if first + rows.line_num > begin + 1:
                    where = f"lines {begin + 1} to {first + rows.line_num}"
                if names is None:
                    names = cells
                elif len(cells) != len(names):
                    yield Record(where, None, BROKEN_ROW, f"{len(cells)} cells, the header has {len(names)}")
                    if first + rows.line_num > begin + 1:  # perhaps a quote closed by another row's
                        skip = begin + 1
                        break
                elif any(map(lost, cells)):
                    yield Record(where, None, ENCODING, "a byte that is not UTF-8")
                else:
                    yield Record(where, dict(zip(names, cells, strict=True)))


def lost(text: str) -> bool:
    """Whether a byte of it could not be decoded."""
    return not text.isascii() and any("\udc80" <= letter <= "\udcff" for letter in text)


def _lines(file: BinaryIO, begin: int) -> Iterator[Record]:
    end = begin
    for number, line in enumerate(file, 1):
        start, end = end, end + len(line)
        if not line.strip():
            continue
        where = f"line {number}"
        cut = Record(where, None, CUT, f"the file ends at byte {end}, within a record begun at {start}", end)
        if b"\0" in line:
            yield Record(where, None, NUL, f"at byte {start + line.index(0)}", end)
            continue
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            # The last bytes may be the first half of a character.
            half = error.reason == "unexpected end of data"
            yield cut if half else Record(where, None, ENCODING, f"at byte {start + error.start}", end)
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            broken = Record(where, None, BROKEN, f"{error.msg} at column {error.colno}", end)
            yield broken if line.endswith(b"\n") else cut
            continue
        except (RecursionError, ValueError) as error:  # nested too deeply; a number of thousands of digits
            yield Record(where, None, BROKEN, str(error), end)
            continue
        yield _checked(where, row, end)


def _checked(where: str, row: Any, read: int) -> Record:
    if isinstance(row, dict):
        return Record(where, row, read=read)
    return Record(where, None, NOT_OBJECT, f"a {type(row).__name__}", read)


class _Array:
    """One JSON array as a stream. text[at:] is what is read and not yet used; byte and line are those of `at`."""

    def __init__(self, file: BinaryIO, byte: int) -> None:
        self.file, self.byte, self.line = file, byte, 1
        self.text, self.at, self.ended, self.size = "", 0, False, CHUNK
        self.decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self.open = 0
        """Brackets that are not closed yet."""
        self.keys: dict[str, None] = {}
        """Keys of the records so far, as JSON: where one is broken, the next begins with one of them."""

    def records(self) -> Iterator[Record]:
        scan = json.JSONDecoder().raw_decode
        self._fill()
        while self._next():
            if not self.keys and (match := _KEY.match(self.text, self.at)):
                self.keys[match[1]] = None
            where = f"line {self.line}"
            try:
                row, end = scan(self.text, self.at)
            except json.JSONDecodeError as error:
                # An error at the very end of what was read may only mean that the rest is still to come.
                unfinished = error.pos >= len(self.text) - 16 or error.msg.startswith("Unterminated")
                if unfinished and not self.ended and len(self.text) - self.at < LONGEST:
                    self._fill()
                elif unfinished and self.ended:
                    yield Record(where, None, CUT, self._cut(), self.byte)
                    return
                else:
                    nul = self.text[error.pos : error.pos + 1] == "\0"
                    detail = f"{error.msg} at byte {self._byte_of(error.pos)}"
                    yield Record(where, None, NUL if nul else BROKEN, detail, self.byte)
                    self._skip()
                continue
            except (RecursionError, ValueError) as error:  # nested too deeply; a number of thousands of digits
                yield Record(where, None, BROKEN, f"{error} at byte {self.byte}", self.byte)
                self._skip()
                continue
            piece = self.text[self.at : end]
            self._use(end)
            if isinstance(row, dict) and len(self.keys) < MOST_KEYS:
                self.keys |= dict.fromkeys(map(json.dumps, row))
            yield self._sound(where, row, piece)
        if self.open:
            detail = f"the file ends at byte {self.byte}, without its closing ]"
            yield Record(f"line {self.line}", None, CUT, detail, self.byte)

    def _sound(self, where: str, row: Any, piece: str) -> Record:
        if lost(piece):
            return Record(where, None, ENCODING, f"within the record ending at byte {self.byte}", self.byte)
        return _checked(where, row, self.byte)

    def _fill(self) -> None:
        data = self.file.read(self.size)
        self.size = min(2 * self.size, LONGEST) if self.at == 0 and self.text else CHUNK
        self.ended = not data
        self.text, self.at = self.text[self.at :] + self.decode(data, final=self.ended), 0

    def _next(self) -> bool:
        """Move to the next record; false at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            for letter in match[0]:
                self.open = max(0, self.open + (letter == "[") - (letter == "]"))
            self._use(match.end())
            if self.at < len(self.text):
                return True
            if self.ended:
                return False
            self._fill()

    def _skip(self) -> None:
        """Move behind a broken record: to the next object that begins with a key that records have."""
        keys = "|".join(map(re.escape, self.keys)) or '"'
        begin = re.compile(r"[,}\]]\s*(?=\{\s*(?:" + keys + r")\s*:)")
        start = self.at + 1
        while True:
            if match := begin.search(self.text, start):
                self._use(match.end())
                return
            if self.ended:
                self._use(len(self.text))
                self.open = 0  # the broken record has been told
                return
            self._use(max(self.at, len(self.text) - 4096))  # a record may begin across two pieces
            self._fill()
            start = 0

    def _use(self, end: int) -> None:
        used = self.text[self.at : end]
        self.byte += len(used) if used.isascii() else len(used.encode("utf-8", "surrogateescape"))
        self.line += used.count("\n")
        self.at = end

    def _byte_of(self, position: int) -> int:
        return self.byte + len(self.text[self.at : position].encode("utf-8", "surrogateescape"))

    def _cut(self) -> str:
        return f"the file ends at byte {self._byte_of(len(self.text))}, within a record begun at {self.byte}"
