"""A ShareGPT file of any size with known faults, for the tests of the data path."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path

SYLLABLES = ("ba", "ko", "mi", "ter", "sul", "an", "da", "ren", "ti", "log")
WORDS = ["".join(pair) for pair in itertools.product(SYLLABLES, SYLLABLES)]

FAULTS = (
    "broken JSON",
    "empty conversation",
    "assistant turn first",
    "two turns of one role in a row",
    "unknown role",
    "content that is not text",
    "too long",
    "duplicate",
    "NUL byte",
    "not UTF-8",
    "not an object",
    "missing field",
)


def conversation(random: random.Random, number: int) -> dict:
    turns = []
    for turn in range(random.choice((1, 1, 2, 3))):
        for speaker, most in (("human", 60), ("gpt", 160)):
            words = random.choices(WORDS, k=random.randint(5, most))
            turns.append({"from": speaker, "value": f"{number}.{turn} " + " ".join(words)})
    return {"id": f"c{number}", "conversations": turns}


def broken(random: random.Random, number: int, fault: str, good: list[bytes]) -> bytes:
    """A line with one fault."""
    row = conversation(random, number)
    turns = row["conversations"]
    if fault == "broken JSON":
        return json.dumps(row).encode()[:-3]
    if fault == "empty conversation":
        row["conversations"] = []
    elif fault == "assistant turn first":
        row["conversations"] = turns[1:] + turns[:1]
    elif fault == "two turns of one role in a row":
        row["conversations"] = turns[:1] + turns
    elif fault == "unknown role":
        turns[0]["from"] = "narrator"
    elif fault == "content that is not text":
        turns[0]["value"] = random.choice((None, 7, {"image": "x.png"}, [{"type": "image_url", "image_url": "x"}]))
    elif fault == "too long":
        turns[0]["value"] = f"{number} " + " ".join(random.choices(WORDS, k=3000))
    elif fault == "duplicate":
        return good[random.randrange(len(good))]
    elif fault == "NUL byte":
        turns[0]["value"] += "\0" if number % 2 else ""
        if number % 2 == 0:
            return json.dumps(row).encode().replace(b'"id"', b'"i\0d"')
    elif fault == "not UTF-8":
        turns[0]["value"] += " caf?"
        return json.dumps(row).encode().replace(b"caf?", b"caf\xe9")
    elif fault == "not an object":
        return json.dumps(turns).encode()
    elif fault == "missing field":
        row["chat"] = row.pop("conversations")
    return json.dumps(row).encode()


def write_sharegpt(path: Path, count: int, bad: float = 0.03, seed: int = 0, cut: bool = False) -> Counter[str]:
    """`count` lines, a share `bad` of them with every fault in turn; returns how many of each there are.

    cut: one more, in the middle of which the file ends.
    """
    drawn = random.Random(seed)
    counts: Counter[str] = Counter()
    wrong = set(drawn.sample(range(100, count), round(bad * count)))
    recent: list[bytes] = []
    with path.open("wb") as file:
        for number in range(count):
            if number in wrong:
                fault = FAULTS[counts.total() % len(FAULTS)]
                counts[fault] += 1
                line = broken(drawn, number, fault, recent)
            else:
                line = json.dumps(conversation(drawn, number)).encode()
                if len(recent) < 1000:
                    recent.append(line)
            file.write(line + b"\n")
        if cut:
            file.write(json.dumps(conversation(drawn, count)).encode()[:60])
            counts["cut off"] += 1
    return counts
