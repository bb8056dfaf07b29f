"""From a conversation to ids and supervised spans, through the tokenizer's own chat template.

A training text is built as serving builds it: the ids of the rendered prompt, and behind them the ids of the answer
with its end of turn. The next turn goes into the same text only while its prompt begins with exactly these ids;
templates that drop earlier reasoning start another text. So nothing is ever looked up in a rendered string, and the ids
trained on are the ids a server reads.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.formats import BadRow, Message
from specdec.errors import UserError

TEMPLATE, DROPPED, NO_ANSWER = "refused by the chat template", "dropped by the chat template", "no answer"
Ids = list[int]


@dataclass(frozen=True)
class Exchange:
    """A rendered prompt up to the answer's header, and the answer with its end of turn."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Piece:
    """A training text: ids, and the (first, end) of each answer in them."""

    tokens: Ids
    spans: tuple[tuple[int, int], ...]


class Template:
    """A tokenizer's chat template. options: what it is rendered with beside the messages, e.g. enable_thinking.

    system: the system prompt of conversations that have none. Raises UserError where the tokenizer has no template.
    """

    def __init__(self, tokenizer: Any, options: dict[str, Any] | None = None, system: str | None = None) -> None:
        if tokenizer.chat_template is None:
            raise UserError("the target's tokenizer has no chat template; use an instruction-tuned target")
        self.tokenizer, self.options, self.system = tokenizer, options or {}, system
        for name in self.options:
            if name not in str(tokenizer.chat_template):
                raise UserError(f"data.chat_template: the target's chat template reads no option '{name}'")

    # -- text --------------------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, answer_follows: bool = False) -> str:
        """The conversation as the template writes it. Raises BadRow where the template objects."""
        try:
            return self.tokenizer.apply_chat_template(
                self.opened(messages),
                tools=tools,
                add_generation_prompt=answer_follows,
                tokenize=False,
                **self.options,
            )
        except Exception as error:  # templates are code: whatever one raises is about this row
            raise BadRow(TEMPLATE, " ".join(str(error).split()) or type(error).__name__) from error

    def opened(self, messages: Sequence[Message]) -> list[Message]:
        """The turns with the system prompt they are rendered with."""
        turns = list(messages)
        if self.system is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self.system})
        return turns

    def exchanges(
        self, messages: Sequence[Message], tools: list[Any] | None = None, most: int | None = None
    ) -> list[Exchange]:
        """Every assistant turn as an exchange, up to the first prompt of more than `most` letters. Raises BadRow."""
        found: list[Exchange] = []
        for k, message in enumerate(messages):
            if message["role"] == "assistant":
                if "content" not in message:
                    raise BadRow(NO_ANSWER, f"turn {k + 1} has no content")
                prompt = self.render(messages[:k], tools, answer_follows=True)
                if found and most is not None and len(prompt) > most:
                    break
                found.append(Exchange(prompt, self._answer(messages[: k + 1], prompt, tools)))
        if not found:
            raise BadRow(NO_ANSWER, "there is no assistant turn")
        return found

    def _answer(self, messages: Sequence[Message], prompt: str, tools: list[Any] | None) -> str:
        """What the assistant wrote last, as it would come out of the target: words, reasoning, calls, end of turn."""
        message, said = messages[-1], messages[-1].get("content") or ""
        whole = self.render(messages, tools)
        plain = not message.get("tool_calls") and not message.get("reasoning_content")
        if not whole.startswith(prompt):
            if not plain:
                raise BadRow(DROPPED, "the answer does not follow the prompt that serving would render")
            return said + self._end
        body = whole[len(prompt) :].rstrip()
        if not body.endswith(self._end):
            body += self._end
        self._check_kept(message, body)
        inner = body.removesuffix(self._end)
        content = next((words for words in (said, said.strip()) if inner.endswith(words)), None)
        if plain and content is not None and inner.removesuffix(content).strip():
            # Whole conversations get a text that no serving prompt has (an empty <think> block). It belongs to the
            # answer only where the prompt is not continued by the words alone: that shows in how history is rendered.
            history = self.render([*messages, {"role": "user", "content": "x"}], tools)
            if history.startswith(prompt + content):
                return content + self._end
        return body

    def _check_kept(self, message: Message, body: str) -> None:
        for call in message.get("tool_calls") or []:
            if call["function"]["name"] not in body:
                raise BadRow(DROPPED, "the template leaves out tool_calls")
        reasoning = (message.get("reasoning_content") or "").strip()
        if reasoning and reasoning not in body:
            raise BadRow(DROPPED, "the template leaves out reasoning_content")

    @functools.cached_property
    def _end(self) -> str:
        """What follows the assistant's words: the end of turn, without the line break some templates add."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "PROBE"}]
        rest = self.render(messages).rpartition("PROBE")[2].rstrip()
        if not rest and not self.tokenizer.eos_token:
            raise UserError("the chat template ends an answer with nothing and the tokenizer has no end token")
        return rest or self.tokenizer.eos_token

    # -- ids ---------------------------------------------------------------------------------------------------

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of rendered texts, many at once; templates write their own special tokens."""
        return self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []

    def prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> Ids:
        """Ids up to and including the header of the answer. Raises BadRow."""
        return self.encode([self.render(messages, tools, answer_follows=True)])[0]

    def pieces(self, rows: Sequence[Sequence[Exchange]]) -> list[list[Piece]]:
        """The training texts of each row's exchanges, all encoded together."""
        prompts = self.encode([one.prompt for row in rows for one in row])
        wholes = self.encode([one.prompt + one.answer for row in rows for one in row])
        answers = []
        for at, one in enumerate(one for row in rows for one in row):
            size = len(prompts[at])
            # Where the prompt's last token would melt into the answer, serving still stops between the two.
            melted = wholes[at][:size] != prompts[at]
            answers.append(self.encode([one.answer])[0] if melted else wholes[at][size:])
        out, at = [], 0
        for row in rows:
            end = at + len(row)
            out.append(joined(list(zip(prompts[at:end], answers[at:end], strict=True))))
            at = end
        return out

    def ids(self, exchanges: Sequence[Exchange]) -> list[Piece]:
        """The training texts of one conversation."""
        return self.pieces([exchanges])[0]

    def check_serving(self, messages: Sequence[Message], tools: list[Any] | None, tokens: Ids) -> None:
        """Raises UserError unless tokens are what a server gets from apply_chat_template for the same conversation."""
        served = self.tokenizer.apply_chat_template(
            self.opened(messages), tools=tools, add_generation_prompt=True, return_dict=True, **self.options
        )["input_ids"]
        if list(served) != tokens:
            shorter = min(len(served), len(tokens))
            at = next((i for i in range(shorter) if served[i] != tokens[i]), shorter)
            ours, theirs = (self.tokenizer.decode(ids[at : at + 8]) for ids in (tokens, served))
            raise UserError(
                f"the ids to train on differ from those serving renders, from position {at} on: {ours!r} instead of "
                f"{theirs!r}"
            )


def joined(exchanges: Sequence[tuple[Ids, Ids]]) -> list[Piece]:
    """(prompt, answer) ids in order to texts: one goes on as long as the next prompt begins with all of it."""
    pieces: list[Piece] = []
    for prompt, answer in exchanges:
        spans: tuple[tuple[int, int], ...] = ((len(prompt), len(prompt) + len(answer)),)
        if pieces and prompt[: len(pieces[-1].tokens)] == pieces[-1].tokens:
            spans = pieces.pop().spans + spans
        pieces.append(Piece(prompt + answer, spans))
    return pieces


def tokenizer_hash(tokenizer: Any) -> str:
    """Of everything that turns a conversation into ids: vocabulary, merges, special tokens, chat template."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{rules}\0{tokenizer.chat_template}".encode()).hexdigest()[:16]
