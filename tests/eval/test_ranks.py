"""Ranks along a text: against brute force, and the tree that is made of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from makers import DRAFTERS, draft_model, eagle, itself, medusa
from tiny import tiny_model

from eval.ranks import Ranked, count_ranks, measured_tree, right_ranks
from specdec import Limits, Sampling, Target, TreeConfig, UserError, best_paths, generate
from specdec.drafter import Context, drafter_module, open_drafter, save_drafter
from specdec.drafters.none import Plain
from specdec.tree import TokenTree

DEPTH, RANKS = 3, 5
PROMPTS = [[5, 9, 17, 3], [20, 8], [7, 12, 5, 9, 17, 23, 2, 9], [11, 10], [19, 3, 9]]


@pytest.fixture(scope="module")
def target() -> Target:
    """So few tokens that a random drafter's candidates are right at times."""
    return Target(tiny_model(vocab_size=24))


def answered(target: Target, length: int = 60) -> list[tuple[list[int], list[int]]]:
    answers = generate(target, Plain(), PROMPTS, Limits(length))
    return [(prompt, answer.tokens) for prompt, answer in zip(PROMPTS, answers, strict=True)]


def wide(ranks: int, depth: int) -> TreeConfig:
    """Every path of so many ranks."""
    levels: list[list[list[int]]] = [[[]]]
    for _ in range(depth):
        levels.append([[*path, rank] for path in levels[-1] for rank in range(ranks)])
    return TreeConfig(kind="static", paths=[path for level in levels[1:] for path in level])


def brute_force(target: Target, drafter, texts, ranks: int, depth: int) -> Ranked:
    """At each place a drafter that knows nothing yet proposes every path there is."""
    found = Ranked([[0] * ranks for _ in range(depth)], [0] * depth)
    held, drafter.tree = drafter.tree, wide(ranks, depth)
    for prompt, answer in texts:
        for at in range(1, len(answer), depth + 1):
            text = [*prompt, *answer[:at]]
            features = target.start([text[:-1]], 1, drafter.taps).features
            drafter.reset(1, len(text) + depth)
            count, length = torch.tensor([len(text) - 1]), torch.tensor([len(text)])
            tree = drafter.propose(Context(torch.tensor([text]), length, features, count), Sampling(), None)
            node, path = 0, answer[at : at + depth]
            for level, token in enumerate(path):
                found.tries[level] += 1
                children = (tree.parents[0] == node).nonzero()[:, 0].tolist()
                right = [child for child in children if int(tree.tokens[0, child]) == token]
                if not right:
                    break
                node = right[0]
                found.hits[level][children.index(node)] += 1
    drafter.tree = held
    return found


@pytest.mark.parametrize("make", [medusa, eagle, draft_model])
def test_counts_are_those_of_a_tree_of_every_path(target, make):
    tree = TreeConfig(depth=2)
    drafter, texts = make(target, tree), answered(target)
    found = count_ranks(target, drafter, texts, DEPTH, RANKS)
    assert found == brute_force(target, drafter, texts, RANKS, DEPTH)
    assert drafter.tree == tree, "the drafter is given back as it was"
    places = sum(len(range(1, len(answer), DEPTH + 1)) for _, answer in texts)
    assert found.tries[0] == places
    for level in range(1, DEPTH):  # reached after a right candidate, unless the text ends there
        right = sum(found.hits[level - 1])
        assert right - len(texts) <= found.tries[level] <= right
        assert 0 < right < found.tries[level - 1], "nothing to compare"


@torch.inference_mode()
def test_medusas_first_head_is_counted_as_its_law_ranks(target):
    """From the head's own law at every place, and so what one level of candidates is expected to bring."""
    drafter, texts = medusa(target, TreeConfig(depth=1)), answered(target)
    expected, places = torch.zeros(RANKS), 0
    for prompt, answer in texts:
        final = target.features(torch.tensor([[*prompt, *answer]]), ("final",))[0, :, 0]
        laws = drafter.output(0)(drafter.hidden(0, final))  # row t is head 0's law of the token at t + 2
        for at in range(len(prompt) + 1, len(prompt) + len(answer), 2):
            token = [*prompt, *answer][at]
            order = drafter.draft_ids[laws[at - 2].argsort(descending=True)][:RANKS]
            expected += order == token
            places += 1
    found = count_ranks(target, drafter, texts, 1, RANKS)
    assert found == Ranked([expected.int().tolist()], [places])


