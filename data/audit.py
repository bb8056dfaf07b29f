"""The look at what is trained on before anything is: the supervised share, and one text with its mask in colour.

A mask that is empty or wrong never shows in a loss curve (pains P01-P05); it shows here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.texts import Text
from specdec.errors import UserError

FEW = 0.05
GREEN, DIM, OFF = "\033[32m", "\033[2m", "\033[0m"


@dataclass
class Shares:
    """Tokens and supervised tokens by domain."""

    tokens: dict[str, int] = field(default_factory=dict)
    supervised: dict[str, int] = field(default_factory=dict)

    def add(self, domain: str, tokens: int, supervised: int) -> None:
        self.tokens[domain] = self.tokens.get(domain, 0) + tokens
        self.supervised[domain] = self.supervised.get(domain, 0) + supervised

    def share(self, domain: str | None = None) -> float:
        """Supervised / all tokens of a domain, or of everything."""
        if domain is not None:
            return self.supervised[domain] / max(1, self.tokens[domain])
        return sum(self.supervised.values()) / max(1, sum(self.tokens.values()))

    def describe(self) -> str:
        parts = ", ".join(f"{name} {100 * self.share(name):.0f} %" for name in sorted(self.tokens))
        total = sum(self.tokens.values())
        return f"{100 * self.share():.0f} % of {total} tokens are supervised ({parts})"

    def counts(self) -> dict[str, Any]:
        return {name: {"tokens": self.tokens[name], "supervised": self.supervised[name]} for name in self.tokens}

    def check(self) -> list[str]:
        """Warnings. Raises UserError where nothing at all is supervised."""
        if not sum(self.supervised.values()):
            raise UserError(
                f"none of the {sum(self.tokens.values())} tokens is supervised: there is nothing to learn. Are there "
                "answers, and does the mask mark them? dry_run=true shows a row"
            )
        low = [name for name in sorted(self.tokens) if self.share(name) < FEW]
        return [
            f"warning: only {100 * self.share(name):.1f} % of the tokens of {name} are supervised; "
            "long prompts with short answers train slowly"
            for name in low
        ]


def preview(tokenizer: Any, tokens: list[int], spans: Iterable[tuple[int, int]], colour: bool, most: int = 240) -> str:
    """A text with its supervised parts in green, or between « and » without colour; long parts are shortened."""
    begin, end = (GREEN, OFF) if colour else ("«", "»")
    out, at = [], 0
    for first, last in (*spans, (len(tokens), len(tokens))):
        if at < first:
            quiet = _short(tokenizer.decode(tokens[at:first]), most)
            out.append(f"{DIM}{quiet}{OFF}" if colour else quiet)
        if first < last:
            out.append(f"{begin}{_short(tokenizer.decode(tokens[first:last]), most)}{end}")
        at = last
    return "".join(out)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} […] {text[-most // 2 :]}"


def look_at(texts: Sequence[Text], tokenizer: Any, colour: bool) -> list[str]:
    """What is about to be trained on, in lines: supervised shares, warnings, and one text with its mask."""
    shares = Shares()
    for text in texts:
        shares.add(text.domain, len(text.tokens), text.supervised)
    first = texts[0]
    shown = preview(tokenizer, first.tokens.tolist(), first.spans, colour)
    lines = [f"          {shares.describe()}", *shares.check(), "          the first text, supervised parts marked:"]
    return lines + [f"            {line}" for line in shown.splitlines()]


def warnings_of(distilled: Mapping[str, Any], prepared: Mapping[str, Any], target: Iterable[str]) -> list[str]:
    """What a user should know of how the texts came about, by the stages' counts. target: the names it goes by."""
    found, names = [], set(target)
    if distilled["writer"] == "recorded":
        others = {name or "nobody named": n for name, n in prepared["writers"].items() if name not in names}
        if others:
            listed = ", ".join(f"{name} ({count})" for name, count in others.items())
            found.append(
                f"warning: the answers were not written by the target but by {listed}; a drafter learns best from the "
                "target's own words (distill.backend=local or openai)"
            )
    elif distilled["writer"] not in names:
        found.append(f"warning: the answers were written by {distilled['writer']}; make sure that it is the target")
    if loops := distilled.get("loops", 0):
        share, dropped = 100 * loops / distilled["answers"], distilled.get("dropped", 0)
        advice = (
            f"{dropped} conversations with one were left out"
            if dropped
            else ("they make acceptance look better than it is (distill.drop_loops=true leaves them out)")
        )
        found.append(
            f"{'warning: ' if share > 10 else ''}{loops} of {distilled['answers']} answers ({share:.0f} %) end in a "
            f"loop; {advice}"
        )
    for key, words in (
        ("tokenised_again", "answers came as text and were tokenised again: ids may differ from the target's own"),
        ("cut_short", "conversations ended early: their next prompt was too long or refused"),
        ("refused", "prompts were refused by the server"),
    ):
        if distilled.get(key):
            found.append(f"warning: {distilled[key]} {words}")
    return found
