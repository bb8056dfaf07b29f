"""Rows to the training and the held-out file: held out by the hash of their content, mixed by weight."""

from __future__ import annotations

import heapq
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.artifact import write_by, write_text
from data.rows import Row, read_rows
from specdec.errors import UserError

if TYPE_CHECKING:
    from data.prepare import DataConfig


class Split:
    """Takes rows as they come; finish() writes the files. Only held-out candidates are kept in memory."""

    def __init__(self, config: DataConfig, folder: Path, weights: list[float | None]) -> None:
        self.config, self.folder, self.weights = config, folder, weights
        self.holds = config.own and config.heldout_path is None
        self.paths = [folder / f".train-{number}.partial" for number in range(len(weights))]
        self.files = [path.open("w", encoding="utf-8") for path in self.paths]
        self.written: Counter[int] = Counter()
        self.domains: Counter[str] = Counter()
        self.limited = 0
        # Per domain the rows of the lowest marks: (-mark, number of the source, line).
        self.held: dict[str, list[tuple[int, int, str]]] = {}
        self.rows: Counter[str] = Counter()

    def add(self, source: int, row: Row, mark: int) -> None:
        self.rows[row.domain] += 1
        if not self.holds:
            self._train(source, row.domain, row.line())
            return
        heap = self.held.setdefault(row.domain, [])
        entry = (-mark, source, row.line())
        if len(heap) < self.config.heldout:
            heapq.heappush(heap, entry)
        else:
            _, number, line = heapq.heappushpop(heap, entry)
            self._train(number, row.domain, line)

    def _train(self, source: int, domain: str, line: str) -> None:
        if self.config.limit is not None and self.domains[domain] >= self.config.limit:
            self.limited += 1
            return
        self.domains[domain] += 1
        self.written[source] += 1
        self.files[source].write(line)

    def finish(self, others: list[Row]) -> dict[str, Any]:
        """Write train.jsonl and heldout.jsonl; counts. others: held-out rows of other files."""
        held: list[str] = []
        for domain, heap in self.held.items():
            heap.sort(reverse=True)  # lowest marks first
            most = min(self.config.heldout, self.rows[domain] // 3)
            held += [line for _, _, line in heap[:most]]
            for _, source, line in heap[most:]:
                self._train(source, domain, line)
        for file in self.files:
            file.close()
        own = len(held)
        held += [row.line() for row in others]
        taken = self._mix()
        trained = sum(taken)
        if not trained:
            raise UserError(
                f"there is nothing to train on: {sum(self.rows.values())} rows could be used; "
                "dry_run=true shows what becomes of them"
            )
        if not held:
            raise UserError("there is nothing held out to measure on; give more rows, or data.heldout_path")
        write_text(self.folder / "heldout.jsonl", "".join(held))
        counts = {"train": trained, "heldout": len(held), "heldout_of_these_rows": own}
        counts["left_out"] = sum(self.rows.values()) - own - trained
        domains = self.domains
        if any(self.weights):
            domains = Counter(row.domain for row in read_rows(self.folder, "train"))
        return {**counts, "domains": dict(sorted(domains.items()))}

    def _mix(self) -> list[int]:
        """train.jsonl from the sources' files; with weights, as many rows as keep the proportions without repeating."""
        counts = [self.written[number] for number in range(len(self.paths))]
        taken = counts
        weights = [weight for weight in self.weights if weight is not None]
        if weights:
            scale = min(count / weight for count, weight in zip(counts, weights, strict=True))
            taken = [int(weight * scale + 1e-9) for weight in weights]

        def write(path: Path) -> None:
            with path.open("wb") as out:
                for source, count, most in zip(self.paths, counts, taken, strict=True):
                    with source.open("rb") as lines:
                        if most == count:
                            shutil.copyfileobj(lines, out)
                            continue
                        for number, line in enumerate(lines):  # spread evenly over the source
                            if number * most // count != (number + 1) * most // count:
                                out.write(line)

        write_by(self.folder / "train.jsonl", write)
        for path in self.paths:
            path.unlink()
        return taken
