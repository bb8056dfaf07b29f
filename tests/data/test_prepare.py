"""From files to prepared rows: nothing is lost, everything is counted, nothing held out is trained on."""

import datetime
import json

import pytest
from datasets import Dataset
from sharegpt import FAULTS, write_sharegpt
from styles import template_tokenizer
from tiny import tiny_tokenizer

from data.artifact import open_stage
from data.chat import Template
from data.prepare import DataConfig, look, open_sources, prepare, sample
from data.rows import read_rows
from data.sources import Source, SourceConfig, bundled_domains
from specdec import UserError


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def asks(count, word="say", **extra):
    return [{"prompt": f"{word} {i}", **extra} for i in range(count)]


def run(folder, config, recorded=False, style="smollm2", window=8192):
    said = []
    stage = open_stage(folder / "out", "prepare", {}, {})
    prepare(
        config,
        Template(template_tokenizer(style), config.chat_template, config.system),
        window,
        recorded,
        stage,
        said.append,
        lambda *_: None,
    )
    counts = stage.counts
    used = counts["train"] + counts["heldout_of_these_rows"] + counts["left_out"] + counts["rejected"]
    assert used == counts["rows"]  # success + rejected = input
    assert sum(counts["reasons"].values()) == counts["rejected"]
    assert len(rejects(folder)) >= counts["rejected"]
    return counts, read_rows(stage.folder, "train"), read_rows(stage.folder, "heldout"), said


def rejects(folder):
    return [json.loads(line) for line in (folder / "out/rejects.jsonl").read_text().splitlines()]


def test_every_fault_is_counted_exactly(tmp_path):
    faults = write_sharegpt(tmp_path / "a.jsonl", 1499, bad=0.08, cut=True)
    assert set(faults) == {*FAULTS, "cut off"}
    counts, train, heldout, said = run(tmp_path, DataConfig(["x"], str(tmp_path / "a.jsonl"), max_prompt_tokens=2000))
    assert counts["reasons"] == dict(faults)
    assert counts["rows"] == 1500
    assert counts["train"] == len(train)
    own = [row for row in heldout if row.domain == "x"]
    assert len(own) == counts["heldout_of_these_rows"] == 30
    assert not {row.id for row in own} & {row.id for row in train}
    assert any("sharegpt (100 of the first 100 rows)" in line for line in said)
    where = {entry["where"] for entry in rejects(tmp_path)}
    assert len(where) == counts["rejected"]


def test_too_many_bad_rows_stop_with_the_counts(tmp_path):
    rows = [*asks(6), {"prompt": 5}, {"prompt": " "}, {"x": 1}]
    path = lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=r"line 7: content that is not text.*3 of 9 rows were rejected \(33 %, .*20 %"):
        run(tmp_path, DataConfig(["x"], path))
    assert not (tmp_path / "out/manifest.json").exists()
    assert len(rejects(tmp_path)) == 3
    assert run(tmp_path, DataConfig(["x"], path, max_rejected=0.4))[0]["rejected"] == 3


def test_duplicates_are_found_by_what_is_used(tmp_path):
    """The same questions with other recorded answers are the same prompts, but not the same texts."""
    rows = [{"prompt": f"q{i % 5}", "completion": f"a{i}"} for i in range(10)]
    config = DataConfig(["x"], lines(tmp_path / "a.jsonl", rows), max_rejected=1.0)
    assert run(tmp_path, config)[0]["reasons"] == {"duplicate": 5}
    (tmp_path / "r").mkdir()
    assert run(tmp_path / "r", config, recorded=True)[0]["rejected"] == 0


def test_the_first_prompt_is_ready_and_later_turns_are_kept_without_their_answers(tmp_path):
    talk = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    rows = [{"messages": [*talk, {"role": "user", "content": f"{i}"}], "id": f"r{i}"} for i in range(6)]
    _, train, heldout, _ = run(tmp_path, DataConfig(["x"], lines(tmp_path / "a.jsonl", rows), heldout=2))
    template = Template(template_tokenizer("smollm2"))
    for row in train:
        assert row.prompt == template.prompt(talk[:1])
        assert [turn.get("content") for turn in row.messages] == ["a", None, "c", None, row.id.removeprefix("r")]
    assert len(heldout[:2]) == 2
    # One question: the prompt is all there is.
    (tmp_path / "one").mkdir()
    single = lines(
        tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": f"{i}"}, talk[1]]} for i in range(6)]
    )
    assert all(row.messages is None for row in run(tmp_path / "one", DataConfig(["x"], single))[1])


