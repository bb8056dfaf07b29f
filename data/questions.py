"""What a conversation asks: its turns up to an answer, and the conversation with its answers left to be written."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from data.chat import Template
from data.formats import BadRow, Message, parse
from data.sources import Source, bundled

TO_WRITE: Message = {"role": "assistant"}
"""A turn that is to be answered."""


def to_answer(messages: list[Message]) -> list[Message]:
    """The conversation with its answers left to be written: assistant turns lose their words, the last ones go.

    A turn whose tool calls were answered stays as it is: the results that follow belong to it.
    """
    turns = list(messages)
    while turns[-1]["role"] == "assistant":
        turns.pop()
    last = len(turns) - 1
    return [
        TO_WRITE if turn["role"] == "assistant" and turns[min(i + 1, last)]["role"] != "tool" else turn
        for i, turn in enumerate(turns)
    ]


def asked(messages: Sequence[Message]) -> list[Message]:
    """The turns before the first answer that is to be written."""
    return list(itertools.takewhile(lambda turn: turn != TO_WRITE, messages))


def spoken(messages: Sequence[Message]) -> list[Message]:
    """The turns before the assistant first speaks."""
    return list(itertools.takewhile(lambda turn: turn["role"] != "assistant", messages))


def first_questions(source: Source, template: Template, count: int) -> list[tuple[list[Message], Any, list[int]]]:
    """(turns before the first answer, tools, ids) of the first usable conversations of a source."""
    found: list[tuple[list[Message], Any, list[int]]] = []
    for record in itertools.islice(source.records(), 10 * count):
        with contextlib.suppress(BadRow):
            example = parse(record.row or {}, source.config.mapping, source.config.format)
            if example.messages is not None and len(found) < count:
                turns = asked(to_answer(example.messages))
                found.append((turns, example.tools, template.prompt(turns, example.tools)))
    return found


def bundled_prompts(template: Template, domain: str, split: str) -> list[list[int]]:
    """Ids of the shipped prompts of a domain, in order, each up to its first answer."""
    rows = [record.row for record in bundled(domain, split).records() if record.row is not None]
    return [template.prompt(asked(to_answer(parse(row, {}).messages or []))) for row in rows]
