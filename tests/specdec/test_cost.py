"""Costs and choices: interpolation, replay of smaller trees, and the plan that a brute-force search finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import DRAFTERS, paths
from tiny import tiny_model

from specdec import Limits, Target, TreeConfig, generate
from specdec.cost import OFF, Costs, CostTable, Plan, Profile, choices, plans

COSTS = Costs(1, 100, {1: 20.0, 4: 26.0, 8: 25.0, 16: 40.0}, {1: 2.0, 2: 3.5, 4: 7.0})


def test_reading_between_measured_counts():
    assert COSTS.reading(1) == 20
    assert COSTS.reading(2) == 22
    assert COSTS.reading(4) == 25, "padding to 8 nodes is cheaper"
    assert COSTS.reading(12) == 32.5
    assert COSTS.reading(32) == 80
    assert COSTS.drafting(0) == 0
    assert COSTS.drafting(8) == 14
    assert COSTS.seconds(Plan(8, 2)) == 28.5
    assert COSTS.speedup(OFF, 1.0) == 1.0


@pytest.mark.parametrize(
    "tree",
    [
        TreeConfig(depth=5),
        TreeConfig(kind="static", paths=[[0], [0, 0], [0, 0, 0], [1], [0, 1], [2], [1, 0], [0, 1, 0], [3]]),
        TreeConfig(kind="dynamic", depth=4, width=3, nodes=12),
    ],
    ids=lambda tree: tree.kind,
)
def test_plans_are_parts_of_the_tree(tree):
    found = plans(tree)
    assert found[0] == OFF
    assert len(set(found)) == len(found)
    for plan in found[1:]:
        part = tree.limited(plan.nodes, plan.depth)
        assert part.most_nodes == plan.nodes
        assert part.longest == plan.depth
    assert Plan(tree.most_nodes, tree.longest) in found


def test_static_trees_are_cut_by_nodes_too():
    tree = TreeConfig(kind="static", paths=[[0], [0, 0], [0, 0, 0], [1], [2]])
    assert plans(tree) == [OFF, *(Plan(*p) for p in ((2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3), (5, 2), (6, 3)))]


@settings(max_examples=80, deadline=None)
@given(paths(), st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=12), st.data())
def test_a_static_trees_rounds_tell_exactly_what_its_parts_would_accept(chosen, truths, data):
    """truths: the right ranks at places in a text. Rounds are of the whole tree or of parts, as a controller has them;
    what a part is said to accept is what it would have, in the rounds that count for it."""
    tree = TreeConfig(kind="static", paths=chosen)
    found = plans(tree)[1:]
    whole = Plan(tree.most_nodes, tree.longest)

    def accepted(config, truth):
        known = [tuple(path) for path in config.paths]
        length = max(n for n in range(5) if all(tuple(truth[:m]) in known for m in range(1, n + 1)))
        return [1 + known.index(tuple(truth[:n])) for n in range(1, length + 1)]

    every, mixed = Profile(whole.nodes, whole.depth), Profile(whole.nodes, whole.depth)
    counts = {plan: [] for plan in found}
    for truth in truths:
        every.add(whole, [0, *map(len, chosen)], accepted(tree, truth))
        plan = data.draw(st.sampled_from(found))
        part = tree.limited(plan.nodes, plan.depth)
        mixed.add(plan, [0, *map(len, part.paths)], accepted(part, truth))
        for smaller in found:
            inside = tree.limited(smaller.nodes, smaller.depth).paths
            if smaller.depth <= plan.depth and all(path in part.paths for path in inside):
                counts[smaller].append(truth)
    for plan in found:
        part = tree.limited(plan.nodes, plan.depth)
        emitted = [1 + len(accepted(part, truth)) for truth in truths]
        assert every.tokens(plan) == pytest.approx(sum(emitted) / len(emitted)), plan
        emitted = [1 + len(accepted(part, truth)) for truth in counts[plan]]
        assert mixed.tokens(plan) == pytest.approx(sum(emitted) / len(emitted) if emitted else 1.0), plan


@pytest.mark.parametrize(
    "name", ["eagle-chain", "eagle-static", "itself-static", "eagle-dynamic", "draft_model-dynamic"]
)
def test_a_round_tells_what_smaller_trees_would_have_accepted(name):
    """From the same places in a text: propose the part, and count what the whole tree's replay said."""
    target = Target(tiny_model())
    whole = DRAFTERS[name](target)
    biggest = Plan(whole.tree.most_nodes, whole.tree.longest)
    prompts = [[5, 9, 17, 33, n] for n in range(40, 46)]
    text = [prompt + g.tokens for prompt, g in zip(prompts, generate(target, whole, prompts, Limits(20)), strict=True)]
    # One round from each of many places in the text, so that both trees start alike.
    starts = [t[:cut] for t in text for cut in range(5, 22)]
    tree = whole.tree
    rounds = [g.rounds[0] for g in generate(target, whole, starts, Limits(12))]
    for plan in plans(tree)[1:]:
        profile = Profile(biggest.nodes, biggest.depth)
        for one in rounds:
            profile.add(biggest, one.depths, one.path)
        whole.tree = tree.limited(plan.nodes, plan.depth)
        found = [g.rounds[0].emitted for g in generate(target, whole, starts, Limits(12))]
        assert profile.tokens(plan) == pytest.approx(sum(found) / len(found)), plan


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.floats(0.5, 9), st.floats(0.1, 5))
def test_the_best_plan_is_the_best(accepted, slope, draft):
    costs = Costs(1, 10, {n: 10 + slope * n for n in range(1, 5)}, {d: draft * d for d in range(1, 4)})
    profile = Profile(4, 3)
    for count in accepted:
        profile.add(Plan(4, 3), [0, 1, 2, 3], list(range(1, count + 1)))
    best = choices(plans(TreeConfig(depth=3)), costs, profile)[0]
    rates = {
        depth: sum(1 + min(count, depth) for count in accepted) / len(accepted) / costs.seconds(Plan(depth + 1, depth))
        for depth in range(1, 4)
    } | {0: 1 / costs.reading(1)}
    assert rates[best.plan.depth] == pytest.approx(max(rates.values()))
    assert best.plan.off == (best.speedup == 1.0)


def test_never_tried_counts_as_nothing_accepted():
    assert Profile(8, 3).tokens(Plan(8, 3)) == 1
    assert choices(plans(TreeConfig(depth=3)), COSTS, Profile(4, 3))[0].plan == OFF


def test_memory_fades():
    profile = Profile(2, 1)
    for _ in range(50):
        profile.add(Plan(2, 1), [0, 1], [1], 0.5)
    for _ in range(5):
        profile.add(Plan(2, 1), [0, 1], [], 0.5)
    assert profile.tokens(Plan(2, 1)) < 1.05


def test_the_nearest_entry_by_ratio_and_a_round_trip_through_a_file(tmp_path):
    table = CostTable([COSTS, Costs(8, 100, {1: 30.0}, {1: 3.0}), Costs(8, 1000, {1: 50.0}, {1: 4.0})], {"threads": 2})
    assert table.at(1, 5000) is table.entries[0]
    assert table.at(16, 200) is table.entries[1]
    assert table.at(5, 600) is table.entries[2]
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == table
