"""Tuning the target together with its drafter (Medusa-2, 2401.10774 §2.2.2; the same for EAGLE).

First the drafter learns alone; then the target, or low-rank adapters on it, is tuned with it, so that its states tell
more of what comes. What holds the target to what it was is KL(original ‖ tuned) on the same positions: the teacher is
the same network with its adapters off, or a copy where all of it is trained. The tuned target is another model than
the original: decoding is lossless against the tuned one, and how far it went from the original is measured.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from data.batches import Batch
from specdec import fast
from specdec.align import align
from specdec.errors import UserError
from specdec.target import Tap, Target
from train.adapters import LoraConfig, adapters_off, add_adapters, merge
from train.learner import Objective
from train.losses import Total, head_loss, kl


@dataclass(frozen=True)
class JointConfig:
    """conf/config.yaml, `joint`; for target.train=lora or full."""

    lr_factor: float = 0.1
    """The target's learning rate, as a share of fit.lr."""
    warmup: float = 0.3
    """Share of the steps in which only the drafter learns, on the target as it was."""
    drafter_weight: float = 0.2
    """Of the drafter's loss beside KL(original ‖ tuned), per supervised token (the paper's λ_0)."""
    ramp: float = 0.1
    """Share of the steps, after the warm-up, over which that weight rises."""
    layers: int | None = None
    """Tune only the last so many layers; null: all."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """The adapters of target.train=lora."""
    max_kl: float = 0.1
    """Nats per token that the tuned target may be from the original on withheld texts. An evaluation (fit.eval_steps)
    beyond it ends the fit, and the best one within it is used; a fit without one within it fails."""

    def __post_init__(self) -> None:
        if not 0 < self.lr_factor <= 10 or not self.drafter_weight > 0 or not self.max_kl > 0:
            raise UserError("joint.lr_factor must be above 0 (at most 10), joint.drafter_weight and max_kl above 0")
        if not 0 <= self.warmup < 1 or not 0 <= self.ramp <= 1:
            raise UserError("joint.warmup must be from 0 to below 1 and joint.ramp from 0 to 1")
        if self.layers is not None and self.layers < 1:
            raise UserError(f"joint.layers must be 1 or more, or null for all, got {self.layers}")


class Joint:
    """A Learner (train/loop.py) of a drafter and its target.

    The target's embedding and output matrix stay as they are: the drafter shares them.
    """

    def __init__(
        self,
        config: JointConfig,
        mode: str,
        target: Target,
        drafter: nn.Module,
        objective: Objective,
        taps: tuple[Tap, ...],
        seed: int = 0,
    ) -> None:
        self.config, self.target, self.drafter, self.objective, self.taps = config, target, drafter, objective, taps
        self.lora = mode == "lora"
        tuned = _tuned(target, config, self.lora, torch.Generator().manual_seed(seed))
        own = {f"target.{name}": parameter for name, parameter in tuned.items()}
        self.parameters: Mapping[str, nn.Parameter] = {**dict(drafter.named_parameters()), **own}
        self.factors: Mapping[str, float] = dict.fromkeys(own, config.lr_factor)
        self.head = target.model.get_output_embeddings().weight.detach()
        self._copy = None if self.lora else _copy(target)
        for parameter in tuned.values():
            parameter.requires_grad_(True)
        self._weight = 0.0

    @property
    def original(self) -> Target:
        """The target whose states the texts' features are; with adapters only within as_it_was()."""
        return self._copy or self.target

    def as_it_was(self) -> AbstractContextManager[None]:
        """Within, `original` is the target before it was tuned."""
        return adapters_off(self.target.model) if self.lora else contextlib.nullcontext()

    def originals(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Batches whose features are those of the target as it was."""
        while True:
            with self.as_it_was():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def begin(self, share: float) -> None:
        past = share - self.config.warmup
        ramp = min(1.0, past / self.config.ramp) if self.config.ramp else 1.0
        self._weight = 0.0 if past < 0 else self.config.drafter_weight * max(ramp, 1e-3)

    def __call__(self, batch: Batch) -> dict[str, Total]:
        if not self._weight:
            return self.objective(self.drafter, batch)
        features = self.target.features(batch.tokens, self.taps, batch.documents, gradients=True)
        totals = self.objective(self.drafter, replace(batch, features=features))
        away, count = self._distance(batch, features[:, :, -1])
        loss = Total(away + self._weight * totals["loss"].sum, count)
        return {**totals, "loss": loss, "drafter_loss": totals["loss"], "kl_original": Total(away, count)}

    def _distance(self, batch: Batch, final: Tensor) -> tuple[Tensor, Tensor]:
        """Σ KL(original ‖ tuned) over the supervised tokens, and how many they are."""
        slots = align(batch.tokens, batch.loss_mask, batch.documents, batch.features[:, :, -1], 1)
        own, original = final[slots.scored], slots.teacher[slots.scored]
        weights = torch.ones(len(own), dtype=torch.promote_types(own.dtype, torch.float32), device=own.device)
        graded = head_loss(own, self.head, weights, slots.labels[slots.scored], self._laws(original), kl)
        return graded.total, torch.tensor(len(own), dtype=torch.float64, device=own.device)

    def _laws(self, final: Tensor) -> Callable[[slice], Tensor]:
        wide = torch.promote_types(final.dtype, torch.float32)
        return lambda piece: fast.product(final[piece].detach(), self.head).to(wide).softmax(-1)

    def train(self, on: bool) -> None:
        self.drafter.train(on)
        self.target.model.train(on and self.lora and self.config.lora.dropout > 0)

    def state(self) -> dict[str, Tensor]:
        return self.drafter.state_dict()

    def excess(self, quality: Mapping[str, float]) -> str | None:
        """What is wrong where the target went further than allowed."""
        distance, most = quality["kl_original"], self.config.max_kl
        if distance <= most:
            return None
        return f"the tuned target is {distance:.3f} nats a token from the original (joint.max_kl={most:g})"

    @torch.no_grad()
    def quality(self, batches: Sequence[Batch]) -> dict[str, float]:
        """How far the target is from what it was, over texts: KL in nats per token, and the perplexity of the texts
        under both."""
        distance = before = after = count = 0.0
        for batch in batches:
            final = self.target.features(batch.tokens, ("final",), batch.documents)[:, :, -1]
            away, tokens = self._distance(batch, final)
            slots = align(batch.tokens, batch.loss_mask, batch.documents, batch.features[:, :, -1], 1)
            labels = slots.labels[slots.scored]
            before += self._surprise(slots.teacher[slots.scored], labels)
            after += self._surprise(final[slots.scored], labels)
            distance, count = distance + float(away), count + float(tokens)
        logs = torch.tensor([before, after], dtype=torch.float64) / max(count, 1.0)
        perplexity, tuned = logs.exp().tolist()
        return {"kl_original": distance / max(count, 1.0), "perplexity": tuned, "perplexity_original": perplexity}

    def _surprise(self, final: Tensor, labels: Tensor) -> float:
        total = 0.0
        for rows, own in zip(final.split(256), labels.split(256), strict=True):
            logits = fast.product(rows, self.head).to(torch.promote_types(rows.dtype, torch.float32))
            total += float(nn.functional.cross_entropy(logits, own, reduction="sum"))
        return total

    def finish(self) -> None:
        """Make the target an ordinary model again: adapters merged, nothing trained any more."""
        if self.lora:
            merge(self.target.model)
        self.target.model.requires_grad_(False)


def _tuned(target: Target, config: JointConfig, lora: bool, generator: torch.Generator) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; with `lora` the adapters are put on."""
    layers = target.decoder_layers
    first = 0 if config.layers is None else max(0, len(layers) - config.layers)
    found: dict[str, nn.Parameter] = {}
    for number in range(first, len(layers)):
        own = add_adapters(layers[number], config.lora, generator) if lora else dict(layers[number].named_parameters())
        found |= {f"layers.{number}.{name}": parameter for name, parameter in own.items()}
    if lora:
        target.model.requires_grad_(False)
    elif isinstance(norm := target.final_norm(), nn.Parameter):
        found["norm"] = norm
    return found


def _copy(target: Target) -> Target:
    """The original beside the one that is trained."""
    return Target(copy.deepcopy(target.model), target.tokenizer, target.name, "off")
