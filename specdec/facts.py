"""What a target is: sizes, window, stop tokens, and the parts of it that drafters borrow."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import UserError


class Facts:
    """Read off the model and its tokenizer; the base of Target."""

    model: PreTrainedModel
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def width(self) -> int:
        return self.model.config.hidden_size

    @property
    def layers(self) -> int:
        return self.model.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def window(self) -> int:
        """Longest context the model was made for, in tokens."""
        return window_of(self.model.config)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end an answer: the generation config's, and the tokenizer's own end token."""
        return stop_tokens(self.model.generation_config, self.tokenizer)

    @property
    def special_tokens(self) -> tuple[int, ...]:
        """Ids an answer can contain that no text does: stop tokens, special ones, and what the template marks with."""
        if self.tokenizer is None:
            return self.stop_tokens
        template = self.tokenizer.chat_template or ""
        marks = [id for id, token in self.tokenizer.added_tokens_decoder.items() if token.content in template]
        return tuple(sorted({*self.stop_tokens, *self.tokenizer.all_special_ids, *marks}))

    @property
    def embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def head(self, final: Tensor) -> Tensor:
        """Normed final states [..., D] to logits [..., V]."""
        return self.model.get_output_embeddings()(final)

    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows of the output matrix: ids [n] -> [n, D]."""
        return self.model.get_output_embeddings().weight[ids.to(self.device)]

    def final_norm(self) -> Tensor:
        """Weight of the norm before the head, [D]; ones where the model has none by that name."""
        norms = [
            m for name, m in self.model.base_model.named_children() if name in ("norm", "final_layer_norm", "ln_f")
        ]
        return cast(Tensor, norms[0].weight) if norms else torch.ones(self.width, device=self.device)

    @property
    def head_dim(self) -> int:
        config = self.model.config
        return config.to_dict().get("head_dim") or self.width // config.num_attention_heads

    @property
    def rope_theta(self) -> float:
        config = self.model.config.to_dict()
        return float((config.get("rope_parameters") or config).get("rope_theta", 10000.0))


def stop_tokens(generation: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end an answer, by a generation config and a tokenizer, either of which may be None."""
    ids = generation.eos_token_id if generation else None
    found = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def window_of(config: Any) -> int:
    """Longest context of a model's configuration. Raises UserError where it names none."""
    known = config.get_text_config().to_dict()
    longest = known.get("max_position_embeddings") or known.get("n_positions")
    if not longest:
        raise UserError(f"{config.model_type} models name no longest context (max_position_embeddings)")
    return longest
