"""A distilled draft model: a smaller causal LM with the target's tokenizer, trained to say what the target says.

It is made of some of the target's own layers (specdec/subset.py) or is a model of its own, and drafts as
specdec/assistant.py does. Sources: DistillSpec (2310.08461); a reduced vocabulary, FR-Spec (2502.14856). Training is
train/objectives/draft_model.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from specdec.assistant import DraftModel
from specdec.errors import UserError
from specdec.load import load_model
from specdec.search import TreeConfig
from specdec.subset import choose_layers, lend_tables, with_layers
from specdec.target import Tap, Target
from specdec.vocab import choose_vocab

HEADS = ("frozen", "own")


@dataclass(frozen=True)
class DraftModelConfig:
    """conf/drafter/draft_model.yaml, `model`."""

    source: str | None = None
    """A smaller model with the target's tokenizer: what target.source may be. null: some of the target's layers."""
    layers: list[int] | None = None
    """Without a source: which of the target's layers, counted from 0. null: the best of a few choices of layer_count of
    them, by what they say before any training."""
    layer_count: int = 4
    """How many layers `layers: null` takes."""
    draft_vocab_size: int | None = 8192
    """Tokens it can propose; null: all."""
    head: str = "frozen"
    """Without a source: frozen, the target's own output matrix; own, a copy that is trained and saved. The embedding is
    the target's in both. With a source everything is the drafter's own."""

    def __post_init__(self) -> None:
        if self.layer_count < 1:
            raise UserError(f"drafter.model.layer_count must be 1 or more, got {self.layer_count}")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 16:
            raise UserError(f"drafter.model.draft_vocab_size must be 16 or more, or null, got {self.draft_vocab_size}")
        if self.head not in HEADS:
            raise UserError(f"drafter.model.head: '{self.head}' is not one of {', '.join(HEADS)}")
        if self.layers is not None:
            if self.source is not None:
                raise UserError(
                    "drafter.model.layers are layers of the target; with drafter.model.source leave it null"
                )
            if not self.layers or min(self.layers) < 0 or len(set(self.layers)) < len(self.layers):
                raise UserError(f"drafter.model.layers must be different numbers from 0 up, got {self.layers}")


@dataclass(frozen=True)
class DraftModelShape:
    """Everything that fixes the tensors; saved as the drafter folder's config.json.

    head: frozen, the target's rows; own, rows of the drafter; tied, rows of the drafter's embedding. layers: those of
    the target. settings: the transformers configuration of a model that is no part of the target.
    """

    vocab_size: int
    hidden_size: int
    target_layers: int
    draft_vocab_size: int
    head: str
    layers: list[int] | None
    settings: dict[str, Any] | None


class Reader(Target):
    """The model of a Distilled: once `score` is set its logits are those of the draft vocabulary only."""

    score: Callable[[Tensor], Tensor] | None = None

    def head(self, final: Tensor) -> Tensor:
        return super().head(final) if self.score is None else self.score(final)


class Distilled(DraftModel):
    """A draft model that is trained: parameters are what it has of its own, what it borrows is the target's.

    Buffer draft_ids [draft_vocab_size]: the target's id of each token it can propose, ascending. `output` multiplies by
    their rows of the output matrix, laid together when a saved drafter is opened; in training they are taken anew.
    """

    draft_ids: Tensor

    def __init__(self, shape: DraftModelShape, model: Reader, target: Target) -> None:
        super().__init__(model, target)
        self.shape, self.target = shape, target
        self.body = model.model.base_model
        self.output: nn.Linear | None = None
        if shape.head == "own":  # not a module: its rows are all that is used of it
            self.lm_head = nn.Parameter(torch.zeros(shape.draft_vocab_size, model.width, dtype=model.model.dtype))
        self.register_buffer("draft_ids", torch.arange(shape.draft_vocab_size))
        self.requires_grad_(True)
        self._rows = torch.zeros(0)
        model.score = self._score

    def train(self, mode: bool = True) -> Distilled:  # noqa: ARG002
        """Always as in decoding: dropout would draw from no generator of ours."""
        return super().train(False)

    # -- the network, shared by training and decoding ----------------------------------------------------------

    def states(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """What the output matrix reads, with gradients: tokens and documents [B, T] -> [B, T, D]."""
        return self.model.features(self._known(tokens), ("final",), documents, gradients=True)[:, :, 0]

    def head_rows(self) -> Tensor:
        """Rows of the output matrix, [draft_vocab_size, D]; with gradients where they are trained."""
        if self.shape.head == "own":
            return self.lm_head
        if self.shape.head == "frozen":
            return self.target.head_rows(self.draft_ids).to(self.model.model.dtype)
        weight = self.model.embedding.weight
        assert isinstance(weight, Tensor)
        return weight[: self.shared] if self.ids() is None else weight[self.draft_ids]

    @property
    def _whole(self) -> bool:
        """The target's own head serves as it is."""
        return self.shape.head == "frozen" and self.ids() is None

    def narrow(self) -> None:
        """Lay the rows together for decoding. The layer's weight is a buffer: neither trained nor saved."""
        if self._whole:
            return
        rows = self.head_rows().detach()
        output = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        del output.weight
        output.register_buffer("weight", rows, persistent=False)
        self.output = output

    def _score(self, final: Tensor) -> Tensor:
        """Normed final states [..., D] to logits [..., draft_vocab_size]."""
        if self._whole:
            return self.target.head(final.to(self.target.model.dtype))
        if self.output is not None:
            return self.output(final)
        return nn.functional.linear(final, self._rows)

    # -- the Drafter contract ----------------------------------------------------------------------------------

    def ids(self) -> Tensor | None:
        return None if self.shape.draft_vocab_size == self.shared else self.draft_ids

    def reset(self, rows: int, capacity: int) -> None:
        self.refresh()
        super().reset(rows, capacity)

    def refresh(self) -> None:
        """Score with the weights of now."""
        if self.output is None and not self._whole:
            self._rows = self.head_rows().detach()


