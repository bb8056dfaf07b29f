import pytest

from specdec import Limits, UserError
from specdec.stopping import Stopper


class Letters:
    """Token n is the n-th letter."""

    def decode(self, tokens, skip_special_tokens):  # noqa: ARG002
        return "".join(chr(97 + t) for t in tokens)


def test_a_run_is_cut_after_the_stop_token():
    stopper = Stopper(Limits(10, (7,)), 10)
    assert stopper.take([1, 2]) == [1, 2]
    assert stopper.take([3, 7, 4]) == [3, 7]
    assert stopper.finish == "stop"


def test_the_budget_cuts_a_run():
    stopper = Stopper(Limits(3), 3)
    assert stopper.take([1, 2, 3, 4]) == [1, 2, 3]
    assert stopper.finish == "length"


def test_a_stop_on_the_last_token_is_a_stop():
    stopper = Stopper(Limits(2, (5,)), 2)
    stopper.take([1, 5])
    assert stopper.finish == "stop"


def test_a_stop_string_across_runs():
    stopper = Stopper(Limits(10, stop_strings=("cde",)), 10, Letters())
    assert stopper.take([0, 1, 2]) == [0, 1, 2]
    assert stopper.take([3]) == [3]
    assert stopper.take([4, 5, 6]) == [4]
    assert stopper.finish == "stop_string"


def test_no_stop_string_before_the_minimum():
    stopper = Stopper(Limits(10, stop_strings=("a",), min_new_tokens=3), 10, Letters())
    assert stopper.take([0, 1, 2, 3]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_new_tokens": 200}, "min_new_tokens"),
        ({"stop_strings": ("",)}, "empty"),
    ],
)
def test_bad_limits_are_named(limits, message):
    with pytest.raises(UserError, match=message):
        Limits(**limits)
