"""The bundled prompts: enough of them, well-formed, and no held-out text in the training text."""

import json
import re

import pytest

from data.formats import parse
from data.sources import BUNDLED, bundled_domains
from data.sources import bundled as source

RUN = 13


def bundled(domain, split):
    return [parse(record.row, {}) for record in source(domain, split).records()]


def words(prompt):
    return re.findall(r"\w+", " ".join(turn["content"] for turn in prompt.messages).lower())


def runs(prompt):
    found = words(prompt)
    return {tuple(found[i : i + RUN]) for i in range(len(found) - RUN + 1)}


def test_six_domains():
    assert bundled_domains() == ["chat", "code", "maths", "qa", "summarise", "writing"]


@pytest.mark.parametrize("domain", bundled_domains())
def test_enough_of_each(domain):
    least = (240, 30) if domain == "maths" else (60, 12)
    for split, count in zip(("train", "heldout"), least, strict=True):
        prompts = bundled(domain, split)
        assert len(prompts) >= count
        assert {p.domain for p in prompts} == {domain}
        lines = (BUNDLED / f"{domain}-{split}.jsonl").read_text().splitlines()
        assert all(set(json.loads(line)) == {"id", "domain", "messages"} for line in lines)


def test_ids_are_unique():
    ids = [p.id for d in bundled_domains() for s in ("train", "heldout") for p in bundled(d, s)]
    assert len(ids) == len(set(ids))


def test_no_heldout_prompt_shares_a_run_of_13_words_with_a_training_prompt():
    train = {run: p.id for d in bundled_domains() for p in bundled(d, "train") for run in runs(p)}
    shared = [
        (p.id, train[run]) for d in bundled_domains() for p in bundled(d, "heldout") for run in runs(p) if run in train
    ]
    assert not shared


def test_no_prompt_is_there_twice():
    texts = [" ".join(words(p)) for d in bundled_domains() for s in ("train", "heldout") for p in bundled(d, s)]
    assert len(texts) == len(set(texts))
