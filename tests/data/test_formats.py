"""Every layout gives the same conversation, and every fault has its reason."""

import json

import pytest

from data.formats import (
    ASSISTANT_FIRST,
    EMPTY,
    FIELDS_MISSING,
    NO_USER,
    NOT_TEXT,
    ROLE,
    SYSTEM_LATE,
    TOOL_ALONE,
    TWICE,
    BadRow,
    check_mapping,
    format_of,
    parse,
)
from data.records import ENCODING, NUL
from specdec import UserError

ASK, SAY = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
TALK = [ASK, SAY]


@pytest.mark.parametrize(
    ("layout", "row"),
    [
        ("messages", {"messages": TALK}),
        ("messages", {"messages": json.dumps(TALK)}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}, SAY]}),
        ("messages", {"prompt": "unused", "messages": TALK}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}),
        ("sharegpt", {"conversations": TALK}),
        ("alpaca", {"instruction": "2 + 2?", "input": "", "output": "4"}),
        ("prompt_completion", {"prompt": "2 + 2?", "completion": "4"}),
        ("prompt_completion", {"prompt": [ASK], "completion": [SAY]}),
    ],
)
def test_one_conversation_in_every_layout(layout, row):
    assert format_of(row, {}) == layout
    assert parse(row, {}).messages == TALK


def test_prompts_alone_and_questions_in_turn():
    assert parse({"prompt": "2 + 2?"}, {}).messages == [ASK]
    assert parse({"prompt": [ASK]}, {}).messages == [ASK]
    example = parse({"question_id": 81, "category": "writing", "turns": ["a", "b"]}, {})
    assert (example.id, example.domain) == ("81", "writing")
    roles = [(turn["role"], turn.get("content")) for turn in example.messages]
    assert roles == [("user", "a"), ("assistant", None), ("user", "b")]


def test_a_prompt_that_happens_to_be_json_stays_a_text():
    for text in ("[1, 2, 3]", '{"a": 1}', "[]", "[not json"):
        assert parse({"prompt": text}, {}).messages == [{"role": "user", "content": text}]


def test_alpaca_joins_its_input():
    row = {"instruction": "Translate.", "input": "Hallo", "output": "Hello", "system": "Be exact."}
    assert [turn["content"] for turn in parse(row, {}).messages] == ["Be exact.", "Translate.\n\nHallo", "Hello"]


def test_texts_and_tokens():
    assert parse({"text": "abc"}, {}).text == "abc"
    example = parse({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1]}, {})
    assert (example.tokens, example.spans) == ([5, 6, 7, 8, 9], ((1, 3), (4, 5)))
    # Nothing predicts the first token.
    assert parse({"input_ids": [5, 6], "loss_mask": [1, 1]}, {}).spans == ((1, 2),)
    assert parse({"input_ids": [5], "loss_mask": [True]}, {}).spans == ()


def test_a_mapping_renames_and_hides():
    row = {"question": "2 + 2?", "answer": "4", "text": "unused", "id": 7}
    example = parse(row, {"prompt": "question", "completion": "answer"})
    assert (example.format, example.messages, example.id) == ("prompt_completion", TALK, "7")
    with pytest.raises(UserError, match=r"'promt' is not a field.*Did you mean 'prompt'"):
        check_mapping({"promt": "question"})


def test_tools_calls_and_reasoning_are_kept():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "5", "reasoning_content": "so"},
    ]
    example = parse({"messages": turns, "tools": '[{"type": "function"}]', "model": "m"}, {})
    assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert example.messages[3]["reasoning_content"] == "so"
    assert (example.tools, example.writer) == ([{"type": "function"}], "m")
    shared = [{"from": "human", "value": "x"}, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}]
    assert parse({"conversations": shared}, {}).messages[1]["tool_calls"][0]["function"]["name"] == "f"


def test_reasoning_by_its_other_names_and_without_content():
    for name in ("reasoning_content", "reasoning", "thinking"):
        turn = {"role": "assistant", "content": None, name: "so"}
        assert parse({"messages": [ASK, turn]}, {}).messages[1] == {
            "role": "assistant",
            "content": "",
            "reasoning_content": "so",
        }
    extra = {"role": "user", "content": "x", "ip": "1.2.3.4", "ts": 5}
    assert parse({"messages": [extra]}, {}).messages == [{"role": "user", "content": "x"}]


def m(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, FIELDS_MISSING),
        ({"chat": []}, FIELDS_MISSING),
        ({"messages": None}, FIELDS_MISSING),
        ({"messages": []}, EMPTY),
        (m(("user", " ")), EMPTY),
        (m(("assistant", "x"), ("user", "y")), ASSISTANT_FIRST),
        (m(("system", "s"), ("assistant", "x")), ASSISTANT_FIRST),
        (m(("user", "x"), ("user", "y")), TWICE),
        (m(("user", "x"), ("assistant", "y"), ("assistant", "z")), TWICE),
        (
            m(
                ("system", "x"),
            ),
            NO_USER,
        ),
        (m(("user", "x"), ("system", "y")), SYSTEM_LATE),
        (m(("user", "x"), ("tool", "y")), TOOL_ALONE),
        (m(("boss", "x")), ROLE),
        (m((None, "x")), ROLE),
        (m(("user", None)), NOT_TEXT),
        (m(("user", 5)), NOT_TEXT),
        (m(("user", [{"type": "image_url"}])), NOT_TEXT),
        ({"messages": ["x"]}, NOT_TEXT),
        ({"messages": "x"}, NOT_TEXT),
        ({"prompt": 5}, NOT_TEXT),
        ({"turns": "x"}, NOT_TEXT),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": [{}]}]}, NOT_TEXT),
        (m(("user", "a\0b")), NUL),
        (m(("user", "a\ud83d")), ENCODING),
        ({"prompt": "x", "completion": "\udc80"}, ENCODING),
        ({"prompt": "x", "id": "\ud83d"}, ENCODING),
        (m(("user", [{"type": "text", "text": None}])), NOT_TEXT),
        ({"messages": [ASK], "tools": [{"function": "f"}]}, NOT_TEXT),
        ({"messages": [ASK], "tools": 5}, NOT_TEXT),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": 5}]}, NOT_TEXT),
        ({"input_ids": [1, 2], "loss_mask": [-100, 7]}, NOT_TEXT),
        ({"input_ids": [True, 2], "loss_mask": [0, 1]}, NOT_TEXT),
        ({"input_ids": [1, 2]}, FIELDS_MISSING),
        ({"input_ids": [1, 2], "loss_mask": [1]}, FIELDS_MISSING),
        ({"input_ids": ["a"], "loss_mask": [1]}, NOT_TEXT),
        ({"input_ids": [], "loss_mask": []}, EMPTY),
    ],
)
def test_every_fault_has_its_reason(row, reason):
    with pytest.raises(BadRow) as bad:
        parse(row, {})
    assert bad.value.reason == reason
    assert bad.value.detail


def test_an_empty_answer_is_an_answer():
    assert parse({"prompt": "x", "completion": ""}, {}).messages[1] == {"role": "assistant", "content": ""}
