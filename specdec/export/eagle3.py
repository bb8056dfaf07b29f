"""The one EAGLE-3 folder that vLLM, SGLang and TensorRT-LLM load: config.json and model.safetensors.

A wrong export never shows as wrong text, only as lost speed, and engines load most of them silently. So the exporter
checks its own key set, shapes, vocabulary map and config, reads the folder back and compares it with the drafter.
llama.cpp loads it too when the two 3.1 flags (fc_norm, norm_output) are off.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdec.drafters.eagle import Eagle
from specdec.eagle_network import EagleShape
from specdec.errors import UserError
from specdec.layers import grouped
from specdec.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER = {
    "hidden_norm": "hidden_norm",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
FORBIDDEN = ("bias", "norm_before_residual", "target_hidden_size")


def refusal(kind: str, model: Any) -> str | None:
    """Why a drafter of this kind has no such folder, None where it has. model: its settings or, of eagle, its shape."""
    if kind != "eagle":
        return f"no layout for drafters of kind {kind} yet"
    if model.generation != 3:
        return "no layout for EAGLE-1 (drafter.model.generation=1) yet"
    if model.taps is not None and len(model.taps) != 3:
        return f"engines load EAGLE-3 with three taps, this drafter has drafter.model.taps={model.taps}"
    return None


def export(drafter: Eagle, target: Target, folder: Path, dtype: str = "float32") -> dict[str, float]:
    """Write, check and read back. The folder appears whole or not at all.

    Returns the largest relative difference of the read-back drafter's states and logits. Raises UserError for an
    unknown dtype or a drafter that engines do not load, RuntimeError if the check fails (nothing is left behind then).
    """
    if dtype not in DTYPES:
        raise UserError(f"export.dtype: '{dtype}' is not one of {', '.join(DTYPES)}")
    if problem := refusal("eagle", drafter.shape):
        raise UserError(f"export.engines: {problem}")
    working = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    try:
        tensors = tensors_of(drafter, DTYPES[dtype])
        save_file(tensors, working / "model.safetensors", metadata={"format": "pt"})
        config = config_for(drafter.shape, target, dtype)
        (working / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        problems = check(working, drafter.shape)
        if problems:
            raise RuntimeError(f"the export failed its own check: {'; '.join(problems)}")
        differences = compare(drafter, load(working, target.embedding), DTYPES[dtype])
        shutil.rmtree(folder, ignore_errors=True)
        working.rename(folder)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return differences


def tensors_of(drafter: Eagle, dtype: torch.dtype) -> dict[str, Tensor]:
    """The drafter's tensors under the names engines read (EAGLE / SpecForge names)."""
    out = {
        "fc.weight": drafter.fc.weight,
        "norm.weight": drafter.get_parameter("norm.weight"),
        "lm_head.weight": drafter.lm_head.weight,
    }
    modules = dict(drafter.layer.named_children())
    out |= {f"midlayer.{LAYER[name]}.weight": module.weight for name, module in modules.items()}  # type: ignore[misc]
    out |= {f"fc_norm.{i}.weight": norm.weight for i, norm in enumerate(drafter.fc_norm)}  # type: ignore[misc]
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous().clone() for name, tensor in out.items()}
    ids = drafter.draft_ids.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))  # an offset: target id minus row
    tensors["t2d"] = torch.zeros(drafter.shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def config_for(shape: EagleShape, target: Target, dtype: str) -> dict[str, Any]:
    """config.json, with everything an engine would otherwise take from a default."""
    source = target.model.config
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "pad_token_id": source.pad_token_id,
        "torch_dtype": dtype,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
    }
    count = shape.target_layers
    if shape.taps != [2, count // 2, count - 3]:
        # Engines number layers differently: the top-level key counts the residual stream entering a layer, the nested
        # one (SGLang, SpecForge) its output.
        config["eagle_aux_hidden_state_layer_ids"] = shape.taps
        nested = [tap - 1 for tap in shape.taps]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": nested, "use_aux_hidden_state": True}
    return config


def shapes_for(shape: EagleShape) -> dict[str, tuple[int, ...]]:
    """The exact key set and shapes that engines expect."""
    h, q, kv = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = shape.intermediate_size
    table: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(shape.taps) * h),
        "norm.weight": (h,),
        "lm_head.weight": (shape.draft_vocab_size, h),
        "d2t": (shape.draft_vocab_size,),
        "t2d": (shape.vocab_size,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (inner, h),
        "midlayer.mlp.up_proj.weight": (inner, h),
        "midlayer.mlp.down_proj.weight": (h, inner),
    }
    table |= {
        f"midlayer.{name}.weight": (h,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    }
    return table | {f"fc_norm.{i}.weight": (h,) for i in range(len(shape.taps) if shape.fc_norm else 0)}


def check(folder: Path, shape: EagleShape) -> list[str]:
    """Everything wrong with an export; empty when an engine will read what we mean."""
    problems = []
    tensors = load_file(folder / "model.safetensors")
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = shapes_for(shape)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            problems.append(f"tensor {name}: shape {found.get(name)}, expected {expected.get(name)}")
    problems += [
        f"tensor {n} is not finite" for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()
    ]
    if not problems:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        if tensors["d2t"].dtype != torch.int64 or int(ids.min()) < 0 or int(ids.max()) >= shape.vocab_size:
            problems.append("d2t must be int64 offsets that stay inside the target's vocabulary")
        elif not bool((ids.diff() > 0).all()):
            problems.append("d2t must give ascending target ids")
        elif not torch.equal(tensors["t2d"].nonzero()[:, 0], ids):
            problems.append("t2d does not mark the same tokens as d2t")
    config = json.loads((folder / "config.json").read_text())
    problems += [f"config key {key} must not be there" for key in FORBIDDEN if key in config]
    if config["tie_word_embeddings"] is not False or config["num_hidden_layers"] != 1:
        problems.append("config must have tie_word_embeddings false and num_hidden_layers 1")
    return problems


def load(folder: Path, embedding: nn.Module) -> Eagle:
    """The exported folder as a drafter again, from nothing but its own files."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    width = config["hidden_size"]
    taps = config.get("eagle_aux_hidden_state_layer_ids")
    shape = EagleShape(
        hidden_size=width,
        intermediate_size=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        taps=taps or list(range(tensors["fc.weight"].shape[1] // width)),
        target_layers=0,
        rope_theta=config["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        fc_norm=config["fc_norm"],
        norm_output=config["norm_output"],
    )
    drafter = Eagle(shape, embedding)
    names = {f"midlayer.{outside}.weight": f"layer.{inside}.weight" for inside, outside in LAYER.items()}
    state = {names.get(n, n): t for n, t in tensors.items() if n not in ("d2t", "t2d")}
    state["draft_ids"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    drafter.load_state_dict(state)
    return drafter.eval()


@torch.inference_mode()
def compare(drafter: Eagle, again: Eagle, dtype: torch.dtype) -> dict[str, float]:
    """Largest relative difference of state and logits over two steps on fixed inputs.

    Raises RuntimeError when it is more than rounding to `dtype` explains, or when the draft ids differ.
    """
    shape = drafter.shape
    unknown = {"taps": 0, "target_layers": 0}  # the folder leaves them out where they are the default
    same = asdict(shape) | unknown == asdict(again.shape) | unknown
    if not same or not torch.equal(drafter.draft_ids.cpu(), again.draft_ids):
        raise RuntimeError("the export read back has another shape or vocabulary than the drafter")
    device = drafter.fc.weight.device
    again = again.to(device, drafter.fc.weight.dtype)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (1, 8), generator=generator).to(device)
    features = torch.randn(1, 8, len(shape.taps), shape.hidden_size, generator=generator).to(again.fc.weight)
    outputs = []
    position = torch.arange(8, device=device)[None]
    for one in (drafter, again):
        normed, hidden = one.step(tokens, one.fuse(features), position, lambda q, k, v: grouped(q, k, v, None))
        later, _ = one.step(tokens, hidden, position + 1, lambda q, k, v: grouped(q, k, v, None))
        states = torch.cat([normed, later], 1)
        outputs.append((states, one.logits(states)))
    limit = 1e-5 if dtype == torch.float32 else 0.05
    differences = {}
    for name, a, b in zip(("states", "logits"), *outputs, strict=True):
        differences[name] = float((a - b).abs().max() / a.abs().max())
        if not differences[name] <= limit:
            raise RuntimeError(f"the export read back differs from the drafter: {name} by {differences[name]:.2e}")
    return differences


def launch_commands(folder: Path, source: str, depth: int) -> dict[str, str]:
    """How to serve with it, per engine."""
    spec = json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": depth})
    return {
        "vLLM": f"vllm serve {source} --speculative-config '{spec}'",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {source} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {folder} --speculative-num-steps {depth} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}"
        ),
        "TensorRT-LLM": (
            f"trtllm-serve {source} --config c.yaml   # speculative_config: "
            f"{{decoding_type: Eagle3, max_draft_len: {depth}, speculative_model: {folder}}}"
        ),
    }
