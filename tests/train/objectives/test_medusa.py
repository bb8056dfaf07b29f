"""Medusa: memorise one text, decode it, and nearly all is accepted; the neighbouring horizons fail."""

import pytest
import torch
from tiny import EOS

from data.batches import Batch
from specdec import Limits, TreeConfig, UserError, generate
from specdec.drafters.medusa import MedusaConfig, create
from specdec.drafters.none import Plain
from train.objectives.medusa import MedusaObjective, MedusaObjectiveConfig
from train.optim import Optimizers

PROMPT = [5, 60, 7, 81, 9]
HEADS = 3


def drafter_for(target, counts=None, **changes):
    if counts is None:
        counts = torch.arange(target.vocab_size, 0, -1).double()
    config = MedusaConfig(**({"heads": HEADS, "draft_vocab_size": 64} | changes))
    return create(config, target, counts, torch.Generator().manual_seed(0)).double()


def memorised_accepted_length(target, shift=0, teacher="soft", **changes):
    answer = generate(target, Plain(), [PROMPT], Limits(48, (EOS,)))[0].tokens
    tokens = torch.tensor([PROMPT + answer])
    mask = torch.zeros_like(tokens).bool()
    mask[0, len(PROMPT) :] = True
    counts = torch.bincount(tokens[0], minlength=target.vocab_size).double()
    drafter = drafter_for(target, counts, layers=2, **changes)
    drafter.tree = TreeConfig(depth=HEADS)
    objective = MedusaObjective(MedusaObjectiveConfig(teacher=teacher), drafter, target)
    objective.horizon += shift
    batch = Batch(tokens, mask, torch.zeros_like(tokens), target.features(tokens, ("final",)).clone())
    optimizer = Optimizers(dict(drafter.named_parameters()), "adamw", 1e-2, 0.0)
    for _ in range(200):
        objective(drafter, batch)["loss"].mean().backward()
        optimizer.step(1.0)
    out = generate(target, drafter, [PROMPT], Limits(48, (EOS,)))[0]
    assert out.tokens == answer
    return out.accepted_length


@pytest.mark.parametrize(
    ("teacher", "own_output"), [("soft", False), ("hard", False), ("soft", True)], ids=["soft", "hard", "own"]
)
def test_a_memorised_text_is_accepted(target, teacher, own_output):
    assert memorised_accepted_length(target, teacher=teacher, own_output=own_output) >= 0.9 * (HEADS + 1)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_horizon_off_by_one_fails(target, shift):
    assert memorised_accepted_length(target, shift) < 0.6 * (HEADS + 1)


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


def test_training_and_decoding_see_the_same_laws(target):
    """What a head gives at slot t in training is what a decode from the prefix that ends there proposes by."""
    drafter = drafter_for(target, draft_vocab_size=200)
    with torch.no_grad():
        for parameter in drafter.blocks.parameters():
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(3, 200, (1, 14), generator=torch.Generator().manual_seed(1))
    final = target.features(tokens, ("final",))[:, :, -1]
    slot, seen = 6, []
    drafter.tree = TreeConfig(depth=HEADS)
    original = drafter.hidden
    drafter.hidden = lambda head, state: seen.append((head, state)) or original(head, state)
    prompt = tokens[0, : slot + 1].tolist()  # the pending token follows slot t
    generate(target, drafter, [prompt], Limits(2))
    assert [head for head, _ in seen] == list(range(HEADS))
    for _, state in seen:
        assert torch.allclose(state[0], final[0, slot], atol=1e-10)


def test_packed_texts_and_padding_change_nothing(target):
    drafter = drafter_for(target, draft_vocab_size=200)
    objective = MedusaObjective(MedusaObjectiveConfig(), drafter, target)
    texts = [torch.randint(3, 200, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 14)]

    def batch(rows, width):
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        documents, number = torch.full_like(tokens, -1), 0
        mask = torch.zeros_like(tokens).bool()
        for row, members in enumerate(rows):
            at = 0
            for text in members:
                end = at + len(text)
                tokens[row, at:end], documents[row, at:end], mask[row, at + 3 : end] = text, number, True
                at, number = end, number + 1
        return Batch(tokens, mask, documents, target.features(tokens, ("final",), documents).clone())

    apart = objective(drafter, batch([[texts[0]], [texts[1]]], 17))
    packed = objective(drafter, batch([texts], 25))
    for name, total in apart.items():
        assert torch.allclose(total.sum, packed[name].sum)
        assert float(total.count) == pytest.approx(float(packed[name].count))


def test_a_tree_deeper_than_the_heads_is_refused(target):
    drafter = drafter_for(target)
    drafter.tree = TreeConfig(depth=HEADS + 1)
    with pytest.raises(UserError, match=r"drafter\.tree is 4 deep, but there are 3 heads"):
        generate(target, drafter, [PROMPT], Limits(4))


@pytest.mark.parametrize("bad", [{"heads": 0}, {"layers": 0}, {"draft_vocab_size": 2}])
def test_bad_settings_are_named(bad):
    with pytest.raises(UserError, match=r"drafter\.model"):
        MedusaConfig(**bad)