Config = DraftModelConfig  # the name the pipeline looks for


def taps_for(config: DraftModelConfig, target: Target) -> tuple[Tap, ...]:  # noqa: ARG001
    """The target's states that this drafter reads beside the final one."""
    return ()


def create(
    config: DraftModelConfig,
    target: Target,
    counts: Tensor,
    generator: torch.Generator,  # noqa: ARG001
    texts: Sequence[Tensor] = (),
) -> Distilled:
    """A drafter that says what its layers, or its source, say already. Raises UserError for what does not fit.

    counts [V]: how often each token occurs in the training texts; the draft vocabulary is the most frequent of them.
    texts: a few of them, ids [T]; layers are chosen by them.
    """
    dtype = _trained_in(target)
    if config.source is None:
        ids = _vocabulary(config, target, counts, target.vocab_size)
        layers = config.layers
        if max(layers or [config.layer_count - 1]) >= target.layers:
            key, wanted = ("layer_count", config.layer_count) if layers is None else ("layers", layers)
            raise UserError(f"drafter.model.{key} is {wanted}, the target has {target.layers} layers")
        layers = choose_layers(target, config.layer_count, texts, ids) if layers is None else sorted(layers)
        model, tokenizer, name, head = with_layers(target, layers), target.tokenizer, "draft", config.head
        settings = None
    else:
        cache = target.packing.parent if target.packing is not None else Path("runs/targets")  # TargetConfig.cache
        model, tokenizer = load_model(config.source, "drafter.model.source", dtype, cache)
        ids = _vocabulary(config, target, counts, min(model.config.vocab_size, target.vocab_size))
        layers, name = None, config.source
        head = "tied" if _matrix(model, name) is model.get_input_embeddings().weight else "own"
        settings = json.loads(model.config.to_json_string(use_diff=False))
    sizes = target.vocab_size, target.width, target.layers, len(ids)
    matrix = _matrix(model, name)
    drafter = _built(DraftModelShape(*sizes, head, layers, settings), model, target, tokenizer, name)
    drafter.draft_ids.copy_(ids)
    if head == "own":
        with torch.no_grad():
            drafter.lm_head.copy_(matrix[ids.to(matrix.device)])
    return drafter


def _trained_in(target: Target) -> torch.dtype:
    return torch.promote_types(target.model.dtype, torch.float32)


def _vocabulary(config: DraftModelConfig, target: Target, counts: Tensor, most: int) -> Tensor:
    size = most if config.draft_vocab_size is None else config.draft_vocab_size
    if size > most:
        raise UserError(f"drafter.model.draft_vocab_size is {size}, drafter and target share {most} tokens")
    return choose_vocab(counts[:most], size, [id for id in target.special_tokens if id < most])


def _matrix(model: PreTrainedModel, name: str) -> Tensor:
    """The output matrix [V, D]. Raises UserError for a head that is more than a matrix."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise UserError(f"{name} ({type(model).__name__}) cannot be distilled: its head is not a plain matrix")
    return head.weight


def _built(shape: DraftModelShape, model: PreTrainedModel, target: Target, tokenizer: Any, name: str) -> Distilled:
    """The drafter around a model, which is checked to score as itself before anything is cast."""
    if shape.settings is not None:
        model = model.to(target.device)
        lend_tables(model)
    reader = Reader(model, tokenizer, name, "off")  # its weights change; opened, the drafter is packed as a whole
    return Distilled(shape, reader, target).to(device=target.device, dtype=_trained_in(target))


def vocabulary(drafter: Distilled) -> Tensor:
    """Ids it can propose, [Vd]."""
    return drafter.draft_ids


def config_of(drafter: Distilled) -> dict[str, Any]:
    """What save_drafter writes beside the weights."""
    return {**asdict(drafter.shape), "tree": asdict(drafter.tree)}


def from_config(config: dict[str, Any], target: Target) -> Distilled:
    """A drafter of the saved shape that lacks its weights. Raises UserError if it was made for another target."""
    shape = DraftModelShape(**{key: value for key, value in config.items() if key != "tree"})
    fixed = {"vocab_size": target.vocab_size, "hidden_size": target.width, "target_layers": target.layers}
    for key, here in fixed.items():
        if config[key] != here and (shape.layers is not None or key == "vocab_size"):
            raise UserError(f"this drafter was made for a target with {key} {config[key]}; {target.name} has {here}")
    if shape.layers is not None:
        model = with_layers(target, shape.layers)
    else:
        assert shape.settings is not None
        settings = CONFIG_MAPPING[shape.settings["model_type"]].from_dict(shape.settings)
        with torch.random.fork_rng(devices=[]):  # what it draws gives way to the saved weights
            model = AutoModelForCausalLM.from_config(settings, dtype=_trained_in(target))
    drafter = _built(shape, model, target, None, "draft")
    drafter.tree = TreeConfig(**config["tree"])
    drafter.register_load_state_dict_post_hook(lambda module, _: module.narrow())
    return drafter