def test_a_tool_result_keeps_the_call_it_belongs_to(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "recorded"},
    ]
    rows = [{"messages": [{"role": "system", "content": f"{i}"}, *turns]} for i in range(4)]
    config = DataConfig(["x"], lines(tmp_path / "a.jsonl", rows), heldout=1)
    _, train, _, _ = run(tmp_path, config, style="qwen3")
    text = template_tokenizer("qwen3").decode(train[0].prompt)
    assert '"name": "f"' in text
    assert "result" in text
    assert "recorded" not in text
    said = run(tmp_path, config)[3]
    assert any("leaves tool_calls out of" in line for line in said)


def test_recorded_texts_have_their_spans(tmp_path):
    rows = [{"prompt": f"q{i}", "completion": f"answer {i}", "model": "other"} for i in range(6)]
    config = DataConfig(["x"], lines(tmp_path / "a.jsonl", rows))
    counts, train, _, _ = run(tmp_path, config, recorded=True)
    tokenizer = template_tokenizer("smollm2")
    for row in train:
        ((tokens, ((start, end),)),) = row.texts
        assert tokenizer.decode(tokens[start:end]).startswith("answer ")
        assert tokens[:start] == row.prompt
        assert row.writer == "other"
    assert counts["writers"] == {"other": 6}
    assert 0.05 < counts["supervision"]["x"]["supervised"] / counts["supervision"]["x"]["tokens"] < 0.5


def test_long_texts_are_cut_at_a_turn_or_rejected(tmp_path):
    turns = [{"role": role, "content": "w" * 40} for role in ["user", "assistant"] * 3]
    rows = [{"messages": [{"role": "system", "content": f"{i}"}, *turns]} for i in range(6)]
    path = lines(tmp_path / "a.jsonl", rows)
    counts, train, _, _ = run(tmp_path, DataConfig(["x"], path, max_tokens=250), recorded=True)
    assert counts["cut_at_a_turn"] == 6
    for row in train:
        ((tokens, spans),) = row.texts
        assert len(spans) == 2
        assert len(tokens) == spans[-1][1] <= 250
    for length, setting in ((250, "reject"), (60, "cut")):
        config = DataConfig(["x"], path, max_tokens=length, too_long=setting, max_rejected=1.0)
        with pytest.raises(UserError, match="nothing to train on"):
            run(tmp_path, config, recorded=True)
        assert {entry["reason"] for entry in rejects(tmp_path)} == {"too long"}


def test_texts_and_ids(tmp_path):
    rows = [{"text": f"{i} once upon a time"} for i in range(4)]
    rows += [{"input_ids": [5, 6, 7, 8 + i], "loss_mask": [0, 0, 1, 1]} for i in range(4)]
    rows += [{"input_ids": [5, 10_000], "loss_mask": [0, 1]}]
    config = DataConfig(["x"], lines(tmp_path / "a.jsonl", rows), text_prompt_tokens=4, heldout=1)
    counts, train, _, _ = run(tmp_path, config, recorded=True)
    assert counts["reasons"] == {"id outside the vocabulary": 1}
    assert {len(row.prompt) for row in train} == {2, 1}
    answered = run(tmp_path, config)[1]
    assert {len(row.prompt) for row in answered} == {2, 4}
    assert all(row.texts is None for row in answered)


