"""Tokenizers with chat templates in the style of the common families (tests/templates/*.jinja)."""

from __future__ import annotations

from pathlib import Path

from tiny import tiny_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

CHATML = ("<|im_start|>", "<|im_end|>")
THINK = (*CHATML, "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# name -> (special tokens, bos, eos, what ends a turn)
STYLES = {
    "smollm2": (CHATML, None, "<|im_end|>", "<|im_end|>"),
    "llama3": (
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|eot_id|>",
    ),
    "qwen3": (THINK, None, "<|im_end|>", "<|im_end|>"),
    "qwen3_thinking": (THINK, None, "<|im_end|>", "<|im_end|>"),
    # Gemma's end of turn is not its eos.
    "gemma": (("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", "<end_of_turn>"),
    "mistral": (("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), "<s>", "</s>", "</s>"),
    "mistral_v1": ((), "<s>", "</s>", "</s>"),
}


def template_tokenizer(style: str) -> PreTrainedTokenizerFast:
    special, bos, eos, _ = STYLES[style]
    tokenizer = tiny_tokenizer()
    # As in the real ones: what marks reasoning and calls is no special token and stays when text is decoded.
    tokenizer.add_tokens([AddedToken(one, special=one not in THINK[2:], normalized=False) for one in special])
    tokenizer.bos_token, tokenizer.eos_token = bos, eos
    tokenizer.chat_template = (Path(__file__).parent / "templates" / f"{style}.jinja").read_text()
    return tokenizer
