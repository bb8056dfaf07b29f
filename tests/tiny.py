"""Tiny random targets: Llama-shaped, a few thousand parameters, with a tokenizer and a chat template."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 300
EOS = 1
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


def tiny_config(**changes: object) -> LlamaConfig:
    settings: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": EOS,
        "bos_token_id": 2,
        "pad_token_id": EOS,
        "initializer_range": 0.3,  # wide enough that greedy texts do not all fall into the same loop
    }
    return LlamaConfig(**(settings | changes))


def tiny_model(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(**changes)).double()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "</s>": 1, "<s>": 2} | {letter: i + 3 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    return fast


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "bos_token_id": 2,
    "pad_token_id": EOS,
    "initializer_range": 0.3,
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt_neox", "gpt2")


def family_model(family: str, seed: int, attention: str = "sdpa", positions: int = 256) -> PreTrainedModel:
    """A random fp64 model of one of six architectures."""
    torch.manual_seed(seed)
    shared = {**SMALL, "attn_implementation": attention}
    if family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**shared, num_key_value_heads=2))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shared, num_key_value_heads=2))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shared, num_key_value_heads=2, head_dim=16))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**shared, num_key_value_heads=1, sliding_window=None))
    elif family == "gpt_neox":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**shared))
    else:
        names = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": positions, "vocab_size": VOCAB}
        ends = {"eos_token_id": EOS, "bos_token_id": 2, "pad_token_id": EOS, "initializer_range": 0.3}
        model = GPT2LMHeadModel(GPT2Config(**names, **ends, attn_implementation=attention))
    return model.double().eval()
