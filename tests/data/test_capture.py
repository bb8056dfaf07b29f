import dataclasses
import itertools

import pytest
import torch
from safetensors.torch import load_file

import data.capture as module
from data.artifact import open_stage
from data.batches import batches, collate
from data.capture import CaptureConfig, attach, capture, plan, predict, rows_of
from data.texts import Stored, Text, read_texts, write_texts
from specdec import UserError
from specdec.align import align

TAPS = (1, 3, "final")
EACH = 3 * 48 * 4  # bytes of a float32 row
EXACT = {"rtol": 1e-6, "atol": 1e-6}


def texts(count=40):
    """Texts of 6 to 45 tokens; every third of two turns, every fifth with tokens after its last span."""
    out = []
    for i in range(count):
        length = 6 + 17 * i % 40
        tokens = torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(i))
        end = length - 2 if i % 5 == 4 else length
        out.append(Text(tokens, ((1, 2), (4, end)) if i % 3 == 2 else ((2, end),), None, "chat"))
    return out


def stored(folder, target, data, progress=lambda *_: None, say=lambda _: None, **changes):
    config = CaptureConfig(**({"enabled": True, "dtype": "float32", "batch_size": 3, "shard_size": 12} | changes))
    stage = open_stage(folder, "capture", dataclasses.asdict(config), {})
    capture(config, data, target, TAPS, stage, say, progress)
    return stage


def alone(target, text):
    return target.features(text.tokens[None], TAPS)[0][: rows_of(text)]


def size_of(folder):
    return sum(path.stat().st_size for path in folder.glob("shard-*"))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stored_is_what_each_text_gives_alone(tmp_path, target, batch_size, dtype):
    """40 texts, 12 per file: as many come out as go in, in their order, whatever was read together."""
    data = texts()
    seen = []
    stage = stored(
        tmp_path / "capture", target, data, lambda *now: seen.append(now), batch_size=batch_size, dtype=dtype, verify=1
    )
    back = attach(data, stage.folder)
    assert [len(load_file(path)["lengths"]) for path in sorted(stage.folder.glob("shard-*"))] == [12, 12, 12, 4]
    assert [now[:2] for now in seen] == [(12, 40), (24, 40), (36, 40), (40, 40)]
    assert seen[-1][2] == stage.counts["bytes"] == size_of(stage.folder)
    tolerance = EXACT if dtype == "float32" else {"rtol": torch.finfo(getattr(torch, dtype)).eps, "atol": 1e-6}
    for text, kept in zip(data, back, strict=True):
        assert kept.tokens is text.tokens
        assert (kept.spans, kept.domain) == (text.spans, text.domain)
        features = kept.stored()
        assert features.shape == (rows_of(text), 3, 48)
        assert features.dtype == getattr(torch, dtype)
        assert torch.allclose(features.double(), alone(target, text), **tolerance)


def test_a_second_call_stores_the_same(tmp_path, target):
    data = texts(12)
    one, two = (stored(tmp_path / name, target, data).folder for name in ("one", "two"))
    assert (one / "shard-00000.safetensors").read_bytes() == (two / "shard-00000.safetensors").read_bytes()


def test_rows_reach_up_to_the_last_span_and_no_supervised_slot_asks_for_more(tmp_path, target):
    tokens = torch.arange(3, 23)
    text = Text(tokens, ((2, 5), (11, 16)))
    back = attach([text], stored(tmp_path / "capture", target, [text]).folder)[0]
    assert len(back.stored()) == rows_of(text) == 15
    assert torch.allclose(back.stored().double(), target.features(tokens[None], TAPS)[0, :15], **EXACT)
    at = torch.arange(20)[None]
    for horizon in range(1, 8):
        slots = align(tokens[None], text.mask()[None], torch.zeros_like(at), at, horizon)
        assert slots.teacher[slots.scored].max() == 14


def test_texts_that_teach_nothing_are_not_stored(tmp_path, target):
    tokens = torch.arange(3, 13)
    data = [Text(tokens, ()), Text(tokens, ((3, 10),)), Text(tokens, ((0, 1),)), Text(tokens, ())]
    back = attach(data, stored(tmp_path / "capture", target, data, shard_size=3).folder)
    assert [isinstance(text.features, Stored) for text in back] == [False, True, False, False]
    assert torch.allclose(back[1].stored().double(), alone(target, data[1]), **EXACT)


