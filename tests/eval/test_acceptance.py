import math

from eval.acceptance import acceptance
from specdec.decode import Round


def test_definitions_on_a_hand_made_run():
    # 3 proposed each: all accepted; one accepted; none; two accepted and the second of them stopped the row.
    rounds = [Round(3, 3, 4, 3), Round(3, 1, 2, 3), Round(3, 0, 1, 3), Round(3, 2, 2, 3)]
    a = acceptance(rounds)
    assert a.tau == 9 / 4
    assert a.acceptance_rate == 6 / 12
    assert a.reached == [4, 3, 1]
    assert a.positions == [3 / 4, 2 / 3, 1 / 1]


def test_nothing_decoded():
    a = acceptance([])
    assert a.rounds == 0
    assert math.isnan(a.tau)
    assert a.positions == []


def test_a_token_that_was_not_proposed_was_not_reached():
    """A round cut short by the limit, and one in which a lookup found nothing."""
    a = acceptance([Round(2, 2, 3, 2), Round(0, 0, 1, 0), Round(3, 2, 3, 3)])
    assert a.reached == [2, 2, 1]
    assert a.positions == [1.0, 1.0, 0.0]


def test_positions_of_a_tree_are_its_levels():
    a = acceptance([Round(8, 2, 3, 3)])
    assert a.reached == [1, 1, 1]
    assert a.positions == [1.0, 1.0, 0.0]
