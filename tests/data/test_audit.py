"""The look before training."""

import pytest
import torch
from styles import template_tokenizer

from data.audit import Shares, look_at, preview, warnings_of
from data.texts import Text
from specdec import UserError


def test_shares_are_overall_and_by_domain():
    shares = Shares()
    shares.add("law", 100, 3)
    shares.add("code", 100, 50)
    assert shares.share() == 0.265
    assert shares.share("law") == 0.03
    assert "26 % of 200 tokens are supervised (code 50 %, law 3 %)" in shares.describe()
    (warning,) = shares.check()
    assert "only 3.0 % of the tokens of law" in warning


def test_nothing_supervised_is_refused():
    shares = Shares()
    shares.add("law", 100, 0)
    with pytest.raises(UserError, match="none of the 100 tokens is supervised"):
        shares.check()


def test_a_preview_marks_the_supervised_parts():
    tokenizer = template_tokenizer("smollm2")
    tokens = tokenizer("ask yes<|im_end|>", add_special_tokens=False)["input_ids"]
    assert preview(tokenizer, tokens, [(4, len(tokens))], colour=False) == "ask «yes<|im_end|>»"
    coloured = preview(tokenizer, tokens, [(4, len(tokens))], colour=True)
    assert "\033[32myes<|im_end|>\033[0m" in coloured
    assert "[…]" in preview(tokenizer, tokenizer("x" * 500)["input_ids"], [], colour=False)


def test_the_first_text_is_shown():
    tokenizer = template_tokenizer("smollm2")
    ids = torch.tensor(tokenizer("ask yes", add_special_tokens=False)["input_ids"])
    lines = look_at([Text(ids, ((4, len(ids)),), None, "law")], tokenizer, colour=False)
    assert lines[-1].strip() == "ask «yes»"


def test_warnings_name_the_writer_and_count_what_is_odd():
    done = {"writer": "tiny", "answers": 10, "loops": 2, "cut_short": 1}
    loops, cut = warnings_of(done, {}, ["tiny"])
    assert loops.startswith("warning: 2 of 10 answers (20 %) end in a loop")
    assert "1 conversations ended early" in cut
    (other,) = warnings_of({"writer": "gpt-4", "answers": 1}, {}, ["tiny", "org/tiny"])
    assert "written by gpt-4" in other
    recorded = {"writer": "recorded"}
    (mixed,) = warnings_of(recorded, {"writers": {"gpt-4": 5, "": 3, "tiny": 2}}, ["tiny"])
    assert "gpt-4 (5), nobody named (3)" in mixed
    assert warnings_of(recorded, {"writers": {"tiny": 2}}, ["tiny"]) == []
