"""Every drafter and every tree: whatever is proposed, the text is the target's."""

import pytest
import torch
from makers import COVERED, DRAFTERS, TREES, draft_model, eagle, itself
from tiny import EOS, family_model, tiny_model

from specdec import Limits, Sampling, Target, UserError, generate, stream
from specdec.drafter import drafter_module, kinds, open_drafter
from specdec.drafters.none import Plain

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3]]
names = pytest.mark.parametrize("name", DRAFTERS)


def texts(target, drafter, prompts, limits, *arguments, **options):
    return [g.tokens for g in generate(target, drafter, prompts, limits, *arguments, **options)]


def test_every_file_is_covered():
    assert set(kinds()) == COVERED


@names
@pytest.mark.parametrize("limit", [1, 2, 5, 40])
def test_greedy_text_is_the_targets_alone_and_in_a_batch(target, name, limit):
    drafter, limits = DRAFTERS[name](target), Limits(limit, (EOS,))
    expected = texts(target, Plain(), PROMPTS, limits)
    assert texts(target, drafter, PROMPTS, limits) == expected
    assert [texts(target, drafter, [p], limits)[0] for p in PROMPTS] == expected


@names
def test_proposals_of_a_row_do_not_depend_on_the_others(target, name):
    drafter = DRAFTERS[name](target)
    together = generate(target, drafter, PROMPTS, Limits(30))
    alone = [generate(target, drafter, [p], Limits(30))[0] for p in PROMPTS]
    assert [g.rounds for g in together] == [g.rounds for g in alone]


@names
def test_a_repetition_penalty_counts_each_paths_own_tokens(target, name):
    """T8: greedy under a penalty strong enough to change the text."""
    drafter, sampling, limits = DRAFTERS[name](target), Sampling(0.0, repetition_penalty=1.8), Limits(30, (EOS,))
    expected = texts(target, Plain(), PROMPTS, limits, sampling)
    assert expected != texts(target, Plain(), PROMPTS, limits)
    assert texts(target, drafter, PROMPTS, limits, sampling) == expected


@names
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=9, top_p=0.9), Sampling(1.3, min_p=0.05)])
def test_coupled_sampling_gives_plain_samplings_text(target, name, sampling):
    """T14: noise tied to the position."""
    drafter, limits = DRAFTERS[name](target), Limits(25, (EOS,))
    expected = texts(target, Plain(), PROMPTS, limits, sampling, seed=11)
    assert texts(target, drafter, PROMPTS, limits, sampling, seed=11) == expected
    assert texts(target, drafter, PROMPTS, limits, sampling, seed=12) != expected


@names
def test_no_stop_token_before_min_new_tokens(target, name):
    drafter = DRAFTERS[name](target)
    free = texts(target, Plain(), PROMPTS, Limits(30))
    stops = tuple({text[4] for text in free})
    limits = Limits(30, stops, min_new_tokens=12)
    expected = texts(target, Plain(), PROMPTS, limits)
    assert all(len(text) >= 12 and not set(text[:11]) & set(stops) for text in expected)
    assert texts(target, drafter, PROMPTS, limits) == expected


@names
def test_a_stop_string_ends_the_row_wherever_rounds_fall(target, name):
    """Also a string spread over several tokens, whose parts come in different rounds."""
    drafter = DRAFTERS[name](target)
    free = texts(target, Plain(), PROMPTS, Limits(30))
    readable = []
    for start in range(2, 24):
        stop = target.tokenizer.decode(free[0][start : start + 3])
        if stop and "\ufffd" not in stop:
            readable.append(stop)
    assert readable, "no three tokens of the text make readable letters"
    for stop in readable[:3]:
        limits = Limits(30, (), stop_strings=(stop,))
        expected = texts(target, Plain(), PROMPTS, limits)
        assert stop in target.tokenizer.decode(expected[0])
        assert stop not in target.tokenizer.decode(expected[0][:-1])
        assert texts(target, drafter, PROMPTS, limits) == expected


@names
def test_streamed_steps_add_up(target, name):
    drafter, limits = DRAFTERS[name](target), Limits(20, (EOS,))
    out = generate(target, drafter, PROMPTS, limits)
    rows = [[] for _ in PROMPTS]
    for step in stream(target, drafter, PROMPTS, limits):
        assert step.tokens
        assert step.round is None or step.round.emitted == len(step.tokens)
        rows[step.row] += step.tokens
    assert rows == [g.tokens for g in out]


@names
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # rotary and learned positions
def test_the_end_of_the_window_is_reached_and_never_passed(name, family):
    target = family_model("gpt2", 0, positions=32) if family == "gpt2" else tiny_model(max_position_embeddings=32)
    target = Target(target)
    drafter, prompt = DRAFTERS[name](target), [5] * 20
    expected = generate(target, Plain(), [prompt], Limits(50))[0]
    out = generate(target, drafter, [prompt], Limits(50))[0]
    assert out.tokens == expected.tokens
    assert len(out.tokens) == 12
    assert out.finish == "length"


@pytest.mark.parametrize("tree", ["chain", "drawn", "static"])  # a dynamic tree may spend its nodes elsewhere
def test_the_target_as_its_own_drafter_is_always_accepted(target, tree):
    """T15: τ is the longest path plus one."""
    drafter = itself(target, TREES[tree])
    longest = TREES[tree].longest
    out = generate(target, drafter, PROMPTS, Limits(1 + 4 * (longest + 1)))
    assert all(g.accepted_length == longest + 1 for g in out)


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
def test_the_worst_drafter_there_is_changes_nothing(target, tree):
    """T15: one that always proposes the target's least likely tokens."""
    drafter = itself(target, TREES[tree])
    head = drafter.model.head
    drafter.model.head = lambda final: -head(final)
    out = generate(target, drafter, PROMPTS, Limits(20, (EOS,)))
    assert [g.tokens for g in out] == texts(target, Plain(), PROMPTS, Limits(20, (EOS,)))
    assert all(g.accepted_length == 1.0 for g in out)


def test_folders_that_are_no_drafters_are_named(target, tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        open_drafter(tmp_path, target)
    with pytest.raises(UserError, match=r"'eagel' does not exist.*Did you mean 'eagle'"):
        drafter_module("eagel")


def test_a_draft_model_with_another_tokenizer_is_refused(target):
    other = Target(tiny_model(), target.tokenizer, "other")

    class Renamed:
        eos_token_id, all_special_ids = 1, ()

        def get_vocab(self):
            return {"a": 0}

    other.tokenizer = Renamed()
    from specdec.drafters.draft_model import DraftModel

    with pytest.raises(UserError, match="another tokenizer"):
        DraftModel(other, target)


def test_drawn_chains_carry_the_law_they_were_drawn_from(target):
    """Each drafted token has positive probability under a row that sums to 1 (rule 1.1 refuses anything else)."""
    for make in (eagle, draft_model):
        drafter, seen = make(target, TREES["drawn"]), []
        original = drafter.propose

        def spy(*arguments, original=original, seen=seen):
            seen.append(original(*arguments))
            return seen[-1]

        drafter.propose = spy
        generate(target, drafter, PROMPTS, Limits(12), Sampling(1.0, top_k=5), torch.Generator().manual_seed(0))
        assert seen
        for tree in seen:
            q = tree.draft_probs[:, :-1]  # no time shift: the last node has no children
            assert torch.allclose(q.sum(-1), torch.ones_like(q.sum(-1)))
            assert bool((q.gather(-1, tree.tokens[:, 1:, None]) > 0).all())
