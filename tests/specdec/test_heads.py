"""What Medusa's and Hydra's heads share."""

import pytest
import torch

from specdec import Limits, TreeConfig, UserError, generate
from specdec.drafters import hydra, medusa
from specdec.heads import HeadsConfig

HEADS = 3
both = pytest.mark.parametrize("module", [medusa, hydra], ids=["medusa", "hydra"])


def drafter_for(module, target, **changes):
    counts = torch.arange(target.vocab_size, 0, -1).double()
    config = HeadsConfig(**({"heads": HEADS, "draft_vocab_size": 64} | changes))
    return module.create(config, target, counts, torch.Generator().manual_seed(0)).double()


@both
def test_heads_share_no_blocks(target, module):
    """`[Block()] * n` would train one block n times."""
    drafter = drafter_for(module, target, layers=2, own_output=True)
    own = [*drafter.blocks.parameters(), *drafter.outputs.parameters()]
    assert len(own) == HEADS * 2 * 2 + HEADS
    assert len({p.data_ptr() for p in own}) == len(own)


@both
def test_a_tree_deeper_than_the_heads_is_refused(target, module):
    drafter = drafter_for(module, target)
    drafter.tree = TreeConfig(depth=HEADS + 1)
    with pytest.raises(UserError, match=r"drafter\.tree is 4 deep, but there are 3 heads"):
        generate(target, drafter, [[5, 60, 7]], Limits(4))


@both
def test_more_tokens_than_the_target_has_are_refused(target, module):
    with pytest.raises(UserError, match=r"draft_vocab_size is 301, the target has 300 tokens"):
        drafter_for(module, target, draft_vocab_size=301)


@pytest.mark.parametrize("bad", [{"heads": 0}, {"layers": 0}, {"draft_vocab_size": 2}])
def test_bad_settings_are_named(bad):
    with pytest.raises(UserError, match=rf"drafter\.model\.{next(iter(bad))} must be .* or more, got"):
        HeadsConfig(**bad)
