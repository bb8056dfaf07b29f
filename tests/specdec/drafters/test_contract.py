"""Every file in specdec/drafters: whatever it proposes, the text is the target's."""

import pytest
import torch
from conftest import EOS

from specdec import Limits, Sampling, generate
from specdec.drafter import drafter_module, kinds, open_drafter, save_drafter
from specdec.drafters.none import Plain
from specdec.errors import UserError

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3]]
TRAINED = [kind for kind in kinds() if kind != "none"]


def make(kind, target, seed=0):
    module = drafter_module(kind)
    config = module.Config(draft_vocab_size=200)
    generator = torch.Generator().manual_seed(seed)
    counts = torch.arange(target.vocab_size, 0, -1).double()
    return module.create(config, target, counts, generator).double(), module


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("limit", [1, 2, 5, 40])
def test_greedy_text_is_the_targets(target, kind, limit):
    drafter, _ = make(kind, target)
    limits = Limits(limit, (EOS,))
    expected = [g.tokens for g in generate(target, Plain(), PROMPTS, limits)]
    assert [g.tokens for g in generate(target, drafter, PROMPTS, limits)] == expected
    alone = [generate(target, drafter, [p], limits)[0].tokens for p in PROMPTS]
    assert alone == expected


@pytest.mark.parametrize("kind", TRAINED)
def test_proposals_of_a_row_do_not_depend_on_the_others(target, kind):
    drafter, _ = make(kind, target)
    together = generate(target, drafter, PROMPTS, Limits(30))
    alone = [generate(target, drafter, [p], Limits(30))[0] for p in PROMPTS]
    assert [g.rounds for g in together] == [g.rounds for g in alone]


@pytest.mark.parametrize("kind", TRAINED)
def test_saved_and_opened_is_the_same_drafter(target, kind, tmp_path):
    drafter, module = make(kind, target)
    save_drafter(drafter, kind, module.config_of(drafter), tmp_path)
    again = open_drafter(tmp_path, target)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    runs = [generate(target, d, PROMPTS, Limits(20)) for d in (drafter, again)]
    assert [g.rounds for g in runs[0]] == [g.rounds for g in runs[1]]


@pytest.mark.parametrize("kind", TRAINED)
def test_first_sampled_token_has_the_targets_distribution(target, kind):
    """Two rounds at temperature 1 over many rows: the second token's counts against plain decoding's."""
    drafter, _ = make(kind, target)
    rows, vocab = 3000, 300
    counts = []
    for one, seed in ((drafter, 1), (Plain(), 2)):
        generator = torch.Generator().manual_seed(seed)
        out = generate(target, one, [[5, 6, 7]] * rows, Limits(2), Sampling(1.0, top_k=4), generator)
        counts.append(torch.bincount(torch.tensor([g.tokens[1] for g in out]), minlength=vocab).double())
    a, b = counts
    used = (a + b) >= 10
    chi2 = float((((a - b) ** 2) / (a + b).clamp(min=1))[used].sum())
    freedom = int(used.sum())
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5


def test_folders_that_are_no_drafters_are_named(target, tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        open_drafter(tmp_path, target)
    with pytest.raises(UserError, match=r"'eagel' does not exist.*Did you mean 'eagle'"):
        drafter_module("eagel")