def test_nothing_supervised_is_refused_and_little_is_a_warning(tmp_path):
    rows = [{"input_ids": [5, 6, 7, i + 8], "loss_mask": [0, 0, 0, 0]} for i in range(4)]
    config = DataConfig(["x"], lines(tmp_path / "a.jsonl", rows), max_rejected=1.0)
    with pytest.raises(UserError, match="nothing to train on"):
        run(tmp_path, config, recorded=True)
    rows = [{"prompt": "long " * 60 + str(i), "completion": "."} for i in range(6)]
    said = run(tmp_path, DataConfig(["x"], lines(tmp_path / "b.jsonl", rows)), recorded=True)[3]
    assert any("% of the tokens of x are supervised" in line for line in said)


def test_held_out_rows_are_chosen_by_content_and_at_most_a_third(tmp_path):
    first = run(tmp_path, DataConfig(["x"], lines(tmp_path / "a.jsonl", asks(40)), heldout=5))[2]
    turned = run(tmp_path, DataConfig(["x"], lines(tmp_path / "a.jsonl", asks(40)[::-1]), heldout=5))[2]
    prompts = [[row.prompt for row in rows if row.domain == "x"] for rows in (first, turned)]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == 5
    few = run(tmp_path, DataConfig(["x"], lines(tmp_path / "b.jsonl", asks(7)), heldout=30))[0]
    assert few["heldout_of_these_rows"] == 2


def test_held_out_by_file_shares_nothing_with_training(tmp_path):
    train = lines(tmp_path / "a.jsonl", asks(9))
    other = lines(tmp_path / "b.jsonl", [*asks(3), {"prompt": "new"}])
    counts, trained, heldout, _ = run(tmp_path, DataConfig(["x"], train, heldout_path=other))
    assert len(trained) == 9
    assert first_questions([row for row in heldout if row.domain == "x"])[0].startswith("new")
    names = [row.id for row in (*trained, *heldout)]
    assert len(set(names)) == len(names)
    assert counts["heldout_of_these_rows"] == 0


def first_questions(rows, style="smollm2"):
    tokenizer = template_tokenizer(style)
    return [tokenizer.decode(row.prompt).rpartition("user\n")[2].casefold() for row in rows]


@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_measured_is_never_asked_in_training(tmp_path, recorded):
    """Several answers to one question, several conversations with one opening, other case and spaces, and metadata."""
    rows = [{"prompt": f"q {i % 12}", "completion": f"a{i}"} for i in range(48)]
    rows += [{"prompt": f" Q  {i}", "completion": "x"} for i in range(12)]
    for i in range(24):
        turns = [{"role": "user", "content": f"open {i % 4}", "ts": i}, {"role": "assistant", "content": "yes"}]
        more = [{"role": "user", "content": f"then {i}"}, {"role": "assistant", "content": "no"}]
        rows.append({"messages": turns + more})
    config = DataConfig(["x"], lines(tmp_path / "a.jsonl", rows), heldout=5, max_rejected=1.0)
    _, train, heldout, _ = run(tmp_path, config, recorded)
    own = [row for row in heldout if row.domain == "x"]
    assert len(own) == 5
    spaced = [{"".join(q.split()) for q in first_questions(some)} for some in (own, train)]
    assert not spaced[0] & spaced[1]


def test_a_held_out_file_that_is_the_training_file_is_refused(tmp_path):
    rows = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(9)]
    path = lines(tmp_path / "a.jsonl", rows)
    for recorded in (False, True):
        with pytest.raises(UserError, match=r"none of the 9 rows of .* can be measured: 9 are trained on"):
            run(tmp_path, DataConfig(["x"], path, heldout_path=path), recorded)


def test_faults_of_a_held_out_file_are_counted(tmp_path):
    train = lines(tmp_path / "a.jsonl", asks(9))
    other = lines(tmp_path / "b.jsonl", [{"prompt": "new"}, {"prompt": 5}, {"prompt": "say 1"}])
    with pytest.raises(UserError, match="1 of 3 rows were rejected"):
        run(tmp_path, DataConfig(["x"], train, heldout_path=other))
    counts, _, _, said = run(tmp_path, DataConfig(["x"], train, heldout_path=other, max_rejected=0.5))
    assert counts["heldout_files"]["rejected"] == 1
    assert counts["heldout_files"]["trained_on"] == 1
    assert counts["rejected"] == 0
    assert any("1 that are trained on, 1 rejected" in line for line in said)
    assert len((tmp_path / "out/rejects-heldout.jsonl").read_text().splitlines()) == 1


