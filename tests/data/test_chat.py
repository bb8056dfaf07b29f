"""Ids and masks from chat templates: the supervised parts decode to the assistant's words and the end of turn."""

import pytest
from styles import STYLES, template_tokenizer
from tiny import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.chat import DROPPED, NO_ANSWER, TEMPLATE, Template, joined, tokenizer_hash
from data.formats import BadRow, checked
from specdec import UserError

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def talk(*turns):
    roles = ["user", "assistant"] * len(turns)
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


CONVERSATIONS = {
    "single": talk("What is 2 + 2?", "It is 4."),
    "multi": talk("Hi", "Hello!", "And then?", "Then we go.\n\nTogether.", "Why?", "Because."),
    "repeated": talk("yes", "yes", "yes", "yes", "no yes", "yes"),
    "quotes itself": talk("Say: It is 4.", "It is 4.", "It is 4.", "Say: It is 4."),
    "empty answer": talk("Say nothing", "", "Now speak", "Now."),
    "markup": talk("a", "assistant\nuser\n", "b", "model user [INST"),
    "blank lines": talk("a", "one\n\n\ntwo", "b", "  three"),
    "unicode": talk("Grüezi 👋", "Zürich — 東京", "x", "é" * 3),
    "system": [{"role": "system", "content": "Be brief."}, *talk("Hi", "Hello.", "More", "No.")],
}
TRIMMED = {"llama3", "gemma"}


def words(style, message):
    content = message["content"]
    content = content.strip() if style in TRIMMED else content
    if style == "qwen3_thinking":
        content = "\n</think>\n\n" + content  # serving opens the thinking, the answer must close it
    return (" " if style == "mistral_v1" else "") + content + STYLES[style][3]


def supervised(template, pieces):
    return [template.tokenizer.decode(p.tokens[a:b]) for p in pieces for a, b in p.spans]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_mask_is_the_assistants_words_and_the_end_of_turn(style, name):
    template, messages = Template(template_tokenizer(style)), CONVERSATIONS[name]
    if name == "system" and style in ("gemma", "mistral_v1"):
        messages = messages[1:]
    pieces = template.ids(template.exchanges(messages))
    said = [m for m in messages if m["role"] == "assistant"]
    assert supervised(template, pieces) == [words(style, message) for message in said]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_what_stands_before_an_answer_is_what_serving_renders(style, name):
    template, messages = Template(template_tokenizer(style)), CONVERSATIONS[name]
    if name == "system" and style in ("gemma", "mistral_v1"):
        messages = messages[1:]
    before = [piece.tokens[:a] for piece in template.ids(template.exchanges(messages)) for a, _ in piece.spans]
    places = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(before) == len(places)
    for k, tokens in zip(places, before, strict=True):
        served = template.tokenizer.apply_chat_template(messages[:k], add_generation_prompt=True, return_dict=True)
        assert tokens == served["input_ids"] == template.prompt(messages[:k])
        template.check_serving(messages[:k], None, tokens)


@pytest.mark.parametrize("style", ["smollm2", "llama3", "qwen3", "gemma", "mistral_v1"])
def test_a_conversation_is_one_text_where_history_stays_as_it_was(style):
    template = Template(template_tokenizer(style))
    (piece,) = template.ids(template.exchanges(CONVERSATIONS["multi"]))
    assert len(piece.spans) == 3


def test_history_that_is_rendered_otherwise_makes_texts_of_their_own():
    """Reasoning is dropped from history; Mistral moves the system prompt; both are what serving then reads."""
    messages = talk("a", "b", "c", "d")
    messages[1]["reasoning_content"] = messages[3]["reasoning_content"] = "well"
    template = Template(template_tokenizer("qwen3"))
    pieces = template.ids(template.exchanges(messages))
    assert supervised(template, pieces) == [f"<think>\nwell\n</think>\n\n{x}<|im_end|>" for x in "bd"]
    assert len(pieces) == 2
    assert "well" not in template.tokenizer.decode(pieces[1].tokens[: pieces[1].spans[0][0]])
    mistral = Template(template_tokenizer("mistral"))
    assert len(mistral.ids(mistral.exchanges(CONVERSATIONS["system"]))) == 2


def test_thinking_off_is_part_of_the_prompt():
    template = Template(template_tokenizer("qwen3"), {"enable_thinking": False})
    (piece,) = template.ids(template.exchanges(talk("a", "b")))
    assert supervised(template, [piece]) == ["b<|im_end|>"]
    assert template.tokenizer.decode(piece.tokens).endswith("<think>\n\n</think>\n\nb<|im_end|>")