@pytest.mark.parametrize("make", [medusa, eagle])
def test_a_tree_of_every_path_accepts_what_the_products_say(target, make):
    """Each accuracy is given a right path, so that all products of a level sum to how often it is reached."""
    depth, drafter = 2, make(target, wide(RANKS, 2))
    texts = [(prompt, answer[:60]) for prompt, answer in answered(target, 61)]  # every round can be three tokens
    accuracies = count_ranks(target, drafter, texts, depth, RANKS).accuracies
    starts = [[*prompt, *answer[:at]] for prompt, answer in texts for at in range(0, 60, depth + 1)]
    rounds = [one.rounds[0] for one in generate(target, drafter, starts, Limits(2 + depth))]
    first, second = accuracies
    expected = sum(first) + sum(a * b for a in first for b in second)
    assert sum(one.accepted for one in rounds) / len(rounds) == pytest.approx(expected)
    assert len(accuracies) == depth
    # One level of the same: exactly how often the token is among the first candidates.
    for ranks in (1, 3):
        drafter.tree = wide(ranks, 1)
        rounds = [one.rounds[0] for one in generate(target, drafter, starts, Limits(2 + depth))]
        assert sum(one.accepted for one in rounds) / len(rounds) == pytest.approx(sum(first[:ranks]))


def test_a_drafter_that_is_always_right(target):
    """The target itself: rank 0 at every depth, so the tree begins with a chain."""
    drafter = itself(target, TreeConfig())
    tree, ranked = measured_tree(target, drafter, PROMPTS, TreeConfig(kind="static", nodes=6, depth=4), 40)
    assert ranked.accuracies == [[1.0] + [0.0] * 7] * 4
    assert tree.paths[:4] == [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
    assert (tree.most_nodes, tree.longest) == (6, 4)


@pytest.mark.parametrize("make", [medusa, eagle])
def test_the_measured_tree_is_the_best_of_what_was_counted_and_exact(target, make, tmp_path):
    """It comes back with the drafter's folder, and leaves the text alone under any plan."""
    drafter = make(target, TreeConfig(kind="static", nodes=9, depth=3))
    config = drafter.tree
    with pytest.raises(UserError, match=r"tree\.paths is empty"):
        generate(target, drafter, PROMPTS, Limits(5))
    drafter.tree, ranked = measured_tree(target, drafter, PROMPTS, config, 60)
    assert drafter.tree == dataclasses.replace(config, paths=best_paths(ranked.accuracies, 8))
    limits = Limits(60, target.stop_tokens)
    texts = [(p, g.tokens) for p, g in zip(PROMPTS, generate(target, Plain(), PROMPTS, limits), strict=True)]
    assert ranked == count_ranks(target, drafter, texts, 3)
    kind = make.__name__
    save_drafter(drafter, kind, drafter_module(kind).config_of(drafter), tmp_path)
    again = open_drafter(tmp_path, target)
    assert again.tree == drafter.tree
    assert [g.tokens for g in generate(target, again, PROMPTS, limits)] == [answer for _, answer in texts]
    sampling = Sampling(1.0)
    noise = generate(target, Plain(), PROMPTS, limits, sampling, seed=3)
    assert [g.tokens for g in generate(target, again, PROMPTS, limits, sampling, seed=3)] == [g.tokens for g in noise]


def test_an_unmeasured_tree_is_saved_and_opened_as_such(target, tmp_path):
    drafter = medusa(target, TreeConfig(kind="static", nodes=9, depth=3))
    save_drafter(drafter, "medusa", drafter_module("medusa").config_of(drafter), tmp_path)
    assert open_drafter(tmp_path, target).tree.unmeasured


def test_what_cannot_be_measured_says_so(target):
    static = TreeConfig(kind="static", nodes=4, depth=2)
    with pytest.raises(UserError, match="only a static tree's paths can be measured, got 'chain'"):
        measured_tree(target, itself(target, static), PROMPTS, TreeConfig(), 10)
    with pytest.raises(UserError, match="5 prompts with 5 tokens of answers"):
        measured_tree(target, itself(target, static), PROMPTS, static, 1)
    with pytest.raises(UserError, match="Ngram ranked no candidates"):
        measured_tree(target, DRAFTERS["ngram"](target), [[5, 6]], static, 10)
    with pytest.raises(UserError, match=r"drafter\.tree is 5 deep, but there are 4 heads"):
        measured_tree(target, medusa(target, static), PROMPTS, dataclasses.replace(static, depth=5), 10)


def test_right_ranks_end_at_the_first_wrong_level():
    tree = TokenTree(torch.tensor([[1, 5, 6, 7, 8, 9]]), torch.tensor([[-1, 0, 0, 2, 2, 4]]))
    assert right_ranks(tree, [6, 8, 9, 4]) == [1, 1, 0]
    assert right_ranks(tree, [6, 9, 9]) == [1, None]
    assert right_ranks(tree, [5, 8]) == [0]
    assert right_ranks(tree, [4]) == [None]
    assert right_ranks(tree, []) == []
