"""A smaller model made of some of a target's layers, and the measured choice of which.

Everything is transformers' own, copied: no layer is written again here. What the small model only borrows (the
embedding, the output matrix, the table of rotary positions) stays the target's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import UserError
from specdec.fast import product
from specdec.inside import decoder_layers
from specdec.target import Target

ROWS = 192  # whose scores are compared at a time
SCALES = (1.0, 0.5, 0.25, 0.125)
"""What a subset's scores are tried with. Before training it is far too sure, some choices more than others, and plain
KL would measure little else: it puts the first 4 of SmolLM2-135M behind its last ones, which train worse."""


class Lent(nn.Module):
    """A part of another model: used, but neither trained, saved, moved nor cast with the one it is put into."""

    like: Tensor

    def __init__(self, part: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._part = [part]  # in a list: not a submodule
        self.register_buffer("like", torch.zeros(0, dtype=dtype, device=device), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the part gives; a tensor in the dtype of the model it is lent to."""
        out = self._part[0](*args, **kwargs)
        return out.to(self.like.dtype) if isinstance(out, Tensor) else out


def lend_tables(model: PreTrainedModel) -> None:
    """Rotary positions stay as precise as they are when the model is cast: their modules are put behind Lent."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_table(child):
                setattr(parent, name, Lent(child, model.dtype, model.device))


def _is_table(module: nn.Module) -> bool:
    return not list(module.parameters()) and any(b.is_floating_point() for b in module.buffers(recurse=False))


def with_layers(target: Target, layers: Sequence[int]) -> PreTrainedModel:
    """A copy of the target's model with these of its layers only, ascending; it borrows what is said above."""
    with target.stock() as model:  # packed products are bound to the layers they were made for
        embedding = model.get_input_embeddings()
        dropped = [layer for index, layer in enumerate(decoder_layers(model)) if index not in layers]
        tables = [module for module in model.modules() if _is_table(module)]
        kept = [embedding, model.get_output_embeddings(), *tables, *dropped]
        small = copy.deepcopy(model, {id(part): part for part in kept})
    own, config = decoder_layers(small), small.config
    for index in reversed(range(len(own))):
        if index not in layers:
            del own[index]
    for index, layer in enumerate(own):
        for module in layer.modules():
            if "layer_idx" in (known := vars(module)):
                known["layer_idx"] = index  # its place in the cache
    for key, value in config.to_dict().items():
        if "layer" in key and isinstance(value, list) and len(value) == target.layers:
            setattr(config, key, [value[index] for index in layers])  # e.g. layer_types
    config.num_hidden_layers = len(own)
    small.set_input_embeddings(Lent(embedding, model.dtype, model.device))
    lend_tables(small)
    return small


def candidates(total: int, count: int) -> list[tuple[int, ...]]:
    """Subsets worth a look: the first layers, the ends and what lies evenly between, the first and the last, …"""
    back = count // 2
    found = [
        range(count),
        [i * (total - 1) // max(1, count - 1) for i in range(count)],
        [*range(count - 1), total - 1],
        [i * total // count for i in range(count)],
        [*range(count - back), *range(total - back, total)],
        [0, *range(total - count + 1, total)],
    ]
    return list(dict.fromkeys(tuple(layers) for layers in found))


def choose_layers(target: Target, count: int, texts: Sequence[Tensor], ids: Tensor, positions: int = 512) -> list[int]:
    """The candidate that is nearest to the target before any training: least mean KL over the tokens `ids`, at the best
    of a few scales.

    texts: ids [T] that the target wrote; about `positions` positions of them are read, some seconds on a CPU. Raises
    UserError without texts.
    """
    if not texts:
        raise UserError("drafter.model.layers: there are no texts to choose layers by; give a list of layers")
    some = texts[:4]
    longest = min(max(map(len, some)), max(1, positions // len(some)))
    tokens = torch.zeros(len(some), longest, dtype=torch.long)
    documents = torch.full_like(tokens, -1)
    for row, text in enumerate(some):
        tokens[row, : len(text)], documents[row, : len(text)] = text[:longest], row
    tokens, documents = tokens.to(target.device), documents.to(target.device)
    head = target.head_rows(ids)

    def states(model: Target) -> Tensor:
        return model.features(tokens, ("final",), documents)[documents >= 0][:, 0]

    teacher = states(target)
    divergence: dict[tuple[int, ...], float] = {}
    for layers in candidates(target.layers, count):
        small = Target(with_layers(target, layers), target.tokenizer, "draft", "off")
        divergence[layers] = _divergence(teacher, states(small), head)
    best = min(divergence, key=lambda layers: divergence[layers])
    return list(best)


@torch.inference_mode()
def _divergence(teacher: Tensor, own: Tensor, head: Tensor) -> float:
    """Mean KL in nats of the laws that a head [V, D] makes of two lists of final states [n, D], at the best scale."""
    totals = torch.zeros(len(SCALES), dtype=torch.float64)
    for p_rows, q_rows in zip(teacher.split(ROWS), own.split(ROWS), strict=True):
        log_p, scores = product(p_rows, head).double().log_softmax(-1), product(q_rows, head).double()
        for index, scale in enumerate(SCALES):
            totals[index] += float((log_p.exp() * (log_p - (scale * scores).log_softmax(-1))).sum())
    return float(totals.min()) / len(teacher)
