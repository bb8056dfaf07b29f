"""A row of any known layout to one conversation, text or list of ids; what is wrong with a row has a name.

Layouts: ShareGPT `conversations`, OpenAI `messages`, `turns` (questions only, as MT-bench), Alpaca `instruction`,
`prompt` with or without `completion`, plain `text`, and `input_ids` with `loss_mask`. Content is never altered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.records import ENCODING, NUL
from specdec.errors import UserError, nearest

Message = dict[str, Any]
Span = tuple[int, int]

FORMATS: dict[str, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "turns": ("turns",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction",),
    "prompt": ("prompt",),
    "text": ("text",),
}
"""What a row of each layout has; the first that fits is taken."""
FIELDS = (
    *("messages", "conversations", "turns", "prompt", "completion", "instruction", "input", "output"),
    *("text", "input_ids", "loss_mask", "tools", "system", "id", "domain", "model"),
)
KEPT = ("tool_calls", "reasoning_content", "name", "tool_call_id")
"""Fields of a turn that templates read, beside role and content."""
REASONING = ("reasoning_content", "reasoning", "thinking")
_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "function_call"),
    "tool": ("tool", "function", "function_response", "observation"),
}
ROLES = {name: role for role, names in _NAMES.items() for name in names}
EMPTY, ASSISTANT_FIRST, TWICE, ROLE = (
    "empty conversation",
    "assistant turn first",
    "two turns of one role in a row",
    "unknown role",
)
NOT_TEXT, NO_USER, FIELDS_MISSING, SYSTEM_LATE, TOOL_ALONE = (
    "content that is not text",
    "no user turn",
    "missing field",
    "system turn not first",
    "tool turn without a call",
)


class BadRow(Exception):
    """A row that cannot be used: one of the reasons, and what it was."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Example:
    """One row. Exactly one of messages, text and tokens is there.

    messages: turns with role, content and what else a template may read; an assistant turn without content is one to
    be written. spans: the supervised parts of tokens. writer: who wrote the answers, if the row says.
    """

    format: str
    id: str | None
    domain: str | None
    writer: str | None
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    text: str | None = None
    tokens: list[int] | None = None
    spans: tuple[Span, ...] = ()


def check_mapping(mapping: Mapping[str, str]) -> None:
    """Raises UserError for a field we do not know."""
    for key, column in mapping.items():
        if not isinstance(column, str):
            raise UserError(f"data.mapping: {key} must be the name of a column, got {column}")
        if key not in FIELDS:
            raise UserError(
                f"data.mapping: '{key}' is not a field ({', '.join(FIELDS)}).{nearest(key, FIELDS)} "
                "It is {our field: column}, e.g. {prompt: question, completion: answer}"
            )


def format_of(row: Mapping[str, Any], mapping: Mapping[str, str]) -> str | None:
    """The layout a row has, by its fields; None where no known one fits."""
    names = {key for key, value in renamed(row, mapping).items() if value is not None}
    return next((name for name, needed in FORMATS.items() if names.issuperset(needed)), None)


