"""Opening a target: its configuration, the model and tokenizer behind its source."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from specdec.errors import UserError
from specdec.facts import stop_tokens, window_of
from specdec.fast import MODES
from specdec.source import resolve
from specdec.target import Target

TRAIN = ("frozen", "lora", "full")


@dataclass(frozen=True)
class TargetConfig:
    """conf/target/*.yaml: which model the drafter is for."""

    name: str
    """Short name, used in the run folder."""
    source: str
    """Hugging Face id or folder, a .gguf file, or package:NAME/FILE.gguf."""
    dtype: str = "float32"
    """float64, float32, bfloat16 or float16."""
    device: str = "auto"
    """auto takes the GPU where there is one."""
    fast: str = "auto"
    """auto packs weights where that was measured to pay (fp32 on a CPU); off reads them as they are; packed also packs
    small models; graph records and replays CUDA graphs (GPU only)."""
    cache: str = "runs/targets"
    """Where dequantised GGUF files and what was measured of packed weights are kept."""
    train: str = "frozen"
    """frozen; or a fit tunes the target too (train/joint.py): lora (low-rank adapters, merged at the end) or full."""

    def __post_init__(self) -> None:
        known = ("float64", "float32", "bfloat16", "float16")
        if self.dtype not in known:
            raise UserError(f"target.dtype: '{self.dtype}' is not one of {', '.join(known)}")
        if self.train not in TRAIN:
            raise UserError(f"target.train: '{self.train}' is not one of {', '.join(TRAIN)}")
        if self.train == "full" and self.dtype in known[2:]:
            raise UserError(f"target.train=full changes the weights and needs target.dtype=float32, got {self.dtype}")
        if self.fast not in MODES:
            raise UserError(f"target.fast: '{self.fast}' is not one of {', '.join(MODES)}")


def load_target(config: TargetConfig, say: Callable[[str], None] = print) -> Target:
    """Open the model and tokenizer of `config.source`. Raises UserError for a source that cannot be loaded."""
    logging.disable_progress_bar()  # transformers' own bars say nothing here
    folder = resolve(config.source, Path(config.cache), say)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with _loading("target.source", config.source):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.dtype))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if config.fast == "graph" and not device.startswith("cuda"):
        raise UserError(f"target.fast: graph needs a CUDA device, this one is {device}; use auto")
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"target.device: cannot use '{device}': {str(error).splitlines()[0]}") from error
    return Target(model, tokenizer, config.name, config.fast, Path(config.cache) / "packing.json")


@dataclass(frozen=True)
class TextSide:
    """What of a target deals with text; Target has the same. window: longest context in tokens."""

    name: str
    tokenizer: Any
    window: int
    stop_tokens: tuple[int, ...]


def load_text_side(config: TargetConfig, say: Callable[[str], None] = print) -> TextSide:
    """The tokenizer and the sizes of a target, without its weights. Raises UserError as load_target() does."""
    folder = resolve(config.source, Path(config.cache), say)
    with _loading("target.source", config.source):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        settings = AutoConfig.from_pretrained(folder)
        try:
            generation = GenerationConfig.from_pretrained(folder)
        except OSError:  # none is saved: transformers derives it from the model's settings
            generation = GenerationConfig.from_model_config(settings)
    return TextSide(config.name, tokenizer, window_of(settings), stop_tokens(generation, tokenizer))


def load_model(source: str, key: str, dtype: torch.dtype, cache: Path) -> tuple[PreTrainedModel, Any]:
    """Another model and its tokenizer, on the CPU. Raises UserError as load_target() does, naming `key`."""
    try:
        folder = resolve(source, cache, print)
    except UserError as error:
        raise UserError(str(error).replace("target.source", key)) from error
    logging.disable_progress_bar()
    with _loading(key, source):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)


@contextlib.contextmanager
def _loading(key: str, source: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{key}: cannot load '{source}': {first} "
            "(it may be a hub id, a model folder, a .gguf file or package:NAME/FILE.gguf)"
        ) from error