def test_weights_and_limits_together(tmp_path):
    paths = [lines(tmp_path / f"{name}.jsonl", asks(60, name, domain="law")) for name in "ab"]
    sources = [SourceConfig(path, weight=1.0) for path in paths]
    counts = run(tmp_path, DataConfig(sources=sources, heldout=3, limit=20))[0]
    assert counts["domains"] == {"law": 20}
    empty = lines(tmp_path / "c.jsonl", [{"prompt": 1}])
    with pytest.raises(UserError, match=r"c\.jsonl has no row to train on"):
        run(tmp_path, DataConfig(sources=[sources[0], SourceConfig(empty, weight=1.0)], max_rejected=1.0))


def test_rows_nobody_thought_of_cost_only_themselves(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "description": "\ud83d"}}
    rows = [
        *asks(9),
        {"prompt": "x", "id": "\ud83d"},
        {"prompt": "[" * 2000},
        {"messages": [{"role": "user", "content": "y"}], "tools": [tool]},
        {"messages": [{"role": "user", "content": "y"}], "tools": [{"type": "function", "function": "f"}]},
        {"messages": [{"role": "user", "content": "z"}, {"role": "assistant", "tool_calls": 5}]},
    ]
    config = DataConfig(["x"], lines(tmp_path / "a.jsonl", rows), max_rejected=1.0, max_prompt_tokens=3000)
    counts, train, _, _ = run(tmp_path, config, style="qwen3")
    assert counts["rejected"] == 4  # brackets alone are a text
    assert len(train) == 7


def test_dates_in_a_table_are_no_obstacle(tmp_path):
    turns = [{"role": "user", "content": "a", "timestamp": datetime.datetime(2024, 1, 1)}]
    rows = [{"conversation": [{**turns[0], "content": f"a{i}"}]} for i in range(4)]
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    config = DataConfig(["x"], str(tmp_path / "a.parquet"), mapping={"conversations": "conversation"}, heldout=1)
    assert run(tmp_path, config)[0]["train"] == 3


def test_plain_texts_are_cut_at_the_length(tmp_path):
    rows = [{"text": f"{i} " + "word " * 100} for i in range(4)]
    config = DataConfig(["x"], lines(tmp_path / "a.jsonl", rows), max_tokens=50, heldout=1)
    counts, train, _, _ = run(tmp_path, config, recorded=True)
    assert counts["cut_at_a_turn"] == 4
    assert {len(row.texts[0][0]) for row in train} == {50}


def test_transfer_domains_come_along_unless_the_user_has_one_of_that_name(tmp_path):
    _, _, heldout, _ = run(tmp_path, DataConfig(["maths"], lines(tmp_path / "a.jsonl", asks(9)), heldout=2))
    found = {row.domain for row in heldout}
    assert found == set(bundled_domains())
    assert sum(row.domain == "maths" for row in heldout) == 2


def test_mixtures_keep_their_proportions_and_labels(tmp_path):
    law, code = lines(tmp_path / "law.jsonl", asks(60, "law")), lines(tmp_path / "code.jsonl", asks(60, "code"))
    sources = [SourceConfig(law, weight=3.0), SourceConfig(code, "programs", weight=1.0)]
    counts, train, _, _ = run(tmp_path, DataConfig(sources=sources, heldout=3))
    domains = [row.domain for row in train]
    assert domains.count("law") == 3 * domains.count("programs") == 57
    assert counts["domains"] == {"law": 57, "programs": 19}
    assert counts["left_out"] == 114 - 76
    everything = DataConfig(sources=[SourceConfig(law), SourceConfig(code)], heldout=3)
    assert run(tmp_path, everything)[0]["domains"] == {"law": 57, "code": 57}


def test_limits_and_labels_of_rows(tmp_path):
    rows = asks(9, "a", domain="law") + asks(9, "b")
    counts, _, _, _ = run(tmp_path, DataConfig(["x"], lines(tmp_path / "a.jsonl", rows), limit=4, heldout=2))
    assert counts["domains"] == {"law": 4, "x": 4}
    assert counts["left_out"] == 6


