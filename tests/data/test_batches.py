import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS

from data.batches import Batch, batches, batches_per_epoch, collate, epoch_order
from data.texts import Text
from specdec import UserError

TAPS = (1, "final")
PACKINGS = [None, 40]


def texts(target, features=True, lengths=range(5, 26, 3)):
    out = []
    for i, length in enumerate(lengths):
        tokens = torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(i))
        kept = target.features(tokens[None], TAPS)[0][:-1] if features else None
        out.append(Text(tokens, ((3, length),), kept))
    return out


def take(data, target, count, **changes):
    return list(itertools.islice(batches(data, target, TAPS, 2, 0, False, **changes), count))


def assert_same(a: Batch, b: Batch):
    for field in dataclasses.fields(Batch):
        assert torch.equal(torch.as_tensor(getattr(a, field.name)), torch.as_tensor(getattr(b, field.name))), field.name


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=200),
    st.integers(1, 5),
    st.integers(0, 9),
    st.none() | st.integers(1, 70),
)
def test_every_text_once_an_epoch_and_no_row_too_full(lengths, batch_size, epoch, pack_tokens):
    order = epoch_order(lengths, batch_size, 0, epoch, pack_tokens)
    rows = [row for batch in order for row in batch]
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= batch_size for batch in order)
    assert all(len(row) == 1 or sum(lengths[i] for i in row) <= (pack_tokens or 0) for row in rows)


@pytest.mark.parametrize("pack_tokens", PACKINGS)
def test_another_order_every_epoch_and_the_same_one_again(pack_tokens):
    lengths = list(range(5, 26))
    orders = [epoch_order(lengths, 2, 0, epoch, pack_tokens) for epoch in range(2)]
    assert orders[0] != orders[1]
    assert orders[0] == epoch_order(lengths, 2, 0, 0, pack_tokens)


def test_unpacked_order_stays_what_it_was():
    """Runs begun before there was packing go on: this is the order they had."""
    order = epoch_order([5 + 3 * i % 11 for i in range(7)], 2, 3, 1)
    assert order == [[[2], [6]], [[3]], [[0], [4]], [[1], [5]]]