@pytest.mark.parametrize("pack_tokens", [None, 64])
def test_batches_are_those_of_computing_online(tmp_path, target, pack_tokens):
    write_texts(tmp_path / "shard-00000.safetensors", texts(), {})
    online = read_texts(tmp_path)
    kept = attach(online, stored(tmp_path / "capture", target, online).folder)
    steps = zip(
        *(batches(data, target, TAPS, 4, 0, False, pack_tokens=pack_tokens) for data in (online, kept)), strict=True
    )
    for a, b in itertools.islice(steps, 12):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.loss_mask, b.loss_mask)
        assert torch.equal(a.documents, b.documents)
        filled = b.features.flatten(2).any(-1)
        scoring = torch.nn.functional.pad(b.loss_mask, (0, 1))[:, 1:]  # rows that score a label
        assert bool(filled[scoring].all())
        assert torch.allclose(a.features[filled], b.features[filled], **EXACT)
    one = collate([kept[:2], [kept[7]]], target, TAPS, False)
    assert (one.features.flatten(2).any(-1)).sum() == sum(rows_of(kept[i]) for i in (0, 1, 7))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_predicted_bytes_are_those_on_disk(tmp_path, target, dtype):
    data = texts()
    lines = []
    stage = stored(tmp_path / "capture", target, data, say=lines.append, dtype=dtype)
    predicted = predict(data, 3, 48, dtype)
    tensors = [tensor for path in stage.folder.glob("shard-*") for tensor in load_file(path).values()]
    assert sum(tensor.nbytes for tensor in tensors) == predicted
    assert abs(size_of(stage.folder) / predicted - 1) < 0.05
    each = EACH if dtype == "float32" else EACH // 2
    counts = {"texts": 40, "stored": 40, "bytes": size_of(stage.folder), "bytes_a_token": each}
    assert stage.counts == {**counts, "taps": ["1", "3", "final"], "dtype": dtype}
    assert len(lines) == 1
    assert f"({each} bytes a token); all 40 texts fit capture.quota_gb=20;" in lines[0]


def test_the_line_comes_first(tmp_path, target):
    happened = []
    stored(tmp_path / "capture", target, texts(), lambda *_: happened.append("done"), lambda _: happened.append("line"))
    assert happened == ["line"] + ["done"] * 4


def test_the_quota_cuts_and_the_rest_is_computed_online(tmp_path, target):
    data = texts()
    quota = predict(data[:17], 3, 48, "float32") / 1e9
    lines, seen = [], []
    folder = tmp_path / "capture"
    stage = stored(folder, target, data, lambda *now: seen.append(now[:2]), lines.append, quota_gb=quota)
    back = attach(data, folder)
    assert [text.features is None for text in back] == [False] * 17 + [True] * 23
    assert (stage.counts["texts"], stage.counts["stored"]) == (40, 17)
    assert seen == [(12, 17), (17, 17)]
    assert "17 of 40 texts (" in lines[0]
    for text, kept in zip(data[:17], back, strict=False):
        assert torch.allclose(kept.stored().double(), alone(target, text), **EXACT)
    mixed = collate([[back[16]], [back[17]]], target, TAPS, False)
    assert torch.equal(mixed.features[0, : len(kept.stored())].float(), kept.stored())
    assert torch.allclose(mixed.features[1, : rows_of(data[17])], alone(target, data[17]), **EXACT)


def test_one_byte_less_is_one_text_less():
    data, config = texts(), CaptureConfig(dtype="float32", quota_gb=1e-4)
    exact = predict(data[:17], 3, 48, "float32")
    for size, count in ((exact, 17), (exact - 1, 16)):
        made = plan(dataclasses.replace(config, quota_gb=size / 1e9), data, 3, 48, 10**9)
        assert (made.fitting, made.texts) == (count, 40)
        assert made.bytes == predict(data[:count], 3, 48, "float32")
        assert made.bytes_in_all == predict(data, 3, 48, "float32")
        assert made.tokens == sum(map(rows_of, data))


