"""Medusa's own: how its heads begin, and what is refused."""

import pytest
import torch

from specdec import Limits, TreeConfig, UserError, generate
from specdec.drafters.medusa import MedusaConfig, create

PROMPT = [5, 60, 7, 81, 9]
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


def test_heads_share_no_blocks(target):
    """`[Block()] * n` would train one block n times."""
    drafter = drafter_for(target, layers=2, own_output=True)
    assert len(list(drafter.blocks.parameters())) == HEADS * 2 * 2
    assert len({p.data_ptr() for p in drafter.parameters()}) == HEADS * 2 * 2 + HEADS


def test_a_tree_deeper_than_the_heads_is_refused(target):
    drafter = drafter_for(target)
    drafter.tree = TreeConfig(depth=HEADS + 1)
    with pytest.raises(UserError, match=r"drafter\.tree is 4 deep, but there are 3 heads"):
        generate(target, drafter, [PROMPT], Limits(4))


@pytest.mark.parametrize("bad", [{"heads": 0}, {"layers": 0}, {"draft_vocab_size": 2}])
def test_bad_settings_are_named(bad):
    with pytest.raises(UserError, match=r"drafter\.model"):
        MedusaConfig(**bad)
