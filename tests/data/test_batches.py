import itertools

import torch

from data.batches import batches, collate, epoch_order
from data.distill import Text


def texts(target, features=True):
    out = []
    for i in range(7):
        tokens = torch.randint(3, 200, (5 + 3 * i,), generator=torch.Generator().manual_seed(i))
        kept = target.features(tokens[None], (1, "final"))[0][:-1] if features else None
        out.append(Text(tokens, 3, kept))
    return out


def test_every_text_once_an_epoch_in_another_order(target):
    data = texts(target)
    orders = [epoch_order(data, 2, 0, epoch) for epoch in range(2)]
    for order in orders:
        assert sorted(itertools.chain(*order)) == list(range(7))
    assert orders[0] != orders[1]
    assert orders[0] == epoch_order(data, 2, 0, 0)


def test_starting_later_gives_the_batches_a_whole_run_has(target):
    data = texts(target)
    whole = list(itertools.islice(batches(data, target, (1, "final"), 2, 0, False), 9))
    later = list(itertools.islice(batches(data, target, (1, "final"), 2, 0, False, start=5), 4))
    for a, b in zip(whole[5:], later, strict=True):
        assert torch.equal(a.tokens, b.tokens)


def test_kept_and_recomputed_features_agree(target):
    kept = collate(texts(target)[:3], target, (1, "final"), False)
    fresh = collate(texts(target, features=False)[:3], target, (1, "final"), False)
    assert torch.equal(kept.tokens, fresh.tokens)
    for row, text in enumerate(texts(target)[:3]):
        size = len(text.tokens) - 1
        assert torch.allclose(kept.features[row, :size], fresh.features[row, :size], atol=1e-6)


def test_masks_come_from_lengths(target):
    batch = collate(texts(target)[:2], target, (1, "final"), False)
    assert batch.loss_mask.sum(1).tolist() == [2, 5]
    assert (batch.documents >= 0).sum(1).tolist() == [5, 8]
    everything = collate(texts(target)[:2], target, (1, "final"), True)
    assert everything.loss_mask.sum(1).tolist() == [5, 8]
