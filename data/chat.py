"""From a conversation to the ids the target reads, through the tokenizer's own chat template."""

from __future__ import annotations

from typing import Any

from specdec.errors import UserError


def prompt_ids(tokenizer: Any, messages: list[dict[str, str]], where: str) -> list[int]:
    """Ids up to and including the header of the answer. Raises UserError if there is no template or it objects."""
    if tokenizer.chat_template is None:
        raise UserError("the target's tokenizer has no chat template; use an instruction-tuned target")
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except Exception as error:  # templates are code: whatever one raises is about this row
        raise UserError(f"prompt {where}: the target's chat template refuses it: {error}") from error
    return list(encoded["input_ids"])