def test_packing_leaves_little_room():
    lengths = torch.randint(120, 301, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    order = epoch_order(lengths, 4, 0, 0, 1024)
    places = sum(len(batch) * max(sum(lengths[i] for i in row) for row in batch) for batch in order)
    assert sum(lengths) / places > 0.97


@pytest.mark.parametrize("pack_tokens", PACKINGS)
@pytest.mark.parametrize("start", range(0, 12))
def test_starting_later_gives_the_batches_a_whole_run_has(target, start, pack_tokens):
    data = texts(target)
    whole = take(data, target, 13, pack_tokens=pack_tokens)
    assert [batch.number for batch in whole] == list(range(13))
    for a, b in zip(whole[start:], take(data, target, 13 - start, start=start, pack_tokens=pack_tokens), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("pack_tokens", PACKINGS)
@pytest.mark.parametrize(("world", "start"), [(2, 0), (2, 3), (3, 0), (3, 5)])
def test_ranks_in_turn_give_what_one_would_have_had(target, world, start, pack_tokens):
    data = texts(target)
    one = take(data, target, 4 * world, start=start, pack_tokens=pack_tokens)
    shares = [
        take(data, target, 4, start=start, pack_tokens=pack_tokens, rank=rank, world=world) for rank in range(world)
    ]
    for a, b in zip(one, itertools.chain(*zip(*shares, strict=True)), strict=True):
        assert_same(a, b)


def test_an_epoch_has_as_many_batches_as_were_counted(target):
    data = texts(target, features=False)
    assert batches_per_epoch(data, 2, 0) == 4
    for pack_tokens in (None, 26, 40, 1000):
        count = batches_per_epoch(data, 2, 0, pack_tokens)
        seen = sum((batch.documents >= 0).sum() for batch in take(data, target, count, pack_tokens=pack_tokens))
        assert seen == sum(len(text.tokens) for text in data)


def test_no_texts_are_named(target):
    with pytest.raises(UserError, match="no texts"):
        next(batches([], target, TAPS, 2, 0, False))


@pytest.mark.parametrize("layout", [[[0], [1], [2]], [[0, 1, 2]], [[2, 0], [1]]])
def test_kept_and_recomputed_features_agree(target, layout):
    data = {kept: texts(target, features=kept) for kept in (True, False)}
    kept, fresh = (collate([[data[k][i] for i in row] for row in layout], target, TAPS, False) for k in (True, False))
    assert torch.equal(kept.tokens, fresh.tokens)
    last = torch.nn.functional.pad(kept.documents, (0, 1), value=-1).diff(dim=1) != 0  # never read, so not kept
    real = (kept.documents >= 0) & ~last
    assert torch.allclose(kept.features[real], fresh.features[real], atol=1e-12)
    assert not kept.features[~real].any()


@pytest.mark.parametrize("token", [0, EOS])
def test_masks_come_from_lengths(target, token):
    """Padding stands on the right, whatever the ids are."""
    data = [Text(torch.full_like(text.tokens, token), text.spans) for text in texts(target, features=False)[:3]]
    batch = collate([[text] for text in data[:2]], target, TAPS, False)
    assert batch.loss_mask.sum(1).tolist() == [2, 5]
    assert batch.documents.tolist() == [[0] * 5 + [-1] * 3, [1] * 8]
    everything = collate([[text] for text in data[:2]], target, TAPS, True)
    assert everything.loss_mask.sum(1).tolist() == [5, 8]
    packed = collate([data[:2], data[2:]], target, TAPS, False)
    assert packed.documents.tolist() == [[0] * 5 + [1] * 8, [2] * 11 + [-1] * 2]
    assert packed.loss_mask[0].nonzero()[:, 0].tolist() == [3, 4, 8, 9, 10, 11, 12]


@settings(deadline=None)
@given(st.data())
def test_rows_hold_their_texts_in_order(data):
    """Tokens, spans and features of each text lie where its number does."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    made = []
    for i, length in enumerate(lengths):
        tokens = torch.arange(length) + 10 * i
        start = data.draw(st.integers(0, length))
        made.append(Text(tokens, ((start, length),), tokens[:, None, None].expand(-1, 2, Flat.width).double()))
    rows, rest = [], made
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        rows, rest = [*rows, rest[:cut]], rest[cut:]
    batch = collate(rows, Flat, TAPS, False)
    for number, text in enumerate(made):
        here = batch.documents == number
        assert torch.equal(batch.tokens[here], text.tokens)
        assert torch.equal(batch.loss_mask[here], text.mask())
        assert torch.equal(batch.features[here], text.features)
    padding = batch.documents < 0
    assert not batch.loss_mask[padding].any()
    assert not (padding[:, :-1] & ~padding[:, 1:]).any()


class Flat:
    """What collate asks of a target whose features are kept."""

    width, device = 3, torch.device("cpu")
    model = torch.nn.Linear(1, 1).double()
    model.dtype = torch.float64


def test_rows_without_kept_features_are_computed_and_the_others_are_not(target, monkeypatch):
    """A capture that stops at its quota leaves both kinds."""
    kept, fresh = texts(target), texts(target, features=False)
    mixed = [[kept[0]], [fresh[1]], [kept[2]], [fresh[3], kept[4]]]
    read = []
    compute = target.features
    monkeypatch.setattr(target, "features", lambda tokens, *rest: read.append(len(tokens)) or compute(tokens, *rest))
    some = collate(mixed, target, (1, "final"), False)
    assert read == [2]
    whole = collate([[fresh[0]], [fresh[1]], [fresh[2]], [fresh[3], fresh[4]]], target, (1, "final"), False)
    assert torch.equal(some.tokens, whole.tokens)
    last = [0, 2]  # the last feature of a kept text was never read
    for row in range(4):
        size = int((whole.documents[row] >= 0).sum()) - (row in last)
        assert torch.allclose(some.features[row, :size], whole.features[row, :size], atol=1e-9)