def test_reasoning_inside_the_content_stays_with_the_answer():
    """Also where only the closing tag is there, the opening one being part of the prompt."""
    template = Template(template_tokenizer("qwen3_thinking"))
    pieces = template.ids(template.exchanges(talk("a", "steps</think>\n\nanswer")))
    assert supervised(template, pieces) == ["steps\n</think>\n\nanswer<|im_end|>"]
    hybrid = Template(template_tokenizer("qwen3"))
    pieces = hybrid.ids(hybrid.exchanges(talk("a", "<think>\nsteps\n</think>\n\nanswer")))
    assert supervised(hybrid, pieces) == ["<think>\nsteps\n</think>\n\nanswer<|im_end|>"]


@pytest.mark.parametrize("style", STYLES)
def test_tool_conversations(style):
    messages = [
        {"role": "user", "content": "Rain in Bern?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "No, sun."},
    ]
    template, end = Template(template_tokenizer(style)), STYLES[style][3]
    calls = {
        "llama3": '{"name": "weather", "parameters": {"city": "Bern"}}',
        "qwen3": '<think>\n\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern"}}]',
    }
    if style not in calls:  # the template cannot say it: refused, never trained on as an empty answer
        with pytest.raises(BadRow) as bad:
            template.exchanges(checked(messages), [TOOL])
        assert bad.value.reason in (DROPPED, TEMPLATE)
        return
    pieces = template.ids(template.exchanges(checked(messages), [TOOL]))
    assert supervised(template, pieces) == [calls[style] + end, "No, sun." + end]
    assert "sun" in template.tokenizer.decode(pieces[-1].tokens[: pieces[-1].spans[-1][0]])


def test_reasoning_that_a_template_drops_is_refused():
    messages = [*talk("a"), {"role": "assistant", "content": "b", "reasoning_content": "because"}]
    with pytest.raises(BadRow, match="leaves out reasoning_content"):
        Template(template_tokenizer("smollm2")).exchanges(messages)


def test_what_a_template_refuses_is_a_bad_row():
    with pytest.raises(BadRow, match="System role not supported"):
        Template(template_tokenizer("gemma")).exchanges(CONVERSATIONS["system"])
    with pytest.raises(BadRow) as bad:
        Template(template_tokenizer("gemma")).exchanges(talk("only a question"))
    assert bad.value.reason == NO_ANSWER


def test_a_token_across_the_border_is_cut_where_serving_stops():
    """The prompt ends in a line break, the answer begins with one, and two of them are one token."""
    line = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: i for i, letter in enumerate(sorted(line))} | {"ĊĊ": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.chat_template = template_tokenizer("smollm2").chat_template
    template = Template(tokenizer)
    messages = talk("a", "\nb", "c", "d")
    pieces = template.ids(template.exchanges(messages))
    assert supervised(template, pieces) == ["\nb<|im_end|>", "d<|im_end|>"]
    assert pieces[0].tokens[: pieces[0].spans[0][0]] == template.prompt(messages[:1])
    # In the next prompt the two line breaks are one token, so that turn stands in a text of its own.
    assert len(pieces) == 2
    assert pieces[1].tokens[: pieces[1].spans[0][0]] == template.prompt(messages[:3])


def test_joined_goes_on_only_from_the_same_ids():
    assert [p.spans for p in joined([([1, 2], [3]), ([1, 2, 3, 4], [5, 6])])] == [((2, 3), (4, 6))]
    assert [p.spans for p in joined([([1, 2], [3]), ([1, 9, 3, 4], [5])])] == [((2, 3),), ((4, 5),)]


def test_a_system_prompt_is_added_where_there_is_none():
    template = Template(template_tokenizer("smollm2"), system="Be kind.")
    assert "Be kind." in template.render(talk("a"))
    assert "Be kind." not in template.render([{"role": "system", "content": "Be firm."}, *talk("a")])


def test_content_is_never_altered():
    template = Template(template_tokenizer("smollm2"))
    text = "ABC  Def\t\n GHI \u00a0\u200b"
    (piece,) = template.ids(template.exchanges(talk("Q", text)))
    assert supervised(template, [piece]) == [text + "<|im_end|>"]


def test_no_template_is_a_sentence():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        Template(tokenizer)


def test_other_ids_than_serving_are_found():
    template = Template(template_tokenizer("smollm2"))
    tokens = template.prompt(talk("abc"))
    with pytest.raises(UserError, match="from position 3 on"):
        template.check_serving(talk("abc"), None, [*tokens[:3], 7, *tokens[4:]])


def test_the_tokenizers_hash_changes_with_template_and_vocabulary():
    one, other, third = (template_tokenizer("smollm2") for _ in range(3))
    assert tokenizer_hash(one) == tokenizer_hash(other)
    other.chat_template += " "
    third.add_tokens(["word"])
    assert len({tokenizer_hash(x) for x in (one, other, third)}) == 3
