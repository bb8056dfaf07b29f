"""Who writes the answers: the target on a server that speaks OpenAI's API, such as vLLM or SGLang.

Prompts are sent as token ids, so the server reads what training will read. Answers come back as token ids where the
server has them (vLLM: return_token_ids), else as text that is tokenised again and marked so. Getting a request there
and back is left to server.py.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from data.server import LONGEST_REASON, Again, Line, Refused, ServerConfig
from data.writer import Advance, Answer, Request
from specdec.errors import UserError, nearest

BAD_PROMPT = (400, 413, 422)  # about the one prompt sent
UNKNOWN_PAGE = (400, 404, 405, 422, 501)  # the server has no such page, or means something else by it
EXTRAS: dict[str, Any] = {
    "return_token_ids": True,
    "skip_special_tokens": False,
    # Without these vLLM takes the values of the model's generation_config.json, also where it is greedy.
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Fields beyond OpenAI's, as vLLM and SGLang name them."""


class Remote:
    """The target on a server. The server is asked for its models at once, so a wrong url or key fails here.

    stop_tokens: ids that end an answer, as the target has them.
    """

    def __init__(
        self,
        config: ServerConfig,
        tokenizer: Any,
        stop_tokens: tuple[int, ...],
        max_new_tokens: int,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.stop_tokens, self.max_new_tokens = stop_tokens, max_new_tokens
        self._line = Line(config, say)
        self._takes_extras: bool | None = None  # None: no answer has told yet
        known = self._line.run(lambda client: self._line.ask(client, "/models", {}, _model_ids))
        self._name = _choose(config, known)

    @property
    def name(self) -> str:
        return self._name

    def answer(self, requests: Sequence[Request], seed: int, advance: Advance) -> list[Answer]:
        return self._line.run(lambda client: self._answer_all(client, requests, seed, advance))

    def check_serving(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, options: dict[str, Any], ids: list[int]
    ) -> bool:
        """Whether the server's chat template gives `ids` for a conversation; False where it cannot tell (vLLM can).

        Raises UserError where it gives others.
        """
        path = self.config.url.rstrip("/").removesuffix("/v1") + "/tokenize"
        body = {"model": self.name, "messages": messages, "add_generation_prompt": True}
        body |= {"tools": tools} if tools else {}
        body |= {"chat_template_kwargs": options} if options else {}
        try:
            served = self._line.run(lambda client: self._line.ask(client, path, body, _served_ids, UNKNOWN_PAGE))
        except Refused:
            return False
        if served is not None and served != ids:
            raise UserError(
                f"distill.server.url {self.config.url}: the server's chat template or tokenizer is not the target's. "
                f"{self._difference(ids, served)}. Serve the model that target.source names, with its own template."
            )
        return served is not None

    async def _answer_all(self, client: Any, requests: Sequence[Request], seed: int, advance: Advance) -> list[Answer]:
        answers: dict[int, Answer] = {}
        waiting = iter(enumerate(requests))
        written = 0

        async def work() -> None:
            nonlocal written
            for index, request in waiting:  # shared: each worker takes the next one
                answers[index] = await self._answer_one(client, request, _seed(seed, index))
                written += len(answers[index].tokens)
                advance(len(answers), written)

        workers = [asyncio.create_task(work()) for _ in range(min(self.config.concurrency, len(requests)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [answers[index] for index in range(len(requests))]

    async def _answer_one(self, client: Any, request: Request, seed: int) -> Answer:
        body: dict[str, Any] = {"model": self.name, "prompt": request.prompt, "max_tokens": self.max_new_tokens}
        body |= {"temperature": request.temperature, "top_p": 1.0, "seed": seed}
        extras = EXTRAS | {"stop_token_ids": list(self.stop_tokens)}
        # Refused with the extra fields: without them the server tells whether they or the prompt are at fault.
        tries: dict[bool | None, list[dict[str, Any]]] = {True: [extras], False: [{}], None: [extras, {}]}
        for fields in tries[self._takes_extras]:
            try:
                answer = await self._line.ask(
                    client, "/completions", body | fields, lambda page: self._read(page, request.prompt), BAD_PROMPT
                )
            except Refused as refused:
                answer = Answer([], "refused", reason=refused.reason)
                continue
            if self._takes_extras is None:
                self._takes_extras = bool(fields)
            break
        if self._takes_extras is False:
            self._line.say(
                "server: it takes only OpenAI's own fields; its defaults for top_k and the like stay in force"
            )
        return answer

    def _read(self, page: Any, prompt: list[int]) -> Answer:
        """The answer on a page, ended as the target's own answers end."""
        choice = _choice(page)
        self._check_prompt(page, choice, prompt)
        finish, ids = choice["finish_reason"], choice.get("token_ids")
        exact = isinstance(ids, list)
        tokens = list(ids) if isinstance(ids, list) else self._ids_of(choice["text"])
        if any(not isinstance(token, int) or not 0 <= token < len(self.tokenizer) for token in tokens):
            raise UserError(
                f"distill.server.url {self.config.url}: it answered with ids outside the target's vocabulary of "
                f"{len(self.tokenizer)}; serve the model that target.source names"
            )
        if len(tokens) > self.max_new_tokens:
            tokens, finish = tokens[: self.max_new_tokens], "length"
        stop = next((at for at, token in enumerate(tokens) if token in self.stop_tokens), None)
        if stop is not None:
            return Answer(tokens[: stop + 1], "stop", exact=exact)
        if finish == "stop":
            tokens.append(self._stop_token(choice.get("stop_reason")))
        if not tokens or finish == "content_filter":
            return Answer([], "refused", reason=f"the server wrote nothing (finish_reason {finish})")
        return Answer(tokens, finish, exact=exact)

    def _ids_of(self, text: str) -> list[int]:
        self._line.say("server: it sends text without token ids; the ids are those of its text tokenised again")
        # A last character cut between its bytes comes as U+FFFD, which the model did not write.
        return list(self.tokenizer(text.rstrip("\ufffd"), add_special_tokens=False)["input_ids"])

    def _stop_token(self, reason: Any) -> int:
        for token in (reason, self.tokenizer.eos_token_id):
            if isinstance(token, int) and token in self.stop_tokens:
                return token
        raise UserError(
            f"distill.server: an answer ended, but the tokenizer's end token {self.tokenizer.eos_token_id} is not a "
            f"stop token of the target {self.stop_tokens}; correct eos_token in the target's tokenizer_config.json"
        )

    def _check_prompt(self, page: dict[str, Any], choice: dict[str, Any], prompt: list[int]) -> None:
        read = choice.get("prompt_token_ids") or page.get("prompt_token_ids")
        count = len(read) if read else (page.get("usage") or {}).get("prompt_tokens") or len(prompt)
        if (not read or read == prompt) and count == len(prompt):
            return
        raise UserError(
            f"distill.server.url {self.config.url}: the server reads another prompt than it was sent, {count} tokens "
            f"for {len(prompt)}{'. ' + self._difference(prompt, read) if read else ''}. It may put a BOS token in "
            "front or cut long prompts; such answers would be learned for the wrong text."
        )

    def _difference(self, ours: list[int], theirs: list[int]) -> str:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        near = slice(max(0, at - 5), at + 5)
        ours_near, theirs_near = (f"{ids[near]} {self.tokenizer.decode(ids[near])!r}" for ids in (ours, theirs))
        return f"They differ from position {at} on: here {ours_near}, there {theirs_near}"


def _choose(config: ServerConfig, known: list[str]) -> str:
    listed = f"at {config.url} there is {', '.join(known) or 'none'}"
    if config.model is None and len(known) != 1:
        raise UserError(f"distill.server.model: say which; {listed}")
    if config.model is not None and config.model not in known:
        raise UserError(f"distill.server.model '{config.model}': {listed}.{nearest(config.model, known)}")
    return config.model or known[0]


def _model_ids(page: Any) -> list[str]:
    try:
        return [str(model["id"]) for model in page["data"]]
    except (TypeError, KeyError):
        raise Again("a list of models that is none", str(page)[:LONGEST_REASON]) from None


def _served_ids(page: Any) -> list[int] | None:
    tokens = page.get("tokens") if isinstance(page, dict) else None
    return tokens if isinstance(tokens, list) else None


def _choice(page: Any) -> dict[str, Any]:
    try:
        choice = page["choices"][0]
        if choice["finish_reason"] in ("stop", "length", "content_filter") and isinstance(choice["text"], str):
            return choice
    except (TypeError, KeyError, IndexError):
        pass
    raise Again("an answer without a finished choice", str(page)[:LONGEST_REASON])


def _seed(seed: int, index: int) -> int:
    """31 bits, which every server takes."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:4], "big") >> 1
