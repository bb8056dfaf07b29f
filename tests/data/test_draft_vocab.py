"""The draft vocabulary: what is to be predicted decides, and what ends or marks a turn is always in."""

import torch
from styles import template_tokenizer
from tiny import tiny_model

from data.draft_vocab import count_tokens, coverage, ranking
from data.texts import Text
from specdec import Target
from specdec.drafters.eagle import EagleConfig, create, vocabulary

V = 320


def texts():
    long = torch.tensor([9] * 50 + [7, 7, 8])  # 9 fills the prompt, 7 and 8 are written
    return [Text(long, ((50, 53),), None, "a"), Text(torch.tensor([5, 6, 8, 10]), ((2, 3),), None, "b")]


def test_only_supervised_tokens_count_and_prompts_break_ties():
    counts = count_tokens(texts(), V)
    assert counts["a"][[7, 8, 9]].tolist() == [2, 1, 0]
    assert counts["b"][[5, 8, 10]].tolist() == [0, 1, 0]
    rank = ranking(texts(), counts, V)
    assert rank[7] > 0
    assert rank[8] > rank[9] > rank[5] == rank[6] > rank[11] == 0
    assert float(rank[9]) < 1 <= float(rank[8])


def test_coverage_is_by_domain():
    counts = count_tokens(texts(), V)
    assert coverage(torch.tensor([8]), counts) == {"a": 1 / 3, "b": 1.0}


def test_what_ends_or_marks_a_turn_is_always_in():
    tokenizer = template_tokenizer("qwen3")
    target = Target(tiny_model(vocab_size=V, eos_token_id=tokenizer.eos_token_id), tokenizer, "tiny")
    counts = count_tokens(texts(), V)
    drafter = create(EagleConfig(draft_vocab_size=24), target, ranking(texts(), counts, V), torch.Generator())
    held = set(vocabulary(drafter).tolist())
    marks = ["<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    assert {tokenizer.convert_tokens_to_ids(mark) for mark in marks} <= held
    assert {7, 8} <= held
