"""Rows to the training and the held-out file: held out by what is asked, mixed by weight, limited by domain."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.artifact import write_by, write_text
from data.rows import Row
from specdec.errors import UserError

if TYPE_CHECKING:
    from data.prepare import DataConfig


class Split:
    """Takes rows as they come, into a file for each source; finish() decides. Per row only numbers stay in memory.

    sources: (name, weight) of each.
    """

    def __init__(self, config: DataConfig, folder: Path, sources: list[tuple[str, float | None]]) -> None:
        self.config, self.folder, self.sources = config, folder, sources
        self.paths = [folder / f".train-{number}.partial" for number in range(len(sources))]
        self.files = [path.open("w", encoding="utf-8") for path in self.paths]
        self.marks = [array("Q") for _ in sources]
        self.domains = [array("L") for _ in sources]
        self.lengths = [array("L") for _ in sources]
        self.names: dict[str, int] = {}

    def add(self, source: int, row: Row, mark: int) -> None:
        """mark: the hash of what is asked; all rows of one mark go to the same side."""
        self.files[source].write(row.line())
        self.marks[source].append(mark)
        self.lengths[source].append(len(row.prompt))
        self.domains[source].append(self.names.setdefault(row.domain, len(self.names)))

    def trained_marks(self) -> set[int]:
        return {mark for marks in self.marks for mark in marks}

    def finish(self, others: list[Row], hold: bool) -> dict[str, Any]:
        """Write train.jsonl and heldout.jsonl; counts. others: held-out rows of other files; hold: also of these."""
        for file in self.files:
            file.close()
        held = self._held() if hold else set()
        used = self._mix([[mark not in held for mark in marks] for marks in self.marks])
        firsts: dict[int, str] = {}
        trained: Counter[str] = Counter()
        names, prompt_tokens = list(self.names), 0

        def write(path: Path) -> None:
            nonlocal prompt_tokens
            with path.open("w", encoding="utf-8") as out:
                for source, number, line in self._lines():
                    mark = self.marks[source][number]
                    if mark in held:
                        firsts.setdefault(mark, line)
                    elif used[source][number]:
                        domain = names[self.domains[source][number]]
                        if self.config.limit is None or trained[domain] < self.config.limit:
                            trained[domain] += 1
                            prompt_tokens += self.lengths[source][number]
                            out.write(line)

        write_by(self.folder / "train.jsonl", write)
        count, total = sum(map(len, self.marks)), trained.total()
        if not total:
            raise UserError(
                f"there is nothing to train on: {count} rows could be used, {len(firsts)} of them held out; "
                "dry_run=true shows what becomes of them"
            )
        lines = [firsts[mark] for mark in sorted(firsts)] + [row.line() for row in others]
        if not lines:
            raise UserError("there is nothing held out to measure on; give more rows, or data.heldout_path")
        write_text(self.folder / "heldout.jsonl", "".join(lines))
        for path in self.paths:
            path.unlink()
        counts = {"train": total, "heldout": len(lines), "heldout_of_these_rows": len(firsts)}
        counts["left_out"] = count - len(firsts) - total
        counts["prompt_tokens"] = prompt_tokens
        return {**counts, "domains": dict(sorted(trained.items()))}

    def _held(self) -> set[int]:
        """The lowest marks of each domain: the same rows in every run, whatever their order."""
        distinct: dict[int, set[int]] = {}
        for marks, domains in zip(self.marks, self.domains, strict=True):
            for mark, domain in zip(marks, domains, strict=True):
                distinct.setdefault(domain, set()).add(mark)
        most = self.config.heldout
        return {mark for found in distinct.values() for mark in sorted(found)[: min(most, len(found) // 3)]}

    def _mix(self, free: list[list[bool]]) -> list[list[bool]]:
        """Which of the free rows are used; with weights, as many as keep the proportions without repeating a row."""
        weights = [weight for _, weight in self.sources if weight is not None]
        if not weights:
            return free
        counts = [sum(rows) for rows in free]
        for (name, _), count in zip(self.sources, counts, strict=True):
            if not count:
                raise UserError(f"data.sources: {name} has no row to train on, so there is nothing to weigh")
        scale = min(count / weight for count, weight in zip(counts, weights, strict=True))
        out = []
        for (name, _), rows, count, weight in zip(self.sources, free, counts, weights, strict=True):
            most, number, used = int(weight * scale + 1e-9), 0, []
            if not most:
                raise UserError(f"data.sources: with these weights not one of the {count} rows of {name} is used")
            for row in rows:  # spread evenly over the source
                used.append(row and number * most // count != (number + 1) * most // count)
                number += row
            out.append(used)
        return out

    def _lines(self) -> Iterator[tuple[int, int, str]]:
        for source, path in enumerate(self.paths):
            with path.open(encoding="utf-8", newline="\n") as file:
                for number, line in enumerate(file):
                    yield source, number, line
