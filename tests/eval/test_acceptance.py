import math

from eval.acceptance import acceptance
from specdec.decode import Round


def test_definitions_on_a_hand_made_run():
    # 3 proposed each: all accepted; one accepted; none; two accepted and the second of them stopped the row.
    rounds = [Round(3, 3, 4), Round(3, 1, 2), Round(3, 0, 1), Round(3, 2, 2)]
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
