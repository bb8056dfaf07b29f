"""Files, folders and saved data sets of every kind give the same rows."""

import json

import pytest
from datasets import Dataset, DatasetDict

from data.sources import Source, SourceConfig, bundled, bundled_domains
from specdec import UserError

ROWS = [{"id": f"{i:03}", "prompt": f'say "{i}", é', "completion": "NA" if i == 1 else f"line\n{i}"} for i in range(6)]


def rows(path, **settings):
    return [record.row for record in Source(SourceConfig(str(path), **settings)).records()]


def save(folder, kind):
    path = folder / f"a.{kind}"
    table = Dataset.from_list(ROWS)
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "csv":
        table.to_csv(path)
    elif kind == "tsv":
        table.to_csv(path, sep="\t")
    elif kind == "parquet":
        table.to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    assert rows(save(tmp_path, kind)) == ROWS
    assert rows(tmp_path / f"a.{kind}", rows=2) == ROWS[:2]


def test_turns_in_a_table(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    Dataset.from_list([{"messages": talk}]).to_parquet(tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == [{"messages": talk}]


def test_a_folder_is_all_its_files_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "notes.txt").write_text("not data")
    save(tmp_path, "jsonl")
    save(tmp_path / "deep", "parquet")
    source = Source(SourceConfig(str(tmp_path)))
    records = list(source.records())
    assert [record.row for record in records] == ROWS + ROWS
    assert records[0].where == "a.jsonl, line 1"
    assert source.size is None
    assert Source(SourceConfig(str(tmp_path / "a.jsonl"))).size == (tmp_path / "a.jsonl").stat().st_size


def test_a_saved_data_set_and_its_splits(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict({"train": Dataset.from_list(ROWS[:4]), "test": Dataset.from_list(ROWS[4:])}).save_to_disk(
        tmp_path / "two"
    )
    assert rows(tmp_path / "one") == ROWS
    assert rows(tmp_path / "two") == ROWS[:4]
    assert rows(tmp_path / "two", split="test") == ROWS[4:]
    with pytest.raises(UserError, match="no split 'dev'; it has train, test"):
        rows(tmp_path / "two", split="dev")


def test_a_misencoded_table_costs_only_its_row(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"prompt\ngood\ncaf\xe9\n")
    good, bad = Source(SourceConfig(str(tmp_path / "a.csv"))).records()
    assert good.row == {"prompt": "good"}
    assert (bad.row, bad.where, bad.reason) == (None, "line 3", "not UTF-8")


def test_the_hash_is_of_the_content(tmp_path):
    path = save(tmp_path, "jsonl")
    before = Source(SourceConfig(str(path))).content()
    assert Source(SourceConfig(str(path), domain="other")).content() == before
    path.write_text(path.read_text() + json.dumps(ROWS[0]) + "\n")
    assert Source(SourceConfig(str(path))).content() != before


def test_what_is_not_there_or_does_not_apply_is_a_sentence(tmp_path):
    for path, message in (
        (tmp_path / "none.jsonl", "no file"),
        (tmp_path, "holds no json"),
        ("faq.jsonl", "no file faq.jsonl"),
        ("../faq", "no file"),
    ):
        with pytest.raises(UserError, match=message):
            Source(SourceConfig(str(path)))
    (tmp_path / "a.xlsx").write_text("")
    with pytest.raises(UserError, match="no known ending"):
        Source(SourceConfig(str(tmp_path / "a.xlsx")))
    with pytest.raises(UserError, match="split, subset and streaming do not apply"):
        Source(SourceConfig(str(save(tmp_path, "jsonl")), split="train[:1]"))
    (tmp_path / "bad.parquet").write_text("not parquet")
    with pytest.raises(UserError, match="`datasets` cannot read"):
        rows(tmp_path / "bad.parquet")
    assert Source(SourceConfig("OWNER/NAME")).files == []
    for settings, message in (
        ({"format": "sharegtp"}, "'sharegtp' is not one of.*Did you mean 'sharegpt'"),
        ({"weight": 0.0}, "weight"),
        ({"rows": 0}, "rows"),
        ({"mapping": {"x": "y"}}, "'x' is not a field"),
    ):
        with pytest.raises(UserError, match=message):
            SourceConfig("a.jsonl", **settings)


def test_unknown_domain_is_named():
    with pytest.raises(UserError, match=r"'math' is not a bundled domain.*Did you mean 'maths'"):
        bundled("math", "train")
    assert "maths" in bundled_domains()
