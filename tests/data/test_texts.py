import pytest
import torch

from data.texts import Stored, Text, metadata_of, read_texts, write_texts
from specdec import UserError


def made():
    features = torch.arange(2 * 3 * 4).reshape(2, 3, 4).half()
    return [
        Text(torch.tensor([5, 6, 7]), ((1, 3),), features, "law"),
        Text(torch.tensor([8, 9]), (), None, "code"),
        Text(torch.tensor([1, 2, 3, 4]), ((1, 2), (3, 4)), features + 1, "law"),
    ]


def test_texts_come_back_as_they_were_and_features_stay_on_disk(tmp_path):
    write_texts(tmp_path / "shard-00000.safetensors", made(), {"answers": "3"})
    back = read_texts(tmp_path)
    for text, again in zip(made(), back, strict=True):
        assert torch.equal(text.tokens, again.tokens)
        assert (text.spans, text.domain) == (again.spans, again.domain)
        assert again.features is None or isinstance(again.features, Stored)
        assert (text.stored() is None) == (again.stored() is None)
        assert text.stored() is None or torch.equal(text.stored(), again.stored())
    assert metadata_of(tmp_path / "shard-00000.safetensors")["answers"] == "3"


def test_masks_and_counts_follow_the_spans():
    first, second, third = made()
    assert first.mask().tolist() == [False, True, True]
    assert second.mask().tolist() == [False, False]
    assert third.mask().tolist() == [False, True, False, True]
    assert [text.supervised for text in made()] == [2, 0, 2]


def test_an_empty_shard_and_one_that_is_made_again(tmp_path):
    write_texts(tmp_path / "shard-00000.safetensors", [], {})
    assert read_texts(tmp_path) == []
    path = tmp_path / "shard-00001.safetensors"
    for add in (0, 5):
        write_texts(path, [Text(torch.tensor([1, 2]), ((1, 2),), torch.full((1, 1, 2), float(add)))], {})
        assert read_texts(tmp_path)[0].stored().max() == add


def test_a_damaged_shard_is_named(tmp_path):
    path = tmp_path / "shard-00000.safetensors"
    path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(UserError, match=r"shard-00000\.safetensors is damaged"):
        metadata_of(path)
