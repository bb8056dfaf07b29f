"""How a small drafter of every trained kind is trained; a new file in train/objectives needs a line in TRAINED."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from data.batches import Batch
from specdec import TreeConfig
from specdec.drafter import drafter_module
from train.config import objective_module


@dataclass(frozen=True)
class Trained:
    """One kind, in settings in which it can learn a text of 48 tokens by heart."""

    kind: str
    """The file's name."""
    depth: int
    """Tokens it is taught to guess, and drafts, in a row."""
    model: dict[str, Any]
    """Of its Config."""
    objective: dict[str, Any] = field(default_factory=dict)
    """Of its objective's Config."""
    lr: float = 1e-2
    """AdamW's, for learning by heart."""
    steps: int = 100
    """The same."""
    shifts: tuple[int, ...] = (-1, 1)
    """Wrong horizons that must not learn it; -1 is none where the right one is 1."""

    @property
    def module(self) -> Any:
        return drafter_module(self.kind)

    def drafter(self, target, counts=None, seed=0):
        """A new one, in the target's dtype, with a chain as its tree."""
        counts = torch.arange(target.vocab_size, 0, -1).double() if counts is None else counts
        generator = torch.Generator().manual_seed(seed)
        drafter = self.module.create(self.module.Config(**self.model), target, counts, generator)
        drafter.tree = TreeConfig(depth=self.depth)
        return drafter.to(target.model.dtype)

    def stirred(self, target, counts=None, seed=0):
        """One whose every tensor says something."""
        drafter, generator = self.drafter(target, counts, seed), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in drafter.parameters():
                noise = torch.empty_like(parameter).normal_(0, 0.05, generator=generator)
                parameter.copy_((parameter + noise).float())  # folders are opened in fp32
        return drafter

    def learning(self, drafter, target, **changes):
        """Its objective."""
        module = objective_module(self.kind)
        return module.Objective(module.Config(**(self.objective | changes)), drafter, target)

    def taps(self, target):
        """What a batch has features of."""
        return (*self.module.taps_for(self.module.Config(**self.model), target), "final")

    def batch(self, tokens, mask, target):
        """One text [1, T] as a batch."""
        features = target.features(tokens, self.taps(target)).clone()
        return Batch(tokens, mask, torch.zeros_like(tokens), features)


SIZE = {"draft_vocab_size": 200}
TRAINED = {
    "eagle": Trained("eagle", 4, SIZE, {"unroll": 4}, lr=3e-3),
    "eagle1": Trained("eagle", 3, SIZE | {"generation": 1}, {"unroll": 3, "loss": "0.1*kl"}, lr=3e-3, steps=150),
    "medusa": Trained("medusa", 3, SIZE | {"heads": 3, "layers": 2}, {"teacher_power": 2.0}),
    "draft_model": Trained("draft_model", 4, SIZE | {"layers": [0, 4]}, lr=3e-3, shifts=(1,)),
    "hydra": Trained("hydra", 3, SIZE | {"heads": 3}, {"teacher_power": 2.0}),
}
# Other settings of the same kinds, which learn in their own way.
VARIANTS = {
    f"{kind}-{name}": replace(TRAINED[kind], model=TRAINED[kind].model | model, objective=TRAINED[kind].objective | own)
    for kind in ("medusa", "hydra")
    for name, model, own in (("hard", {}, {"teacher": "hard"}), ("own", {"own_output": True}, {}))
} | {
    "eagle1-hass": replace(TRAINED["eagle1"], objective={"unroll": 3, "loss": "0.1*kl+top:10", "detach": True}, lr=5e-3)
}
