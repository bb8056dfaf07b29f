"""Records to prepared rows, a batch at a time: parsed, rendered, encoded together, measured; or rejected by reason."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.audit import Shares
from data.chat import NO_ANSWER, Exchange, Piece, Template
from data.formats import EMPTY, BadRow, Example, Message, parse
from data.questions import asked, spoken, to_answer
from data.records import ENCODING, Record
from data.rows import Row
from data.sources import Source
from specdec.errors import UserError

if TYPE_CHECKING:
    from data.prepare import DataConfig

TOO_LONG, DUPLICATE, OUTSIDE, UNEXPECTED = "too long", "duplicate", "id outside the vocabulary", "unexpected"
BATCH = 256
LETTERS = 100
"""No prompt has more letters a token; longer ones are not even encoded."""
CHECKED = 20
"""Prompts of each source whose ids are compared with what serving renders."""


@dataclass
class Draft:
    """A row on its way: what was read, and what of it is to be encoded. start: the turns before the first answer."""

    where: str
    example: Example
    messages: list[Message] | None = None
    start: list[Message] = field(default_factory=list)
    prompt: str = ""
    exchanges: list[Exchange] | None = None


class Intake:
    """Counts as it goes. recorded: train on the answers that are there; reject takes a line of rejects.jsonl."""

    def __init__(
        self,
        config: DataConfig,
        template: Template,
        window: int,
        recorded: bool,
        reject: Callable[[str], Any],
    ) -> None:
        self.config, self.template, self.window = config, template, window
        self.recorded, self._reject = recorded, reject
        self.count = self.read = self.cut = 0
        self.rejected: Counter[str] = Counter()
        self.formats: Counter[str] = Counter()
        self.writers: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.shares = Shares()
        self.seen: set[int] = set()
        self.ids: set[int] = set()
        self._vocabulary = len(template.tokenizer)
        self._first: dict[str, str] = {}

    def rows(self, source: Source) -> Iterator[list[tuple[Row, int]]]:
        """Batches of (row, mark) of a source; the mark is a hash of the first prompt, case and spaces aside."""
        self.read, checks = 0, itertools.count()
        for records in _batches(source.records()):
            drafts = []
            for record in records:
                self.count += 1
                self.read = record.read
                try:
                    drafts.append(self._draft(record, source))
                except BadRow as bad:
                    self._note(source, record.where, bad, record.row)
                except UnicodeEncodeError as error:
                    self._note(source, record.where, BadRow(ENCODING, f"half a character: {error.reason}"), None)
                except Exception as error:  # a row nobody thought of must not end the run; it is counted and shown
                    unexpected = BadRow(UNEXPECTED, f"{type(error).__name__}: {error}")
                    self._note(source, record.where, unexpected, record.row)
            out = []
            prompts = iter(self.template.encode([one.prompt for one in drafts if one.prompt]))
            pieces = iter(self.template.pieces([one.exchanges for one in drafts if one.exchanges]))
            for draft in drafts:
                ids = next(prompts) if draft.prompt else []
                texts = next(pieces) if draft.exchanges else []
                try:
                    row = self._row(draft, source, ids, texts)
                except BadRow as bad:
                    self._note(source, draft.where, bad, None)
                    continue
                if draft.messages and next(checks) < CHECKED:
                    self.template.check_serving(draft.start, draft.example.tools, row.prompt)
                self.formats[draft.example.format] += 1
                out.append((row, _prompt_mark(draft, row)))
            yield out

    def _draft(self, record: Record, source: Source) -> Draft:
        if record.row is None:
            raise BadRow(record.reason, record.detail)
        example = parse(record.row, source.config.mapping, source.config.format)
        draft = Draft(record.where, example)
        content: Any = example.text or example.tokens
        if example.messages is not None:
            draft.messages = content = example.messages if self.recorded else to_answer(example.messages)
            start = draft.start = spoken(draft.messages) if self.recorded else asked(draft.messages)
            if self.recorded:
                most = LETTERS * self.config.max_tokens
                draft.exchanges = self.template.exchanges(example.messages, example.tools, most)
                prompt = draft.exchanges[0].prompt
            else:
                draft.prompt = prompt = self.template.render(start, example.tools, answer_follows=True)
            if len(prompt) > LETTERS * max(self.config.max_prompt_tokens, self.config.max_tokens):
                raise BadRow(TOO_LONG, f"the prompt has {len(prompt)} letters")
            for text in [prompt, *(one.answer for one in draft.exchanges or [])]:
                text.encode()  # half a character may hide in a tool's description
            self._look_for_dropped(start, example.tools, prompt)
        mark = _hash([content, example.tools])
        if mark in self.seen:
            raise BadRow(DUPLICATE, "the same was there before")
        self.seen.add(mark)
        return draft

    def _look_for_dropped(self, messages: Sequence[Message], tools: list[Any] | None, text: str) -> None:
        """Count what a template leaves out of the prompt; serving leaves it out as well."""
        for message in messages:
            if message["role"] == "system" and message["content"].strip() not in text:
                self.dropped["system"] += 1
            if any(call["function"]["name"] not in text for call in message.get("tool_calls") or []):
                self.dropped["tool_calls"] += 1
        names = [tool.get("function", tool).get("name") for tool in tools or [] if isinstance(tool, dict)]
        if any(isinstance(name, str) and name not in text for name in names):
            self.dropped["tools"] += 1

    def _row(self, draft: Draft, source: Source, prompt: list[int], texts: list[Piece]) -> Row:
        example = draft.example
        if example.messages is None:
            prompt, texts = self._plain(example)
        if self.recorded:
            texts = self._fitting(texts, whole_turns=example.text is None)
            first = texts[0]
            prompt = first.tokens[: max(1, first.spans[0][0])]
        elif len(prompt) > min(self.config.max_prompt_tokens, self.window - 1):
            raise BadRow(TOO_LONG, f"the prompt has {len(prompt)} tokens")
        name = example.id or f"{source.domain}-{draft.where.removeprefix('line ').removeprefix('row ')}"
        base = name
        while _hash(name) in self.ids:
            name = f"{base}.{len(self.ids)}" if name == base else f"{name}'"
        self.ids.add(_hash(name))
        domain = example.domain or source.domain
        if self.recorded:
            self.writers[example.writer or ""] += 1
            for text in texts:
                self.shares.add(domain, len(text.tokens), sum(end - start for start, end in text.spans))
            return Row(name, domain, prompt, texts=[[t.tokens, t.spans] for t in texts], writer=example.writer)
        more = draft.messages is not None and len(asked(draft.messages)) < len(draft.messages)
        if more:
            return Row(name, domain, prompt, draft.messages, example.tools)
        return Row(name, domain, prompt)

    def _plain(self, example: Example) -> tuple[list[int], list[Piece]]:
        """(prompt, texts) of a text or of ids."""
        tokenizer, spans = self.template.tokenizer, example.spans
        if example.text is not None:
            if len(example.text) > LETTERS * self.config.max_tokens * 10:
                raise BadRow(TOO_LONG, f"the text has {len(example.text)} letters")
            special = not (tokenizer.bos_token and example.text.startswith(tokenizer.bos_token))
            tokens = tokenizer(example.text, add_special_tokens=special)["input_ids"]
            spans = ((1, len(tokens)),) if len(tokens) > 1 else ()
        else:
            tokens = example.tokens or []
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
                raise BadRow(OUTSIDE, f"{max(tokens)}; the tokenizer has {self._vocabulary}")
        if not tokens:
            raise BadRow(EMPTY, "there are no tokens")
        if self.recorded and not spans:
            raise BadRow(NO_ANSWER, "no token is supervised")
        begin = spans[0][0] if spans and spans[0][0] > 1 else self.config.text_prompt_tokens
        return tokens[:begin], [Piece(tokens, spans)]

    def _fitting(self, pieces: list[Piece], whole_turns: bool) -> list[Piece]:
        """Texts of at most the longest length: cut after the last answer that fits, a plain text anywhere, or
        rejected."""
        longest = min(self.config.max_tokens, self.window)
        sizes = [len(piece.tokens) for piece in pieces]
        if max(sizes) <= longest:
            return pieces
        if self.config.too_long == "reject":
            raise BadRow(TOO_LONG, f"{max(sizes)} tokens")
        kept = []
        for piece in pieces:
            spans = tuple((a, min(b, longest)) for a, b in piece.spans if b <= longest or not whole_turns)
            if spans:
                kept.append(Piece(piece.tokens[: spans[-1][1]], spans))
        if not kept:
            raise BadRow(TOO_LONG, f"the first answer ends after {pieces[0].spans[0][1]} tokens")
        self.cut += 1
        return kept

    # -- counts ------------------------------------------------------------------------------------------------

    def _note(self, source: Source, where: str, bad: BadRow, row: dict[str, Any] | None) -> None:
        self.rejected[bad.reason] += 1
        self._first.setdefault(bad.reason, f"{source.config.path}, {where}: {bad.reason} ({bad.detail})")
        entry = {"source": source.config.path, "where": where, "reason": bad.reason, "detail": bad.detail}
        if row is not None:
            entry["row"] = json.dumps(row, default=str)[:200]
        self._reject(json.dumps(entry) + "\n")

    def reasons(self) -> str:
        """Rejected rows by reason, the commonest first."""
        return ", ".join(f"{reason} {count}" for reason, count in self.rejected.most_common())

    def check_share(self, path: Path) -> None:
        """Raises UserError when more rows were rejected than data.max_rejected allows."""
        bad, most = self.rejected.total(), self.config.max_rejected
        first = next(iter(self._first.values()), "")
        if bad and bad > most * self.count:
            raise UserError(
                f"{first}. In all {bad} of {self.count} rows were rejected ({100 * bad / self.count:.0f} %, "
                f"data.max_rejected is {100 * most:.0f} %): {self.reasons()}. All of them with reasons: {path}"
            )

    def counts(self) -> dict[str, Any]:
        """What a manifest records: rows read, and what became of them."""
        found: dict[str, Any] = {"rows": self.count, "rejected": self.rejected.total()}
        found |= {"reasons": dict(self.rejected.most_common()), "formats": dict(self.formats)}
        if self.recorded:
            found |= {"cut_at_a_turn": self.cut, "writers": dict(self.writers), "supervision": self.shares.counts()}
        return found

    def warnings(self) -> list[str]:
        """What a user should know. Raises UserError when nothing is supervised."""
        found = [
            f"warning: the chat template leaves {name} out of {count} rows (so does serving with it)"
            for name, count in self.dropped.items()
        ]
        if self.rejected:
            found.append(
                f"          {self.rejected.total()} of {self.count} rows rejected, by reason and with the first:"
            )
        for reason, count in self.rejected.most_common():
            found.append(f"            {count:6} {self._first[reason]}")
        return found + (self.shares.check() if self.recorded and self.shares.tokens else [])


def _prompt_mark(draft: Draft, row: Row) -> int:
    """Of what is asked first, so that nothing is measured that is also trained on."""
    if draft.messages is None:
        return _hash(row.prompt)
    asks = [turn["content"] for turn in draft.start]
    return _hash(" ".join(" ".join(asks).split()).casefold())


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    while batch := list(itertools.islice(records, BATCH)):
        yield batch


def _hash(value: Any) -> int:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
