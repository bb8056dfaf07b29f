"""Medusa's own: how its heads begin."""

import torch

from specdec.drafters.medusa import MedusaConfig, create

HEADS = 3


def drafter_for(target, counts=None, **changes):
    if counts is None:
        counts = torch.arange(target.vocab_size, 0, -1).double()
    config = MedusaConfig(**({"heads": HEADS, "draft_vocab_size": 64} | changes))
    return create(config, target, counts, torch.Generator().manual_seed(0)).double()


def test_every_head_begins_as_the_targets_own(target):
    drafter = drafter_for(target, draft_vocab_size=200)
    final = target.features(torch.tensor([[5, 6, 7]]), ("final",))[0, :, -1].clone()
    expected = target.head(final)[:, drafter.draft_ids]
    for head in range(HEADS):
        assert torch.allclose(drafter.output(head)(drafter.hidden(head, final)), expected)
