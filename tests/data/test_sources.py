import json

import pytest

from data.sources import Prompt, bundled, read_jsonl, split_heldout
from specdec import UserError

GOOD = '{"prompt": "What is 2 + 2?"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "broken', "line 3: not valid JSON"),
        ("[1, 2]", "line 3: expected an object"),
        ('{"text": "x"}', r"line 3: needs 'messages'.*\['text'\]"),
        ('{"prompt": "  "}', "line 3: needs 'messages'"),
        ('{"messages": []}', "line 3: 'messages' must be a list"),
        ('{"messages": [{"role": "user"}]}', "line 3: turn 1 needs"),
        ('{"messages": [{"role": "boss", "content": "x"}]}', "line 3: turn 1 has role 'boss'"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "line 3: there is no user turn"),
        ('{"messages": [{"role": "user", "content": ""}]}', "line 3: there is no user turn"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(UserError, match=rf"mine\.jsonl, {message}"):
        read_jsonl(path, "custom")


def test_missing_empty_and_misencoded_files(tmp_path):
    with pytest.raises(UserError, match="no file"):
        read_jsonl(tmp_path / "none.jsonl", "custom")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match=r"empty\.jsonl: the file is empty"):
        read_jsonl(tmp_path / "empty.jsonl", "custom")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(UserError, match="not UTF-8"):
        read_jsonl(tmp_path / "latin.jsonl", "custom")


def test_rows_keep_separators_inside_strings_and_drop_recorded_answers(tmp_path):
    path = tmp_path / "m.jsonl"
    turns = [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": "no"}]
    path.write_text(json.dumps({"messages": turns, "domain": "law"}, ensure_ascii=False) + "\n" + GOOD)
    rows = read_jsonl(path, "custom")
    assert rows[0] == Prompt("m-1", "law", turns[:1])
    assert rows[1].domain == "custom"


def test_heldout_split_is_stable_and_keeps_duplicates_together():
    prompts = [Prompt(str(i), "d", [{"role": "user", "content": f"q{i % 7}"}]) for i in range(20)]
    train, heldout = split_heldout(prompts, 3)
    assert len({p.messages[0]["content"] for p in heldout}) == 3
    assert not {p.messages[0]["content"] for p in heldout} & {p.messages[0]["content"] for p in train}
    assert [p.id for p in split_heldout(prompts[::-1], 3)[1]] == [p.id for p in heldout][::-1]
    with pytest.raises(UserError, match="leave nothing to train on"):
        split_heldout(prompts, 7)


def test_unknown_domain_is_named():
    with pytest.raises(UserError, match=r"'math' is not a bundled domain.*Did you mean 'maths'"):
        bundled("math", "train")
