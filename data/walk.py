"""One conversation on its way through distillation: its prompts in turn, and the texts that come of the answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from data.chat import Ids, Template, joined
from data.formats import BadRow
from data.questions import asked
from data.rows import Row
from data.texts import Text
from data.writer import Answer

SHORTEST_LOOP = 32


class Walk:
    """prompt: what is to be answered next. longest: most tokens of a prompt; stops: ids that end an answer.

    A conversation ends early where the next prompt is too long or refused; what was answered until then is kept.
    """

    def __init__(self, row: Row, temperature: float, template: Template, longest: int, stops: tuple[int, ...]) -> None:
        self.row, self.temperature, self.template = row, temperature, template
        self.longest, self.stops = longest, stops
        self.prompt: Ids = row.prompt
        self.done = False
        self.cut = ""
        """Why the conversation ended early."""
        self._messages = list(row.messages or [])
        self._answers: list[tuple[Ids, Answer]] = []

    @property
    def goes_on(self) -> bool:
        """Whether another turn follows the one that is answered now."""
        return len(asked(self._messages)) < len(self._messages)

    def take(self, answer: Answer) -> None:
        """Note an answer and make the next prompt, if there is one."""
        if answer.finish == "refused":
            self.cut, self.done = answer.reason, True
            return
        self._answers.append((self.prompt, answer))
        if not self.goes_on:
            self.done = True
            return
        # The client of a server sends back the text it got, so that is what the next prompt is rendered from.
        words = self.template.tokenizer.decode(self._said(answer), skip_special_tokens=True)
        self._messages[len(asked(self._messages))] = {"role": "assistant", "content": words}
        try:
            self.prompt = self.template.prompt(asked(self._messages), self.row.tools)
        except BadRow as bad:
            self.cut, self.done = str(bad), True
            return
        if len(self.prompt) > self.longest:
            self.cut, self.done = f"the next prompt has {len(self.prompt)} tokens", True

    def _said(self, answer: Answer) -> Ids:
        """The answer without its end of turn."""
        ended = answer.tokens and answer.tokens[-1] in self.stops
        return answer.tokens[:-1] if ended else answer.tokens

    @property
    def answered(self) -> bool:
        return bool(self._answers)

    @property
    def looped(self) -> bool:
        return any(loops(self._said(answer)) for _, answer in self._answers)

    def texts(self) -> list[Text]:
        """The training texts: answers go into one while each prompt begins with all that came before."""
        texts, at = [], 0
        for piece in joined([(prompt, answer.tokens) for prompt, answer in self._answers]):
            at += len(piece.spans)
            features = self._answers[at - 1][1].features
            texts.append(Text(torch.tensor(piece.tokens), piece.spans, features, self.row.domain))
        return texts

    def counts(self) -> Counter[str]:
        """answers, answer_tokens, ended_by_stop, loops, tokenised_again, cut_short, refused."""
        counts: Counter[str] = Counter()
        for _, answer in self._answers:
            counts["answers"] += 1
            counts["answer_tokens"] += len(answer.tokens)
            counts["ended_by_stop"] += answer.finish == "stop"
            counts["loops"] += loops(self._said(answer))
            counts["tokenised_again"] += not answer.exact
        counts["cut_short"] += bool(self.cut and self._answers)
        counts["refused"] += not self._answers
        return counts

    def record(self) -> dict[str, Any]:
        """For people."""
        decode = self.template.tokenizer.decode
        found: dict[str, Any] = {"id": self.row.id, "domain": self.row.domain, "temperature": self.temperature}
        found["finish"] = [answer.finish for _, answer in self._answers]
        found["answers"] = [decode(answer.tokens) for _, answer in self._answers]
        return found | ({"loop": True} if self.looped else {}) | ({"cut": self.cut} if self.cut else {})


def loops(tokens: Ids) -> bool:
    """Whether a text ends by repeating itself: its last 32 tokens or more are one piece three times or oftener.

    Such answers make acceptance look good: a loop is easy to guess.
    """
    for period in range(1, len(tokens) // 3 + 1):
        span = max(SHORTEST_LOOP, 3 * period)
        if span > len(tokens):
            break
        tail = tokens[-span:]
        if tail[period:] == tail[:-period]:
            return True
    return False
