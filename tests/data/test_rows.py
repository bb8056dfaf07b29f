import pytest

from data.rows import Row, Rows

ROWS = [
    Row("a", "d", [1, 2, 3]),
    Row("b", "d", [4], messages=[{"role": "user", "content": "é\u2028\n"}, {"role": "assistant"}], tools=[{"x": 1}]),
    Row("c", "e", [5], texts=[[[5, 6], [[1, 2]]]], writer="m"),
]


def test_rows_are_read_by_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(row.line() for row in ROWS), encoding="utf-8")
    rows = Rows(path)
    assert len(rows) == 3
    assert [rows[i] for i in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]
    assert rows[-1] == ROWS[2]
    assert rows[1:] == list(rows)[1:] == ROWS[1:]
    with pytest.raises(IndexError):
        rows[3]