def test_a_quota_smaller_than_the_first_text_stores_nothing(tmp_path, target):
    stage = stored(tmp_path / "capture", target, texts(), quota_gb=1e-9)
    assert stage.counts["stored"] == 0
    assert all(text.features is None for text in attach(texts(), stage.folder))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quota_gb", 0.0),
        ("quota_gb", float("nan")),
        ("dtype", "bfloat"),
        ("batch_size", 0),
        ("shard_size", 0),
        ("verify", -0.1),
        ("verify", 1.1),
    ],
)
def test_wrong_settings_are_named(key, value):
    with pytest.raises(UserError, match=f"capture.{key}"):
        CaptureConfig(**{key: value})


def test_a_full_disk_is_named_before_anything_is_computed(tmp_path, target, monkeypatch):
    data = texts()
    needed = predict(data, 3, 48, "float32")
    with pytest.raises(UserError, match=r"needs 55.61 MB and 55.05 MB are free: set capture.quota_gb .*enabled=false"):
        plan(CaptureConfig(dtype="float32"), data * 100, 3, 48, needed * 99)
    assert plan(CaptureConfig(dtype="float32"), data, 3, 48, needed).fitting == 40
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Disk", (), {"free": needed - 1}))
    monkeypatch.setattr(target, "features", None)
    with pytest.raises(UserError, match=r"capture needs"):
        stored(tmp_path / "capture", target, data)


def test_what_is_stored_already_needs_no_room(tmp_path, target, monkeypatch):
    data, folder = texts(), tmp_path / "capture"
    interrupt(folder, target, data, 24)
    left = predict(data, 3, 48, "float32") - size_of(folder)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Disk", (), {"free": left}))
    assert stored(folder, target, data).counts["stored"] == 40


# -- verification ----------------------------------------------------------------------------------------------


def flip(which):
    def save(tensors, path):
        features = tensors["features"].clone()
        features[which] *= -1
        return REAL_SAVE({**tensors, "features": features}, path)

    return save


REAL_SAVE = module.save_file


@pytest.mark.parametrize(
    ("which", "verify", "tap"),
    [((slice(None),), 0, "1"), ((slice(None), 1), 0, "3"), ((0, 2, 5), 1, "final")],
    ids=["all", "one tap", "one value"],
)
def test_a_corrupted_shard_is_found_and_removed(tmp_path, target, monkeypatch, which, verify, tap):
    monkeypatch.setattr(module, "save_file", flip(which))
    data = texts()
    with pytest.raises(UserError, match=rf"shard-00000.safetensors, text \d+: tap {tap} was not .*difference [\d.]+"):
        stored(tmp_path / "capture", target, data, verify=verify)
    assert {path.name for path in (tmp_path / "capture").iterdir()} == {"plan.json"}
    monkeypatch.setattr(module, "save_file", REAL_SAVE)
    assert stored(tmp_path / "capture", target, data).counts["stored"] == 40


def swapped(features):
    return features.roll(1, 0)


def shifted(features):
    return features.roll(1, 1)


def wrong_layer(features):
    return features[:, :, [0, 0, 2]]


def leaking(features):
    return features + 0.01 * features.sum(0, keepdim=True)


@pytest.mark.parametrize("wrong", [swapped, shifted, wrong_layer, leaking])
def test_a_target_whose_rows_depend_on_the_batch_is_found(tmp_path, target, monkeypatch, wrong):
    """The sample is computed alone; what goes wrong in batches only is seen."""
    right = target.features
    monkeypatch.setattr(
        target, "features", lambda tokens, taps: (wrong if len(tokens) > 1 else same)(right(tokens, taps))
    )
    with pytest.raises(UserError, match=r"tap \w+ differs from what the target computes for it alone"):
        stored(tmp_path / "capture", target, texts(), dtype="bfloat16")
    assert not list((tmp_path / "capture").glob("*shard-*"))


def same(features):
    return features


def test_single_positions_may_differ_where_a_router_is_undecided(tmp_path, target, monkeypatch):
    right = target.features

    def routed(tokens, taps):
        found = right(tokens, taps).clone()
        if len(tokens) > 1:
            found[:, 3] *= 2
        return found

    monkeypatch.setattr(target, "features", routed)
    data = [Text(torch.arange(3, 43), ((2, 40),))] * 4
    assert stored(tmp_path / "capture", target, data).counts["stored"] == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_roundings_of_the_target_are_no_error(tmp_path, target, dtype):
    target.model.to(dtype)
    for storage in ("bfloat16", "float32"):
        stage = stored(tmp_path / storage, target, texts(), dtype=storage, verify=1)
        assert stage.counts["stored"] == 40


