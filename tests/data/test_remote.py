"""A writer on a server: a small server whose every move is scripted stands in for it."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tiny import EOS, tiny_tokenizer

from data.remote import Remote, ServerConfig
from data.server import _asked_wait
from data.writer import Answer, Request
from specdec.errors import UserError

pytest.importorskip("openai")
KEY = "sk-very-secret"
TOKENIZER = tiny_tokenizer()


@dataclass
class Reply:
    """One answer of the server. delay: seconds before it; cut: bytes of the body sent before the connection ends."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    cut: int | None = None


Script = Callable[[dict[str, Any]], Reply]


def completion(tokens: list[int] | None, finish: str = "stop", text: str = "", **choice: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish, "token_ids": tokens, **choice}]}


def written(body: dict[str, Any]) -> list[int]:
    """What the server writes by default: the prompt backwards, and the end."""
    return [*reversed(body["prompt"]), EOS]


def plain(body: dict[str, Any]) -> Reply:
    return Reply(completion(written(body), prompt_token_ids=body["prompt"]))


class Fake(ThreadingHTTPServer):
    """first: replies to the next completions, one each; after them `rule` answers."""

    daemon_threads, block_on_close = True, False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models, self.first, self.rule = ["tiny"], list[Reply](), plain
        self.pages: dict[str, Script] = {}
        self.seen: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.busy = self.busiest = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_: Any) -> None:
        """Clients that hang up are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # a header and a body sent apart wait for each other: 40 ms a reply
    server: Fake

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        if self.path in self.server.pages:
            self.reply(self.server.pages[self.path]({}))
        else:
            self.reply(Reply({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        fake = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.keys.add(self.headers["Authorization"])
        if self.path != "/v1/completions":
            page = fake.pages.get(self.path)
            self.reply(page(body) if page else Reply({"detail": "Not Found"}, 404))
            return
        with fake.lock:
            fake.seen.append(body)
            fake.busy += 1
            fake.busiest = max(fake.busiest, fake.busy)
            reply = fake.first.pop(0) if fake.first else fake.rule(body)
        fake.closing.wait(reply.delay)
        with fake.lock:
            fake.busy -= 1
        self.reply(reply)

    def reply(self, reply: Reply) -> None:
        data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in ({"Content-Type": "application/json"} | reply.headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: reply.cut])
        if reply.cut is not None:
            self.close_connection = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    for name in ("HTTP_PROXY", "ALL_PROXY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    server = Fake()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


def remote(fake: Fake, said: list[str] | None = None, **changes: Any) -> Remote:
    settings: dict[str, Any] = {"url": fake.url, "concurrency": 4, "timeout": 10.0, "backoff": 0.01, "retries": 3}
    say = [] if said is None else said
    return Remote(ServerConfig(**(settings | changes)), TOKENIZER, (EOS, 0), 32, say.append)


def requests(*prompts: list[int]) -> list[Request]:
    return [Request(prompt, 0.0) for prompt in prompts]


def one(writer: Remote, prompt: tuple[int, ...] = (5, 6, 7)) -> Answer:
    return writer.answer(requests(list(prompt)), 0, lambda *_: None)[0]


def test_the_servers_token_ids_are_taken(fake: Fake):
    said: list[str] = []
    writer = remote(fake, said)
    assert writer.name == "tiny"
    assert one(writer) == Answer([7, 6, 5, EOS], "stop")
    body = fake.seen[0]
    assert (body["prompt"], body["max_tokens"], body["model"]) == ([5, 6, 7], 32, "tiny")
    assert body["return_token_ids"] is True
    assert (body["top_p"], body["top_k"], body["repetition_penalty"]) == (1.0, -1, 1.0)
    assert body["stop_token_ids"] == [EOS, 0]
    assert not said


@pytest.mark.parametrize(
    ("choice", "tokens", "finish"),
    [
        (completion([7, 8], "stop"), [7, 8, EOS], "stop"),
        (completion([7, 8], "stop", stop_reason=0), [7, 8, 0], "stop"),
        (completion([7, 8], "stop", stop_reason=9), [7, 8, EOS], "stop"),
        (completion([7, 8], "stop", stop_reason="\n"), [7, 8, EOS], "stop"),
        (completion([7, 0, 8, EOS], "stop"), [7, 0], "stop"),
        (completion([7, EOS, 8], "length"), [7, EOS], "stop"),
        (completion([7, 8], "length"), [7, 8], "length"),
        (completion([], "stop"), [EOS], "stop"),
        (completion([], "length"), [], "refused"),
        (completion([7], "content_filter"), [], "refused"),
    ],
)
def test_answers_end_as_the_targets_own_do(fake: Fake, choice: dict[str, Any], tokens: list[int], finish: str):
    fake.first = [Reply(choice)]
    answer = one(remote(fake))
    assert (answer.tokens, answer.finish, answer.exact) == (tokens, finish, True)


def test_an_end_that_is_no_stop_token_is_an_error(fake: Fake):
    fake.first = [Reply(completion([7], "stop"))]
    writer = Remote(ServerConfig(url=fake.url), TOKENIZER, (0,), 32, print)
    with pytest.raises(UserError, match="not a stop token"):
        one(writer)


def test_text_without_ids_is_tokenised_again(fake: Fake):
    fake.rule = lambda _: Reply(completion(None, "stop", "ab"))
    said: list[str] = []
    writer = remote(fake, said)
    ids = TOKENIZER("ab")["input_ids"]
    for _ in range(2):
        assert one(writer) == Answer([*ids, EOS], "stop", exact=False)
    assert len(said) == 1
    assert "tokenised again" in said[0]
    fake.rule = lambda _: Reply(completion(None, "length", "ab</s>b\ufffd"))
    assert one(writer) == Answer([*ids, EOS], "stop", exact=False)
    fake.rule = lambda _: Reply(completion(None, "length", "ab\ufffd"))
    assert one(writer) == Answer(ids, "length", exact=False)


BUSY = Reply({"error": {"message": "busy"}}, 503)
TRANSIENT = {
    "429, Retry-After": (Reply({"error": {"message": "slow down"}}, 429, {"Retry-After": "0.01"}), "HTTP 429"),
    "408": (Reply({}, 408), "HTTP 408"),
    "500": (Reply(b"<html>oops", 500, {"Content-Type": "text/html"}), "HTTP 500"),
    "503": (BUSY, "HTTP 503"),
    "timeout": (Reply({}, delay=5.0), "no answer within 0.3 s"),
    "cut": (Reply(completion([7, EOS]), cut=20), "no connection, or a cut one"),
    "half a JSON": (Reply(b'{"choices": [{"te'), "not JSON"),
    "not JSON": (Reply(b"<html>warming up", headers={"Content-Type": "text/html"}), "without a finished choice"),
    "no choice": (Reply({"error": {"message": "odd"}}), "without a finished choice"),
    "aborted": (Reply(completion([7], "abort")), "without a finished choice"),
}


@pytest.mark.parametrize("name", TRANSIENT)
def test_what_may_pass_is_tried_again(fake: Fake, name: str):
    reply, what = TRANSIENT[name]
    fake.first = [reply, BUSY, reply]
    said: list[str] = []
    assert one(remote(fake, said, timeout=0.3)).tokens == [7, 6, 5, EOS]
    assert len(fake.seen) == 4
    assert [what in text for text in said].count(True) == 1
    assert all("trying again" in text for text in said)


@pytest.mark.parametrize("name", TRANSIENT)
def test_retries_end(fake: Fake, name: str):
    reply, what = TRANSIENT[name]
    fake.rule = lambda _: reply
    with pytest.raises(UserError) as caught:
        one(remote(fake, retries=2, timeout=0.3))
    text = str(caught.value)
    assert len(fake.seen) == 3
    assert "failed 3 times (3 × " in text
    assert what in text
    assert fake.url in text
    assert "goes on from what is finished" in text


def test_a_server_that_is_not_there(fake: Fake):
    fake.shutdown()
    fake.server_close()
    with pytest.raises(UserError, match=r"2 times.*no connection"):
        remote(fake, retries=1)


def test_how_long_the_server_asks_to_wait(fake: Fake, monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 20))
    writer = remote(fake, retries=8, backoff=4.0)
    asked = ["7", "9999", later, "-3", None, None, None, "soon"]
    fake.first = [Reply({}, 429, {} if text is None else {"Retry-After": text}) for text in asked]
    monkeypatch.setattr("data.server.asyncio.sleep", sleep)
    one(writer)
    assert (waits[0], waits[1], waits[3]) == (7.0, 30.0, 0.0)
    assert 15 < waits[2] <= 20
    assert waits[4:] == [30.0] * 4  # 4 s, doubled four times and more
    waits.clear()
    fake.first = [BUSY] * 3
    one(writer)
    assert [4 * 2**i / 2 <= wait <= 4 * 2**i for i, wait in enumerate(waits)] == [True] * 3
    assert _asked_wait(None) is None


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_stops_at_once(fake: Fake, monkeypatch: pytest.MonkeyPatch, status: int):
    monkeypatch.setenv("MY_KEY", KEY)
    writer = remote(fake, key_env="MY_KEY")
    fake.rule = lambda _: Reply({"error": {"message": f"Incorrect API key\nprovided: {KEY}"}}, status)
    with pytest.raises(
        UserError, match=r"model tiny: HTTP 40. \(Incorrect API key provided: .*MY_KEY.*is set"
    ) as caught:
        one(writer)
    assert fake.url in str(caught.value)
    assert len(fake.seen) == 1
    assert KEY not in str(caught.value)


def test_no_key_where_one_is_needed(fake: Fake):
    fake.pages["/v1/models"] = lambda _: Reply({"error": "Unauthorized"}, 401)
    with pytest.raises(UserError, match="OPENAI_API_KEY, which is not set"):
        remote(fake)


def test_the_key_is_sent_and_never_told(fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
    said: list[str] = []
    writer = remote(fake, said, retries=1)
    for body in ({"error": {"message": f"key {KEY} is over its limit"}}, {"choices": KEY}, f"not JSON {KEY}".encode()):
        for status in (200, 400, 404, 503):
            reply = Reply(body, status)
            fake.rule = lambda _, reply=reply: reply
            try:
                said.append(one(writer).reason)
            except UserError as error:
                said.append(str(error))
    assert fake.keys == {f"Bearer {KEY}"}
    assert len(said) > 12
    assert KEY not in "".join(said)
    assert KEY not in caplog.text


def test_an_unknown_page_or_model_stops_at_once(fake: Fake):
    writer = remote(fake)
    fake.rule = lambda _: Reply({"error": {"message": "no model 'tiny'"}}, 404)
    with pytest.raises(UserError, match=r"model tiny: HTTP 404 \(no model 'tiny'\).*/v1"):
        one(writer)
    assert len(fake.seen) == 1
    fake.pages["/v1/models"] = lambda _: Reply({"detail": "Not Found"}, 404)
    with pytest.raises(UserError, match=r"HTTP 404 \(Not Found\).*/v1"):
        remote(fake)


def test_which_model(fake: Fake):
    fake.models = ["llama-8b", "llama-70b"]
    with pytest.raises(UserError, match=r"say which; .*llama-8b, llama-70b"):
        remote(fake)
    with pytest.raises(UserError, match="Did you mean 'llama-8b'"):
        remote(fake, model="llama-8")
    assert remote(fake, model="llama-70b").name == "llama-70b"
    fake.models = []
    with pytest.raises(UserError, match="there is none"):
        remote(fake)
    fake.pages["/v1/models"] = lambda _: Reply({"models": []})
    with pytest.raises(UserError, match="2 × a list of models that is none"):
        remote(fake, retries=1)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_prompt_is_told_and_the_others_go_on(fake: Fake, status: int):
    reason = {"error": {"message": "this prompt\nis too long " + "x" * 500}}
    fake.rule = lambda body: Reply(reason, status) if len(body["prompt"]) > 2 else plain(body)
    counts: list[tuple[int, int]] = []
    batch = requests([3], [4, 4, 4], [5, 6], [6])
    writer = remote(fake, concurrency=1)
    answers = writer.answer(batch, 0, lambda *count: counts.append(count))
    assert [answer.finish for answer in answers] == ["stop", "refused", "stop", "stop"]
    assert answers[1].tokens == []
    assert answers[1].reason.startswith("this prompt is too long xxx")
    assert len(answers[1].reason) == 300
    assert counts == [(1, 2), (2, 2), (3, 5), (4, 7)]
    assert len(fake.seen) == 4
    # A first prompt that is refused says nothing about the extra fields.
    fake.seen.clear()
    answers = remote(fake, concurrency=1).answer(list(reversed(batch[:2])), 0, lambda *_: None)
    assert [answer.finish for answer in answers] == ["refused", "stop"]
    assert ["return_token_ids" in body for body in fake.seen] == [True, False, True]


def test_a_server_without_the_extra_fields(fake: Fake):
    def strict(body: dict[str, Any]) -> Reply:
        if "return_token_ids" in body:
            return Reply({"error": {"message": "Unrecognized request argument: return_token_ids"}}, 400)
        return Reply(completion(None, "stop", "ab"))

    fake.rule = strict
    said: list[str] = []
    writer = remote(fake, said, concurrency=1)
    for _ in range(2):
        answers = writer.answer(requests([3], [4]), 0, lambda *_: None)
        assert [answer.finish for answer in answers] == ["stop", "stop"]
    assert ["return_token_ids" in body for body in fake.seen] == [True, False, False, False, False]
    assert sorted("only OpenAI's own fields" in text for text in said) == [False, True]


@pytest.mark.parametrize("where", ["choice", "page", "usage"])
def test_a_server_that_reads_another_prompt(fake: Fake, where: str):
    page = completion([7, EOS])
    if where == "choice":
        page["choices"][0]["prompt_token_ids"] = [2, 5, 6, 7]
    elif where == "page":
        page["prompt_token_ids"] = [2, 5, 6, 7]
    else:
        page["usage"] = {"prompt_tokens": 4}
    fake.rule = lambda _: Reply(page)
    with pytest.raises(UserError, match=r"4 tokens for 3") as caught:
        one(remote(fake))
    assert ("position 0" in str(caught.value)) == (where != "usage")
    assert "BOS" in str(caught.value)


def test_results_keep_the_order_and_the_seeds(fake: Fake):
    delays = random.Random(0)

    def slow(body: dict[str, Any]) -> Reply:
        return Reply(completion(written(body)), delay=delays.uniform(0, 0.05))

    fake.rule = slow
    batch = [Request([3 + i, 4], 0.5) for i in range(24)]
    seeds: list[dict[int, int]] = []
    for concurrency in (1, 8):
        fake.seen.clear()
        counts: list[tuple[int, int]] = []
        callers: set[int] = set()

        def advance(finished: int, tokens: int, counts=counts, callers=callers) -> None:
            counts.append((finished, tokens))
            callers.add(threading.get_ident())

        answers = remote(fake, concurrency=concurrency).answer(batch, 11, advance)
        assert [answer.tokens for answer in answers] == [[4, 3 + i, EOS] for i in range(24)]
        assert counts == [(n, 3 * n) for n in range(1, 25)]
        assert callers == {threading.get_ident()}
        seeds.append({body["prompt"][0]: body["seed"] for body in fake.seen})
        assert {body["temperature"] for body in fake.seen} == {0.5}
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 24
    assert all(0 <= seed < 2**31 for seed in seeds[0].values())
    fake.seen.clear()
    remote(fake).answer(batch[:2], 12, lambda *_: None)
    assert not {body["seed"] for body in fake.seen} & set(seeds[0].values())
    assert remote(fake).answer([], 0, lambda *_: None) == []


def test_concurrency_is_what_was_set(fake: Fake):
    fake.rule = lambda body: Reply(completion(written(body)), delay=0.02)
    remote(fake, concurrency=5).answer(requests(*([3, 4] for _ in range(40))), 0, lambda *_: None)
    assert fake.busiest == 5


@contextmanager
def interrupt_after(seconds: float, number: int) -> Iterator[None]:
    """As train/__main__.py handles it: the signal raises KeyboardInterrupt."""
    before = signal.signal(number, signal.default_int_handler)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(number, before)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "process_request" not in thread.name]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("waits_for", ["answer", "retry"])
def test_an_interrupt_stops_at_once(fake: Fake, number: int, waits_for: str):
    slow = Reply({}, 503, {"Retry-After": "30"}) if waits_for == "retry" else Reply({}, delay=60.0)
    writer = remote(fake, timeout=60.0)
    fake.rule = lambda _: slow
    before = our_threads()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupt_after(0.3, number):
        writer.answer(requests(*([3] for _ in range(12))), 0, lambda *_: None)
    assert time.monotonic() - started < 2
    assert len(fake.seen) == 4
    assert our_threads() == before  # none is left that Python would wait for at exit


def test_an_error_in_one_request_stops_the_others(fake: Fake):
    writer = remote(fake, timeout=60.0)
    fake.first = [Reply({}, 404, delay=0.1)]
    fake.rule = lambda _: Reply({}, delay=60.0)
    started = time.monotonic()
    with pytest.raises(UserError, match="404"):
        writer.answer(requests(*([3] for _ in range(12))), 0, lambda *_: None)
    assert time.monotonic() - started < 2
    assert len(fake.seen) == 4


def test_the_servers_chat_template(fake: Fake):
    messages, tools = [{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "f"}}]
    writer = remote(fake)
    assert writer.check_serving(messages, None, {}, [3, 4, 5]) is False  # no such page
    bodies: list[dict[str, Any]] = []

    def page(body: dict[str, Any]) -> Reply:
        bodies.append(body)
        return Reply({"count": 3, "tokens": [3, 4, 5]})

    fake.pages["/tokenize"] = page
    assert writer.check_serving(messages, None, {}, [3, 4, 5]) is True
    assert writer.check_serving(messages, tools, {}, [3, 4, 5]) is True
    expected = {"model": "tiny", "messages": messages, "add_generation_prompt": True}
    assert bodies == [expected, {**expected, "tools": tools}]
    with pytest.raises(UserError, match=r"chat template.*position 1 .*here \[3, 9, 5\].*there \[3, 4, 5\]"):
        writer.check_serving(messages, None, {}, [3, 9, 5])
    with pytest.raises(UserError, match=r"position 2 .*here \[3, 4\] "):
        writer.check_serving(messages, None, {}, [3, 4])
    for reply in (
        Reply({}, 501),
        Reply({}, 405),
        Reply({}, 400),
        Reply({"count": 3}),
        Reply(b"x", headers={"Content-Type": "a/b"}),
    ):
        fake.pages["/tokenize"] = lambda _, reply=reply: reply
        assert writer.check_serving(messages, None, {}, [3, 4, 5]) is False
    fake.pages["/tokenize"] = lambda _: Reply({}, 401)
    with pytest.raises(UserError, match="key_env"):
        writer.check_serving(messages, None, {}, [3, 4, 5])


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"url": "localhost:8000"}, "distill.server.url"),
        ({"url": "http://me:pass@host/v1"}, "distill.server.url"),
        ({"url": "http://host/v1?key=1"}, "distill.server.url"),
        ({"key_env": KEY}, "distill.server.key_env"),
        ({"concurrency": 0}, "distill.server.concurrency"),
        ({"concurrency": 5000}, "distill.server.concurrency"),
        ({"timeout": 0.0}, "distill.server.timeout"),
        ({"timeout": float("nan")}, "distill.server.timeout"),
        ({"retries": -1}, "distill.server.retries"),
        ({"backoff": -0.1}, "distill.server.backoff"),
    ],
)
def test_bad_settings_are_named(change: dict[str, Any], names: str):
    with pytest.raises(UserError, match=names) as caught:
        ServerConfig(**change)
    assert KEY not in str(caught.value)
    assert "pass@" not in str(caught.value)


def test_a_key_no_header_can_carry(fake: Fake, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "ключ")
    with pytest.raises(UserError, match="MY_KEY holds characters"):
        remote(fake, key_env="MY_KEY")


def test_without_the_package(fake: Fake, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[openai\]'"):
        remote(fake)
