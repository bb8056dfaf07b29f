"""Stopping: where a row ends, token by token, also inside an accepted run and across round boundaries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.errors import UserError


@dataclass(frozen=True)
class Limits:
    """When a row ends. The token that ends it is emitted; nothing after it is.

    max_new_tokens: most tokens. min_new_tokens: no stop token may come before this many. stop_tokens: ids that end a
    row. stop_strings: texts that end it as soon as the answer contains one.
    """

    max_new_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be 1 or more, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise UserError(
                f"min_new_tokens must be from 0 to max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            )
        if "" in self.stop_strings:
            raise UserError("stop_strings holds an empty string, which would end every answer at once")


@dataclass
class Stopper:
    """One row's progress. left: tokens it may still emit; tokens: emitted so far."""

    limits: Limits
    left: int
    tokenizer: Any = None
    tokens: list[int] = field(default_factory=list)
    finish: str = ""

    def take(self, run: list[int]) -> list[int]:
        """Append a run and return the part that is emitted; `finish` says why the row ended, if it did."""
        taken: list[int] = []
        for token in run[: self.left]:
            taken.append(token)
            self.tokens.append(token)
            self.left -= 1
            if token in self.limits.stop_tokens:
                self.finish = "stop"
            elif self.limits.stop_strings and len(self.tokens) >= self.limits.min_new_tokens and self._text_stops():
                self.finish = "stop_string"
            elif self.left == 0:
                self.finish = "length"
            if self.finish:
                break
        return taken

    def _text_stops(self) -> bool:
        # A token is at least one byte, so a string of n bytes lies within the last n tokens; a few more keep a
        # multi-byte character whole.
        window = max(len(text.encode()) for text in self.limits.stop_strings) + 8
        text = self.tokenizer.decode(self.tokens[-window:], skip_special_tokens=False)
        return any(stop in text for stop in self.limits.stop_strings)
