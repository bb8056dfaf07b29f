"""Requests to a server that speaks OpenAI's API: where it is, one JSON request and its answer, and trying again.

What may pass by itself (a full queue, a restart, a cut connection) is tried again; what will not stops the run with a
sentence. Knows nothing of tokens: what is asked and how answers are read is in remote.py.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, TypeVar
from urllib.parse import urlsplit

from specdec.errors import UserError

LONGEST_WAIT = 30.0  # seconds before a request is tried again
LONGEST_REASON = 300  # characters kept of what a server says
CONNECTIONS = 1000  # the openai client's own limit; requests beyond it would wait and count as timed out
T = TypeVar("T")


@dataclass(frozen=True)
class ServerConfig:
    """conf/config.yaml, `distill.server`."""

    url: str = "http://127.0.0.1:8000/v1"
    """Where the server's OpenAI API begins; vLLM's and SGLang's end in /v1."""
    model: str | None = None
    """The model to ask for; null: the one model the server lists."""
    key_env: str | None = "OPENAI_API_KEY"
    """Name of the environment variable with the server's key; servers without keys need none."""
    concurrency: int = 32
    """Requests in flight at a time."""
    timeout: float = 300.0
    """Longest wait for an answer, in seconds."""
    retries: int = 6
    """How often a request is tried again after a timeout, a cut connection or a busy server."""
    backoff: float = 0.5
    """First wait before trying again, in seconds; it doubles each time, up to 30. A Retry-After header wins."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError as error:
            raise UserError(f"distill.server.url is no address: {error}") from error
        if parts.password or parts.username:
            raise UserError("distill.server.url holds a password; put it into the variable that key_env names")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UserError("distill.server.url must be like http://127.0.0.1:8000/v1, without ? and #")
        # What was given is not repeated: it may be the key itself.
        if self.key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            raise UserError(
                "distill.server.key_env must be the name of an environment variable, such as MY_KEY, or null"
            )
        if not 1 <= self.concurrency <= CONNECTIONS:
            raise UserError(f"distill.server.concurrency must be from 1 to {CONNECTIONS}, got {self.concurrency}")
        if not self.timeout > 0:
            raise UserError(f"distill.server.timeout must be more than 0 seconds, got {self.timeout}")
        if self.retries < 0:
            raise UserError(f"distill.server.retries must be 0 or more, got {self.retries}")
        if not self.backoff >= 0:
            raise UserError(f"distill.server.backoff must be 0 seconds or more, got {self.backoff}")


class Again(Exception):
    """A try that failed in a way that may pass. wait: the seconds the server asks for."""

    def __init__(self, what: str, detail: str = "", wait: float | None = None) -> None:
        super().__init__(what)
        self.what, self.detail, self.wait = what, detail or what, wait


class Refused(Exception):
    """An HTTP status the caller asked to be told of, with what the server said."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason or f"HTTP {code}"


class Line:
    """One JSON request and its answer, tried again where that may help."""

    def __init__(self, config: ServerConfig, say: Callable[[str], None]) -> None:
        self.config, self.openai, self.key = config, _package(), _key(config)
        self._say = say
        self._said: set[str] = set()
        self._jitter = random.Random()

    def run(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """Await work(client) in an event loop, which an interrupt or an error can end at once.

        Threads could not be: one that waits for a socket goes on waiting, and Python waits for it at exit.
        """

        async def inside() -> T:
            settings = {"base_url": self.config.url, "api_key": self.key or "EMPTY", "timeout": self.config.timeout}
            # The package's own retries are off: neither their waits nor what they are made for can be set.
            async with self.openai.AsyncOpenAI(**settings, max_retries=0) as client:
                return await work(client)

        return asyncio.run(inside())

    async def ask(
        self, client: Any, path: str, body: dict[str, Any], read: Callable[[Any], T], refusals: tuple[int, ...] = ()
    ) -> T:
        """read(the JSON answer), which may raise Again; an empty body is a GET. Raises Refused for `refusals`."""
        failures: Counter[str] = Counter()
        for attempt in range(self.config.retries + 1):
            try:
                return read(await self._send(client, path, body))
            except Again as again:
                last = again
            except (AttributeError, TypeError, ValueError, KeyError) as error:  # an answer of another shape
                last = Again("an answer that makes no sense", str(error))
            except Refused as refused:
                if refused.code in refusals:
                    raise
                raise self._final(refused, body.get("model", self.config.model)) from None
            failures[last.what] += 1
            if attempt < self.config.retries:
                self.say(f"server {self.config.url}: {last.what}; trying again")
                # A random part, so that requests that failed together do not come back together.
                wait = self.config.backoff * 2 ** min(attempt, 30) * self._jitter.uniform(0.5, 1.0)
                await asyncio.sleep(min(LONGEST_WAIT, wait if last.wait is None else max(0.0, last.wait)))
        counts = ", ".join(f"{count} × {what}" for what, count in failures.most_common())
        raise UserError(
            f"distill.server.url {self.config.url}: a request failed {failures.total()} times ({counts}; the last: "
            f"{self._clean(last.detail)}). See whether the server runs; distill.server.concurrency, timeout and "
            "retries set how hard it is pressed. The same command goes on from what is finished."
        )

    async def _send(self, client: Any, path: str, body: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self.config.timeout):  # the client's own counts from the last byte received
                if not body:
                    return await client.get(path, cast_to=object)
                return await client.post(path, cast_to=object, body=body)
        except (TimeoutError, self.openai.APITimeoutError):
            raise Again(f"no answer within {self.config.timeout:g} s") from None
        except self.openai.APIConnectionError as error:
            raise Again("no connection, or a cut one", str(error.__cause__ or error)) from None
        except self.openai.APIStatusError as error:
            code, reason = error.status_code, self._clean(_reason(error.body))
            if code in (408, 409, 429) or (code >= 500 and code != 501):
                wait = _asked_wait(error.response.headers.get("retry-after"))
                raise Again(f"HTTP {code}", f"HTTP {code}: {reason}", wait) from None
            raise Refused(code, reason) from None
        except (ValueError, RecursionError) as error:
            raise Again("an answer that is not JSON", str(error)) from None

    def _final(self, refused: Refused, model: str | None) -> UserError:
        advice = "See whether the url is right (most end in /v1) and has the model."
        if refused.code in (401, 403):
            state = "set" if self.key else "not set"
            advice = f"distill.server.key_env names the variable with the key: {self.config.key_env}, which is {state}."
        return UserError(
            f"distill.server.url {self.config.url}, model {model}: HTTP {refused.code} ({refused.reason}). {advice}"
        )

    def say(self, text: str) -> None:
        """Tell the user, once however often it happens."""
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _clean(self, said: object) -> str:
        """One short line without the key, which servers like to repeat."""
        text = str(said).replace(self.key, "***") if self.key else str(said)
        return " ".join(text.split())[:LONGEST_REASON]


def _package() -> Any:
    try:
        import openai
    except ImportError as error:
        raise UserError("distill.server needs the openai package: .venv/bin/pip install -e '.[openai]'") from error
    return openai


def _key(config: ServerConfig) -> str:
    key = os.environ.get(config.key_env, "").strip() if config.key_env else ""
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"distill.server.key_env: {config.key_env} holds characters that no key has")
    return key


def _reason(body: object) -> object:
    """What an error page says: OpenAI's message, FastAPI's detail, or all of it."""
    return (body.get("message") or body.get("detail") or body) if isinstance(body, dict) else body


def _asked_wait(header: str | None) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date."""
    if not header:
        return None
    try:
        return float(header)
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(header).timestamp() - time()
    except (TypeError, ValueError):
        return None