def test_ids_are_made_unique(tmp_path):
    rows = [{"prompt": f"q{i}", "id": "same"} for i in range(4)]
    _, train, heldout, _ = run(tmp_path, DataConfig(["x"], lines(tmp_path / "a.jsonl", rows), heldout=1))
    names = [row.id for row in (*train, *heldout) if row.domain == "x"]
    assert len(set(names)) == len(names) == 4


def test_system_prompt_and_template_options(tmp_path):
    config = DataConfig(["x"], lines(tmp_path / "a.jsonl", asks(4)), heldout=1, system="Be kind.")
    text = template_tokenizer("smollm2").decode(run(tmp_path, config)[1][0].prompt)
    assert "Be kind." in text
    config = DataConfig(
        ["x"], lines(tmp_path / "a.jsonl", asks(4)), heldout=1, chat_template={"enable_thinking": False}
    )
    text = template_tokenizer("qwen3").decode(run(tmp_path, config, style="qwen3")[1][0].prompt)
    assert text.endswith("</think>\n\n")


def test_unknown_layouts_and_columns_are_named(tmp_path):
    source = Source(SourceConfig(lines(tmp_path / "a.jsonl", [{"question": "x", "answer": "y"}])))
    with pytest.raises(UserError, match=r"no known layout: its columns are question, answer.*data\.mapping"):
        look(source)
    mapped = SourceConfig(str(tmp_path / "a.jsonl"), mapping={"prompt": "frage"})
    with pytest.raises(UserError, match="has no column 'frage'; its columns: question, answer"):
        look(Source(mapped))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="the file is empty"):
        look(Source(SourceConfig(str(tmp_path / "empty.jsonl"))))
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(UserError, match=r"none of the first 1 rows can be read\. line 1: broken JSON"):
        look(Source(SourceConfig(str(tmp_path / "bad.jsonl"))))


def test_a_dry_run_shows_a_row_and_writes_nothing(tmp_path):
    rows = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(6)] + [{"prompt": 1}]
    config = DataConfig(["x"], lines(tmp_path / "a.jsonl", rows))
    before = sorted(tmp_path.rglob("*"))
    text = "\n".join(sample(config, Template(template_tokenizer("smollm2")), 512, True, False))
    assert "6 of its first 7 rows can be used; rejected: content that is not text 1" in text
    assert "«a0<|im_end|>»" in text
    assert "are supervised" in text
    coloured = "\n".join(sample(config, Template(template_tokenizer("smollm2")), 512, True, True))
    assert "\033[32ma0<|im_end|>\033[0m" in coloured
    asked = "\n".join(sample(config, Template(tiny_tokenizer()), 512, False, False))
    assert "[the target's answer]" in asked
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"domains": []}, "give data.path, data.sources or data.domains"),
        ({"path": ""}, "data.path is empty"),
        ({"rows": 5}, "data.rows applies with data.path"),
        ({"limit": 0}, "data.limit"),
        ({"heldout": 0}, "data.heldout"),
        ({"max_tokens": 0}, "data.max_tokens"),
        ({"too_long": "drop"}, "data.too_long: 'drop'"),
        ({"max_rejected": 2.0}, "data.max_rejected"),
        ({"path": "a", "sources": [SourceConfig("b")]}, "give one of them"),
        ({"path": "a", "domains": ["a", "b"]}, "data.domains"),
        ({"mapping": {"prompt": "q"}}, "data.mapping applies with data.path"),
        ({"heldout_path": "a"}, "data.heldout_path applies with data.path"),
        ({"sources": [SourceConfig("b")], "format": "text"}, "data.format applies inside data.sources"),
        ({"sources": [SourceConfig("a", weight=1.0), SourceConfig("b")]}, "every source a weight, or none"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**settings)


def test_sources_are_looked_for_before_anything_is_read(tmp_path):
    with pytest.raises(UserError, match="no file"):
        open_sources(DataConfig(["x"], str(tmp_path / "none.jsonl")))
