"""Broken files: every whole record is used, every broken one has a reason and a place."""

import gzip
import json
import random

import pytest

import data.records
from data.records import BROKEN, BROKEN_ROW, CUT, ENCODING, NOT_OBJECT, NUL, read_csv, read_json
from specdec import UserError

ROWS = [{"id": i, "conversations": [{"from": "human", "value": "é" * i + "x"}]} for i in range(8)]


def written(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_json(path))


def good(records):
    return [record.row["id"] for record in records if record.row is not None]


def bad(records):
    return [(record.where, record.reason) for record in records if record.row is None]


def lines(rows=ROWS):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.fixture(autouse=True, params=[1 << 20, 64])
def chunk(request, monkeypatch):
    """Also with pieces far smaller than a record."""
    monkeypatch.setattr(data.records, "CHUNK", request.param)


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_as_lines_are(tmp_path, indent):
    array = json.dumps(ROWS, ensure_ascii=False, indent=indent)
    assert [r.row for r in written(tmp_path / "a.json", array)] == ROWS
    assert [r.row for r in written(tmp_path / "a.jsonl", "\n" + lines() + "\n\n")] == ROWS
    assert [r.row for r in written(tmp_path / "b.jsonl", "\ufeff" + lines())] == ROWS


def test_lines_with_faults(tmp_path):
    text = (
        b'{"id": 1}\n{"id": 2, \n[1]\n{"id": "\xff"}\n{"i\0d": 3}\n"text"\n\n{"id": 4}\n' + b"[" * 100_000 + b"\n{"
        b'"id": 5}'
    )
    records = written(tmp_path / "a.jsonl", text)
    assert good(records) == [1, 4, 5]
    assert bad(records) == [
        ("line 2", BROKEN),
        ("line 3", NOT_OBJECT),
        ("line 4", ENCODING),
        ("line 5", NUL),
        ("line 6", NOT_OBJECT),
        ("line 9", BROKEN),
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_file_cut_off_in_the_middle(tmp_path, name):
    """Wherever it is cut: the records that are whole, and one that says where the file ends."""
    text = (lines() if name == "a.jsonl" else json.dumps(ROWS, ensure_ascii=False)).encode()
    ends = [text.index(b'"}]}', text.index(b'"id": %d' % i)) + 4 for i in range(len(ROWS))]
    for cut in range(ends[3] - 20, ends[4] + 3):
        records = written(tmp_path / name, text[:cut])
        whole = sum(end <= cut for end in ends)
        assert good(records) == list(range(whole))
        between = name == "a.jsonl" and text[:cut].rstrip(b"\n")[-4:] == b'"}]}'
        if between:
            assert bad(records) == []
            continue
        assert [reason for _, reason in bad(records)] == [CUT]
        assert f"ends at byte {cut}" in records[-1].detail


def test_a_broken_record_in_an_array_costs_only_itself(tmp_path):
    parts = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    parts[2] = parts[2][:-3]  # its brackets never close
    parts[5] = parts[5].replace('"value"', "value")
    records = written(tmp_path / "a.json", "[\n" + ",\n".join(parts) + "\n]")
    assert good(records) == [0, 1, 3, 4, 6, 7]
    assert bad(records) == [("line 4", BROKEN), ("line 7", BROKEN)]


def test_a_wrong_byte_in_an_array_is_found(tmp_path):
    text = json.dumps(ROWS, ensure_ascii=False).encode().replace("éx".encode(), b"\xe9x", 1)
    records = written(tmp_path / "a.json", text)
    assert good(records) == [0, *range(2, 8)]
    assert [reason for _, reason in bad(records)] == [ENCODING]


def test_utf16_is_a_sentence_and_gzip_is_read(tmp_path):
    (record,) = written(tmp_path / "a.jsonl", lines().encode("utf-16"))
    assert record.reason == ENCODING
    assert "save it as UTF-8" in record.detail
    assert good(written(tmp_path / "a.jsonl.gz", gzip.compress(lines().encode()))) == list(range(8))


def test_bytes_read_grow_to_the_size_of_the_file(tmp_path):
    for name, text in (("a.jsonl", lines()), ("a.json", json.dumps(ROWS))):
        read = [record.read for record in written(tmp_path / name, text)]
        assert read == sorted(read)
        assert len(text.encode()) - read[-1] <= 1  # the closing bracket


def test_an_empty_file_has_no_records(tmp_path):
    assert written(tmp_path / "a.jsonl", "") == written(tmp_path / "b.json", " \n") == []
    assert written(tmp_path / "c.json", "[]") == []


def test_nothing_behind_a_broken_record_is_lost(tmp_path):
    """The first one broken, an inner object that begins as records do, several arrays in one file."""
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    rows = [{"id": i, "conversations": turns, "calls": [{"id": 1}, {"id": 2}]} for i in range(6)]
    for broken in (0, 3):
        parts = [json.dumps(row) for row in rows]
        parts[broken] = parts[broken].replace('"human"', "human", 1)
        records = written(tmp_path / "a.json", "[" + ", ".join(parts) + "]")
        found = [record.row for record in records if record.row is not None and "conversations" in record.row]
        assert found == rows[:broken] + rows[broken + 1 :]
        assert bad(records)[0] == ("line 1", BROKEN)
    for text in (f"{json.dumps(rows[:1])}\n{json.dumps(rows[1:])}", "".join(f"[{json.dumps(row)}]\n" for row in rows)):
        assert [record.row for record in written(tmp_path / "b.json", text)] == rows


def test_a_number_of_thousands_of_digits_and_a_cut_gzip(tmp_path):
    big = '{"id": ' + "1" * 5000 + "}"
    assert bad(written(tmp_path / "a.jsonl", big + "\n" + lines()))[0] == ("line 1", BROKEN)
    assert bad(written(tmp_path / "a.json", f"[{big}, {json.dumps(ROWS)[1:]}"))[0] == ("line 1", BROKEN)
    packed = gzip.compress(("".join(random.Random(0).choices("abc", k=50)) + lines() * 500).encode())
    records = written(tmp_path / "a.jsonl.gz", packed[:-40])
    assert records[-1].reason == CUT


def test_tables_of_text(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\n"a, b","line\n2"\nonly one\n\n007,NA\n"broken"x,y\n"never closed,z\nlast,one\n')
    records = list(read_csv(path))
    assert [record.row for record in records if record.row] == [
        {"prompt": "a, b", "completion": "line\n2"},
        {"prompt": "007", "completion": "NA"},
        {"prompt": "last", "completion": "one"},
    ]
    assert bad(records) == [("line 4", BROKEN_ROW), ("line 7", BROKEN_ROW), ("line 8", BROKEN_ROW)]
    path.write_text("a,b\n1,2\n".encode("utf-16").decode("latin-1"), encoding="latin-1")
    assert [record.reason for record in read_csv(path)] == [ENCODING]


def test_whatever_follows_an_array_is_read(tmp_path):
    other = [{"value": i, "id": i} for i in range(40)]
    rows = [{"id": i, "value": i} for i in range(10)]
    text = json.dumps(rows) + "\n" + "".join(json.dumps(row) + "\n" for row in other)
    assert [record.row for record in written(tmp_path / "a.json", text)] == rows + other
    assert [record.row for record in written(tmp_path / "b.json", "[]\n" + lines())] == ROWS
    broken = json.dumps([*rows, 5, *other]).replace("5, {", '{"id": oops}, {', 1)
    records = written(tmp_path / "c.json", broken)
    assert [record.row for record in records if record.row is not None] == rows + other
    assert [reason for _, reason in bad(records)] == [BROKEN]


def test_what_cannot_be_decompressed_is_a_sentence(tmp_path):
    for name in ("a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz"):
        with pytest.raises(UserError, match="cannot be"):
            written(tmp_path / name, "not packed at all\n")
    assert good(written(tmp_path / "small.jsonl.gz", gzip.compress(lines().encode())[:-9]))[:3] == [0, 1, 2]
