"""A small drafter of every kind for the tiny target; a new file in specdec/drafters needs an entry here."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from tiny import tiny_model, tiny_tokenizer

from specdec import Target, TreeConfig
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.eagle import EagleConfig, create
from specdec.drafters.hydra import HydraConfig
from specdec.drafters.hydra import create as create_hydra
from specdec.drafters.medusa import MedusaConfig
from specdec.drafters.medusa import create as create_medusa
from specdec.drafters.ngram import Ngram
from specdec.drafters.none import Plain

TREES = {
    "chain": TreeConfig(depth=4),
    "drawn": TreeConfig(depth=3, draw=True),
    # Not level by level: the order of the nodes is that of the paths.
    "static": TreeConfig(kind="static", paths=[[0], [0, 0], [1], [0, 0, 0], [1, 0], [2], [0, 0, 1], [0, 1]]),
    "drawn_static": TreeConfig(kind="static", draw=True, paths=[[0], [0, 0], [0, 0, 0], [1], [0, 0, 1], [1, 0]]),
    "dynamic": TreeConfig(kind="dynamic", depth=3, width=3, nodes=9),
}


def sized(config, target):
    """With a draft vocabulary of 200 tokens, or of all there are, which may be too few outside tests."""
    object.__setattr__(config, "draft_vocab_size", min(200, target.vocab_size))
    return config


def eagle(target, tree, seed=0, generation=3):
    counts = torch.arange(target.vocab_size, 0, -1).double()
    config = sized(EagleConfig(generation=generation), target)
    drafter = create(config, target, counts, torch.Generator().manual_seed(seed))
    drafter.tree = tree
    return drafter.to(target.model.dtype)


def eagle1(target, tree, seed=0):
    return eagle(target, tree, seed, generation=1)


def medusa(target, tree, seed=0):
    """Heads that differ, so that a wrong one shows."""
    counts = torch.arange(target.vocab_size, 0, -1).double()
    generator = torch.Generator().manual_seed(seed)
    drafter = create_medusa(sized(MedusaConfig(), target), target, counts, generator)
    with torch.no_grad():
        for parameter in drafter.blocks.parameters():
            parameter.normal_(0, 0.05, generator=generator)
    drafter.tree = tree
    return drafter.to(target.model.dtype)


def hydra(target, tree, seed=0):
    """Heads that differ and heed the tokens they follow."""
    counts = torch.arange(target.vocab_size, 0, -1).double()
    generator = torch.Generator().manual_seed(seed)
    drafter = create_hydra(sized(HydraConfig(), target), target, counts, generator)
    with torch.no_grad():
        for parameter in [*drafter.mix.parameters(), *drafter.blocks.parameters()]:
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.05, generator=generator))
    drafter.tree = tree
    return drafter.to(target.model.dtype)


def draft_model(target, tree, seed=0):
    """A random model of its own, with a vocabulary padded to another size."""
    window = target.window - 4  # outgrown before the target is
    changes = {"num_hidden_layers": 2, "vocab_size": target.vocab_size + 8, "max_position_embeddings": window}
    model = tiny_model(seed + 7, **changes).to(target.model.dtype)
    return DraftModel(Target(model, tiny_tokenizer() if target.tokenizer else None, "draft"), target, tree)


def itself(target, tree, seed=0):  # noqa: ARG001
    """The control: the target drafts for itself."""
    return DraftModel(Target(target.model, target.tokenizer, "itself"), target, tree)


MAKERS = {
    "eagle": eagle,
    "eagle1": eagle1,
    "medusa": medusa,
    "hydra": hydra,
    "draft_model": draft_model,
    "itself": itself,
}
# kind-tree -> maker(target, seed)
DRAFTERS = {
    f"{kind}-{name}": (lambda target, seed=0, make=make, tree=tree: make(target, tree, seed))
    for kind, make in MAKERS.items()
    for name, tree in TREES.items()
    if kind != "eagle1" or name in ("chain", "dynamic")  # EAGLE-3's in all but the network
} | {
    "ngram": lambda target, seed=0: Ngram(),  # noqa: ARG005
    "none": lambda target, seed=0: Plain(),  # noqa: ARG005
}
COVERED = {"eagle", "medusa", "hydra", "draft_model", "ngram", "none"}


@st.composite
def paths(draw, children=4, depth=4):
    """A static tree's paths: parents before children, anything else as it comes."""
    found = []
    for _ in range(draw(st.integers(1, 10))):
        free = [
            (*parent, rank)
            for parent in [(), *found]
            for rank in range(children)
            if len(parent) < depth and (*parent, rank) not in found
        ]
        found.append(draw(st.sampled_from(free)))
    return [list(path) for path in found]