def test_the_sample_has_a_text_of_every_shard(tmp_path, target, monkeypatch):
    right, singles = target.features, []

    def count(tokens, taps):
        if len(tokens) == 1:
            singles.append(tokens)
        return right(tokens, taps)

    monkeypatch.setattr(target, "features", count)
    stored(tmp_path / "few", target, texts(36), verify=0)
    assert len(singles) == 3
    singles.clear()
    stored(tmp_path / "half", target, texts(36), verify=0.5)
    assert len(singles) == 18


def test_a_value_too_large_for_the_dtype_is_named(tmp_path, target, monkeypatch):
    right = target.features
    monkeypatch.setattr(target, "features", lambda tokens, taps: right(tokens, taps) * 1e6)
    with pytest.raises(UserError, match=r"text \d+: .* capture.dtype=float16 \(at most 6.55e\+04\); set"):
        stored(tmp_path / "half", target, texts(), dtype="float16")
    stored(tmp_path / "bf16", target, texts(), dtype="bfloat16")
    monkeypatch.setattr(target, "features", lambda tokens, taps: right(tokens, taps) * float("nan"))
    with pytest.raises(UserError, match=r"text \d+: the target computes features that are not finite"):
        stored(tmp_path / "nan", target, texts())


# -- interrupts and other texts --------------------------------------------------------------------------------


def interrupt(folder, target, data, after):
    def stop(done, *_):
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stored(folder, target, data, stop)


@pytest.mark.parametrize("within", [False, True])
def test_interrupted_and_resumed_is_the_same_byte_for_byte(tmp_path, target, monkeypatch, within):
    data = texts()
    whole = stored(tmp_path / "whole", target, data).folder
    cut, right, calls = tmp_path / "cut", target.features, itertools.count()
    if within:  # while the third shard is computed: four batches of three and one text alone for each before it

        def features(tokens, taps):
            if next(calls) == 12:
                raise KeyboardInterrupt
            return right(tokens, taps)

        monkeypatch.setattr(target, "features", features)
        with pytest.raises(KeyboardInterrupt):
            stored(cut, target, data)
    else:
        interrupt(cut, target, data, 24)
    assert sorted(path.name for path in cut.iterdir()) == [
        "plan.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    with pytest.raises(UserError, match="not finished"):
        attach(data, cut)
    before = (cut / "shard-00001.safetensors").stat().st_mtime_ns
    stored(cut, target, data)
    assert (cut / "shard-00001.safetensors").stat().st_mtime_ns == before
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in cut.iterdir())
    for name in names:
        assert (whole / name).read_bytes() == (cut / name).read_bytes()


def test_an_interrupt_while_writing_leaves_no_shard(tmp_path, target, monkeypatch):
    def stop(tensors, path):
        REAL_SAVE(tensors, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        stored(tmp_path / "capture", target, texts())
    assert {path.name for path in (tmp_path / "capture").iterdir()} == {"plan.json"}


def test_features_are_never_attached_to_other_texts(tmp_path, target):
    data = texts()
    folder = stored(tmp_path / "capture", target, data).folder
    other = data[20].tokens.clone()
    other[0] += 1  # as long, with the same spans
    changed = [*data[:20], dataclasses.replace(data[20], tokens=other), *data[21:]]
    longer = [*data[:20], dataclasses.replace(data[20], spans=((1, 3),)), *data[21:]]
    for wrong in (changed, longer):
        with pytest.raises(UserError, match=r"shard-00001.* other texts: text 20 differs; redo=\[capture\]"):
            attach(wrong, folder)
    with pytest.raises(UserError, match="other texts: text 0 differs"):
        attach([data[1], data[0], *data[2:]], folder)
    with pytest.raises(UserError, match="from 40 texts, not from these 39"):
        attach(data[:-1], folder)
    (folder / "shard-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"shard-00002.* is missing"):
        attach(data, folder)
