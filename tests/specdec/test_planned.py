"""Plans that change from round to round change nothing in the text; what is measured and learned is what happened."""

from __future__ import annotations

import pytest
import torch
from makers import DRAFTERS
from tiny import tiny_model, tiny_tokenizer

from specdec import Limits, Sampling, Target, TreeConfig, generate
from specdec.controller import AdaptiveConfig, Controller, adaptive
from specdec.cost import OFF, Costs, CostTable, Plan, plans
from specdec.drafters.none import Plain
from specdec.planned import Planned, measure, rota_of

PROMPTS = [[5, 9, 17, 33], [40, 8], [77, 12, 5, 9, 17, 33, 2, 90]]
LIMITS = Limits(40, (1,))
WITH_TREE = [name for name in DRAFTERS if name != "none"]


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model(), tiny_tokenizer())


class Shuffled:
    """A planner without reason; remembers what it was told."""

    def __init__(self, tree, seed=0):
        self.plans, self.generator = plans(tree), torch.Generator().manual_seed(seed)
        self.told = []

    def next(self, rows, context):  # noqa: ARG002
        return self.plans[int(torch.randint(len(self.plans), (1,), generator=self.generator))]

    def learn(self, plan, depths, paths):
        self.told.append((plan, depths, paths))


@pytest.mark.parametrize("name", WITH_TREE)
def test_any_plan_in_any_round_gives_the_same_text(target, name):
    expected = [g.tokens for g in generate(target, Plain(), PROMPTS, LIMITS)]
    for seed in range(3):
        drafter = DRAFTERS[name](target)
        planned = Planned(drafter, Shuffled(drafter.tree, seed))
        assert [g.tokens for g in generate(target, planned, PROMPTS, LIMITS)] == expected
        assert [g.tokens for g in generate(target, planned, PROMPTS, LIMITS, rows=2)] == expected


@pytest.mark.parametrize("name", ["eagle-chain", "eagle-dynamic", "draft_model-static"])
def test_sampled_text_is_that_of_plain_decoding_with_the_same_noise(target, name):
    sampling = Sampling(1.0, top_p=0.95)
    expected = [g.tokens for g in generate(target, Plain(), PROMPTS, LIMITS, sampling, seed=5)]
    drafter = DRAFTERS[name](target)
    planned = Planned(drafter, Shuffled(drafter.tree))
    assert [g.tokens for g in generate(target, planned, PROMPTS, LIMITS, sampling, seed=5)] == expected


@pytest.mark.parametrize("name", ["itself-chain", "itself-dynamic", "eagle-static", "ngram"])
def test_what_a_planner_is_told_is_what_the_rounds_say(target, name):
    drafter = DRAFTERS[name](target)
    planner = Shuffled(drafter.tree)
    rounds = generate(target, Planned(drafter, planner), PROMPTS[:1], LIMITS)[0].rounds
    told = [(len(depths[0]), tuple(paths[0])) for _, depths, paths in planner.told]
    happened = [(len(r.depths), r.path) for r in rounds if len(r.depths) > 1]
    assert told == happened[: len(told)]
    assert len(told) >= len(happened) - 1, "only the last round is never told"
    assert any(path for _, path in told) or not name.startswith("itself")


def test_a_drafter_that_was_off_has_missed_nothing(target):
    """The target drafting for itself is always right, also after rounds in which it was not asked."""

    class OnOff(Shuffled):
        turn = 0

        def next(self, rows, context):  # noqa: ARG002
            self.turn += 1
            return OFF if self.turn % 3 else Plan(4, 3)

    for name in ("itself-chain", "itself-dynamic"):
        drafter = DRAFTERS[name](target)
        rounds = generate(target, Planned(drafter, OnOff(drafter.tree)), PROMPTS[:1], Limits(40))[0].rounds
        drafted = [r for r in rounds[:-2] if r.depth]
        assert drafted
        assert all(r.accepted >= 1 for r in drafted)


def test_measuring_covers_every_size_and_puts_the_tree_back(target):
    drafter = DRAFTERS["eagle-dynamic"](target)
    tree = drafter.tree
    table = measure(target, drafter, PROMPTS[2], rows=(1, 2), passes=1)
    assert drafter.tree == tree
    for entry in table.entries:
        assert set(entry.read) == {plan.nodes for plan in plans(tree)}
        assert set(entry.draft) == {plan.depth for plan in plans(tree)} - {0}
        assert all(seconds > 0 for seconds in [*entry.read.values(), *entry.draft.values()])
    assert table.fingerprint["drafter"] == "Eagle"


