"""Prompts: the bundled ones and a user's own jsonl file, checked row by row.

A row is {"messages": [...]} in chat form, ending with a user turn, or {"prompt": "..."}; `id` and `domain` are
optional in a user's file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import UserError, nearest

BUNDLED = Path(__file__).parent / "prompts"
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    """One conversation waiting for its answer."""

    id: str
    domain: str
    messages: list[dict[str, str]]


def bundled_domains() -> list[str]:
    """The domains the project ships prompts for."""
    return sorted(path.name.removesuffix("-train.jsonl") for path in BUNDLED.glob("*-train.jsonl"))


def bundled(domain: str, split: str) -> list[Prompt]:
    """Shipped prompts of a domain; split is 'train' or 'heldout'. Raises UserError for an unknown domain."""
    if domain not in bundled_domains():
        known = bundled_domains()
        raise UserError(
            f"data.domains: '{domain}' is not a bundled domain ({', '.join(known)}).{nearest(domain, known)} "
            "For prompts of your own: data=jsonl data.path=FILE.jsonl"
        )
    return read_jsonl(BUNDLED / f"{domain}-{split}.jsonl", domain)


def read_jsonl(path: Path, domain: str) -> list[Prompt]:
    """All rows of a file. Raises UserError naming the file and line of the first bad row, or an empty file."""
    if not path.is_file():
        raise UserError(f"data.path: no file {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    rows = [
        _row(line, f"{path}, line {number}", f"{path.stem}-{number}", domain)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not rows:
        raise UserError(f'{path}: the file is empty; each line is one prompt, e.g. {{"prompt": "What is 2 + 2?"}}')
    return rows


def split_heldout(prompts: list[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """(train, heldout): `count` prompts chosen by the hash of their text, the same in every run.

    Equal prompts land on the same side. Raises UserError when nothing would be left to train on.
    """
    ranked = sorted(prompts, key=lambda p: hashlib.sha256(json.dumps(p.messages).encode()).hexdigest())
    cut = len({json.dumps(p.messages) for p in ranked})
    if count >= cut:
        raise UserError(f"data.heldout: {count} held-out prompts leave nothing to train on ({cut} different prompts)")
    chosen: set[str] = set()
    for prompt in ranked:
        if len(chosen) == count:
            break
        chosen.add(json.dumps(prompt.messages))
    train = [p for p in prompts if json.dumps(p.messages) not in chosen]
    return train, [p for p in prompts if json.dumps(p.messages) in chosen]


def _row(line: str, where: str, fallback_id: str, domain: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with 'messages' or 'prompt', got {type(row).__name__}")
    if "messages" in row:
        messages = _messages(row["messages"], where)
    elif isinstance(row.get("prompt"), str) and row["prompt"].strip():
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        raise UserError(f"{where}: needs 'messages' (a list of turns) or 'prompt' (text); it has {sorted(row)}")
    name, own_domain = row.get("id"), row.get("domain")
    return Prompt(
        fallback_id if name is None else str(name), domain if own_domain is None else str(own_domain), messages
    )


def _messages(turns: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: 'messages' must be a list of turns with at least one")
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            raise UserError(f"{where}: turn {number} needs 'role' and a text 'content'")
        if turn.get("role") not in ROLES:
            raise UserError(f"{where}: turn {number} has role '{turn.get('role')}', expected {', '.join(ROLES)}")
    # What the assistant is recorded to have said last is not the target's own text: the target answers anew.
    while turns and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    if not turns or turns[-1]["role"] != "user" or not turns[-1]["content"].strip():
        raise UserError(f"{where}: there is no user turn to answer")
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]