def renamed(row: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
    """The row under our field names. With a mapping, only what it names and the row's id, domain and model."""
    if not mapping:
        return dict(row)
    kept = {key: row[key] for key in ("id", "domain", "model") if key in row}
    return kept | {ours: row[theirs] for ours, theirs in mapping.items() if theirs in row}


def parse(row: Mapping[str, Any], mapping: Mapping[str, str], layout: str = "auto") -> Example:
    """One row as an Example. Raises BadRow."""
    kind = format_of(row, mapping) if layout == "auto" else layout
    if kind is None:
        raise BadRow(FIELDS_MISSING, f"it has {', '.join(sorted(row)) or 'no fields'}")
    found = renamed(row, mapping)
    for name in FORMATS[kind]:
        if found.get(name) is None:
            raise BadRow(FIELDS_MISSING, f"no {mapping.get(name, name)}")
    label, domain, writer = (
        None if found.get(key) is None else _text(str(found[key]), key) for key in ("id", "domain", "model")
    )
    if kind == "turns":  # the names question files use
        label = label if label is not None or row.get("question_id") is None else str(row["question_id"])
        domain = domain if domain is not None or row.get("category") is None else str(row["category"])
    facts = (kind, label, domain, writer)
    if kind == "tokens":
        tokens, spans = _tokens(found)
        return Example(*facts, tokens=tokens, spans=spans)
    if kind == "text":
        return Example(*facts, text=_text(found["text"], "text"))
    messages = checked(_messages(kind, found))
    return Example(*facts, messages=messages, tools=_tools(found.get("tools")))


def _tools(value: Any) -> list[Any] | None:
    tools = _decoded(value) or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow(NOT_TEXT, "tools is not a list of objects")
    for tool in tools or []:
        if not isinstance(tool.get("function", tool), dict):
            raise BadRow(NOT_TEXT, "a tool's function is not an object")
    return tools


def _messages(kind: str, row: dict[str, Any]) -> list[Message]:
    start = [] if not row.get("system") else [{"role": "system", "content": row["system"]}]
    if kind in ("messages", "sharegpt"):
        return start + _turns(row["messages" if kind == "messages" else "conversations"])
    if kind == "turns":
        questions = _decoded(row["turns"])
        if not isinstance(questions, list):
            raise BadRow(NOT_TEXT, f"turns is a {type(questions).__name__}, not a list of questions")
        asked = [{"role": "user", "content": question} for question in questions]
        return start + [turn for question in asked for turn in (question, {"role": "assistant"})][:-1]
    if kind == "alpaca":
        parts = [_text(row["instruction"], "instruction"), _text(row.get("input") or "", "input")]
        turns = [{"role": "user", "content": "\n\n".join(part for part in parts if part)}]
        answer = row.get("output")
        return start + turns + ([] if answer is None else [{"role": "assistant", "content": answer}])
    answer = row.get("completion") if kind == "prompt_completion" else None
    return start + _side(row["prompt"], "user") + ([] if answer is None else _side(answer, "assistant"))


def _side(value: Any, role: str) -> list[Message]:
    found = _decoded(value)
    # A text may happen to be JSON; only a list of turns is taken as one.
    turns = (
        isinstance(found, list) and found and all(isinstance(t, dict) and ("role" in t or "from" in t) for t in found)
    )
    return _turns(found) if turns else [{"role": role, "content": value}]


def _turns(turns: Any) -> list[Message]:
    turns = _decoded(turns)
    if not isinstance(turns, list):
        raise BadRow(NOT_TEXT, f"the conversation is a {type(turns).__name__}, not a list of turns")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise BadRow(NOT_TEXT, f"a turn is a {type(turn).__name__}")
        said = turn.get("role", turn.get("from"))
        if not isinstance(said, str) or said.lower() not in ROLES:
            raise BadRow(ROLE, f"{said!r}, expected system, user, assistant or tool (or ShareGPT's names)")
        extra = {key: turn[key] for key in KEPT if turn.get(key) is not None}
        if reasoning := next((turn[key] for key in REASONING if turn.get(key)), None):
            extra["reasoning_content"] = reasoning
        content = turn.get("content", turn.get("value"))
        message = {"role": ROLES[said.lower()], **({} if content is None else {"content": content}), **extra}
        if said == "function_call":
            message = {"role": "assistant", "content": "", "tool_calls": [{"function": _decoded(content)}]}
        messages.append(message)
    return messages


def checked(messages: list[Message]) -> list[Message]:
    """The turns, if they are a conversation that can be rendered. Raises BadRow."""
    if not messages:
        raise BadRow(EMPTY, "there are no turns")
    before, out = "", []
    for number, message in enumerate(messages, 1):
        role = message["role"]
        where = f"turn {number}"
        if role == "system":
            if before:
                raise BadRow(SYSTEM_LATE, where)
            out.append({**message, "content": _text(message.get("content"), where)})
            continue
        if role == "assistant" and not before:
            raise BadRow(ASSISTANT_FIRST, where)
        if role == before and role != "tool":
            raise BadRow(TWICE, f"{where} is {role}, as the one before")
        if role == "tool" and before not in ("assistant", "tool"):
            raise BadRow(TOOL_ALONE, where)
        before = role
        out.append(_turn(message, where))
    if not before:
        raise BadRow(NO_USER, "there is only a system turn")
    return out


def _turn(message: Message, where: str) -> Message:
    if message["role"] != "assistant":
        content = _text(message.get("content"), where)
        if message["role"] == "user" and not content.strip():
            raise BadRow(EMPTY, f"{where}: the user says nothing")
        return {**message, "content": content}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise BadRow(NOT_TEXT, f"{where}: tool_calls is a {type(calls).__name__}, not a list")
        message = {**message, "tool_calls": [_call(call, where) for call in calls], "content": message.get("content")}
        return {**message, "content": _text(message["content"] or "", where)}
    if message.get("reasoning_content") is not None:
        _text(message["reasoning_content"], where)
    elif message.get("content") is None:
        return {"role": "assistant"}
    return {**message, "content": _text(message.get("content") or "", where)}


def _call(call: Any, where: str) -> Any:
    """A tool call with its arguments as an object, which is what templates expect."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(NOT_TEXT, f"{where}: a tool call without a function name")
    return {"type": "function", **call, "function": {**function, "arguments": _decoded(function.get("arguments", {}))}}


def _text(value: Any, where: str) -> str:
    if isinstance(value, list):  # OpenAI's content parts
        kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in value]
        if not value or any(kind != "text" for kind in kinds):
            raise BadRow(NOT_TEXT, f"{where}: {', '.join(map(str, kinds)) or 'an empty list'}")
        value = "".join(_text(part.get("text"), where) for part in value)
    if not isinstance(value, str):
        raise BadRow(NOT_TEXT, f"{where}: {type(value).__name__}")
    if "\0" in value:
        raise BadRow(NUL, where)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRow(ENCODING, f"{where}: half a character at {error.start}") from error
    return value


def _tokens(row: dict[str, Any]) -> tuple[list[int], tuple[Span, ...]]:
    tokens, mask = _decoded(row["input_ids"]), _decoded(row.get("loss_mask"))
    if mask is None:
        raise BadRow(FIELDS_MISSING, "no loss_mask beside input_ids")
    for name, values in (("input_ids", tokens), ("loss_mask", mask)):
        if not isinstance(values, list) or not all(isinstance(one, int) for one in values):
            raise BadRow(NOT_TEXT, f"{name} is not a list of whole numbers")
    if any(isinstance(one, bool) for one in tokens):
        raise BadRow(NOT_TEXT, "input_ids are true and false")
    if odd := [one for one in mask if one not in (0, 1)]:
        raise BadRow(NOT_TEXT, f"loss_mask holds {odd[0]}; it is 1 at tokens to learn, 0 elsewhere")
    mask = [0, *mask[1:]][: len(mask)]  # nothing stands before the first token to predict it from
    if len(tokens) != len(mask):
        raise BadRow(FIELDS_MISSING, f"{len(tokens)} input_ids but {len(mask)} loss_mask")
    if not tokens:
        raise BadRow(EMPTY, "there are no input_ids")
    edges = [i for i in range(len(mask) + 1) if bool(i < len(mask) and mask[i]) != bool(i and mask[i - 1])]
    return tokens, tuple(zip(edges[::2], edges[1::2], strict=True))


def _decoded(value: Any) -> Any:
    """A list or object that a table keeps as JSON text."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