@pytest.mark.parametrize("tree", [TreeConfig(depth=4), TreeConfig(kind="dynamic", depth=5, width=4, nodes=24)])
def test_the_rota_has_every_node_count_and_every_depth(tree):
    rota = rota_of(tree)
    assert {plan.nodes for plan in rota} == {plan.nodes for plan in plans(tree) if not plan.off}
    assert {plan.depth for plan in rota} == {plan.depth for plan in plans(tree) if not plan.off}
    assert all(plan in plans(tree) for plan in rota)


# -- the controller, without a model: rounds that accept by a rule, and the cost of each


TABLE = CostTable([Costs(1, 100, {1: 20.0, 2: 22.0, 4: 24.0, 8: 28.0}, {1: 2.0, 2: 3.0, 3: 4.0})])


class Fake:
    tree = TreeConfig(kind="dynamic", depth=3, width=4, nodes=8)


def drive(controller, rounds, accepts):
    """Run rounds in which nodes 1, 2, … are a chain and `accepts(turn)` of them are right: (tokens, seconds, plans)."""
    tokens, seconds, used = 0, 0.0, []
    for turn in range(rounds):
        plan = controller.next(1, 100)
        depths = [0, *range(1, plan.depth + 1), *[1] * (plan.nodes - plan.depth - 1)]
        right = min(accepts(turn), plan.depth)
        tokens += 1 + right
        seconds += TABLE.entries[0].seconds(plan)
        used.append(plan)
        if not plan.off:
            controller.learn(plan, [depths], [list(range(1, right + 1))])
    return tokens, seconds, used


def test_a_useless_drafter_costs_next_to_nothing():
    tokens, seconds, used = drive(Controller(Fake(), TABLE), 2000, lambda _: 0)
    assert seconds <= 1.05 * tokens * TABLE.entries[0].reading(1)
    assert sum(not plan.off for plan in used) < 30


def test_a_good_drafter_is_used_nearly_always():
    tokens, seconds, used = drive(Controller(Fake(), TABLE), 500, lambda _: 3)
    best = 4 / TABLE.entries[0].seconds(Plan(4, 3))
    assert tokens / seconds >= 0.95 * best
    assert used[-1].depth == 3


def test_it_recovers_when_the_drafter_becomes_useful_and_gives_up_again():
    controller = Controller(Fake(), TABLE)
    _, _, first = drive(controller, 300, lambda _: 0)
    assert first[-1].off
    _, _, second = drive(controller, 600, lambda _: 3)
    assert sum(not plan.off for plan in second[-100:]) > 95
    _, _, third = drive(controller, 400, lambda _: 0)
    assert sum(plan.off for plan in third[-100:]) > 90


def test_it_settles_on_the_depth_that_pays():
    """One token in two is right and never a second: depth 1 beats deeper trees."""
    controller = Controller(Fake(), TABLE)
    _, _, used = drive(controller, 800, lambda turn: turn % 2)
    assert sum(plan.depth == 1 for plan in used[-200:]) > 180


def test_adaptive_decoding_is_exact_and_serves_one_request_after_the_other(target):
    drafter = DRAFTERS["eagle-dynamic"](target)
    table = CostTable([Costs(1, 8, {1: 1.0, 9: 1.2}, {1: 0.1, 3: 0.2})])
    ours = adaptive(drafter, table, AdaptiveConfig(first=2, explore=5))
    for _ in range(3):
        expected = [g.tokens for g in generate(target, Plain(), PROMPTS, LIMITS)]
        assert [g.tokens for g in generate(target, ours, PROMPTS, LIMITS)] == expected


@pytest.mark.parametrize("name", ["draft_model-chain", "draft_model-dynamic", "eagle-dynamic"])
def test_rows_that_were_off_for_long_beside_fresh_ones(target, name):
    """A row far behind and another with a long prompt: what is caught up must fit, and stay exact."""

    class Late(Shuffled):
        turn = 0

        def next(self, rows, context):  # noqa: ARG002
            self.turn += 1
            return Plan(4, 3) if self.turn % 90 == 0 else OFF

    prompts = [[5, 9], [40], *[[7 + i] * 100 for i in range(4)]]
    limits = Limits(100, tuple(range(100, 104)))
    expected = [g.tokens for g in generate(target, Plain(), prompts, limits)]
    drafter = DRAFTERS[name](target)
    tree = drafter.tree
    planned = Planned(drafter, Late(drafter.tree))
    assert [g.tokens for g in generate(target, planned, prompts, limits, rows=2)] == expected
    assert drafter.tree == tree, "the drafter is given back as it was"
