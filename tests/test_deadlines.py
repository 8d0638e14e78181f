"""Deadlines as a state machine: what expires, when, and that time at rest does not count."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm.deadlines import Deadlines, Limits, make_limits

happenings = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 3), st.integers(0, 20)),
        st.tuples(st.just("clear"), st.integers(0, 3)),
        st.tuples(st.just("pass"), st.integers(0, 6)),
        st.tuples(st.sampled_from(["rest", "resume", "expired"])),
    ),
    min_size=15,
    max_size=40,
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(events=happenings)
def test_each_thing_expires_once_when_its_time_has_passed_while_driven(events: list[Any]) -> None:
    wall = [0.0]
    deadlines = Deadlines(lambda: wall[0])
    driven, resting = 0.0, True
    due: dict[int, float] = {}
    for name, *arguments in events:
        if name == "set":
            due[arguments[0]] = driven + arguments[1]
            deadlines.set(arguments[0], driven + arguments[1])
        elif name == "clear":
            due.pop(arguments[0], None)
            deadlines.clear(arguments[0])
        elif name == "pass":
            wall[0] += arguments[0]
            driven += 0 if resting else arguments[0]
        elif name == "expired":
            late = {thing for thing, at in due.items() if at <= driven}
            found = deadlines.expired()
            assert set(found) == late and len(found) == len(late)
            assert [due[thing] for thing in found] == sorted(due[thing] for thing in found)
            for thing in late:
                del due[thing]
        else:
            resting = name == "rest"
            getattr(deadlines, name)()
        assert deadlines.now() == driven
        assert deadlines.seconds_left() == (max(0.0, min(due.values()) - driven) if due else None)


def test_no_limit_is_no_deadline() -> None:
    deadlines = Deadlines()
    deadlines.set("a", math.inf)
    assert deadlines.seconds_left() is None and not Limits().any


@pytest.mark.parametrize("name", ["max_turn_seconds", "max_trajectory_seconds"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1.5, ValueError), (math.nan, ValueError), ("2", TypeError), (True, TypeError)],
)
def test_a_limit_is_a_positive_number(name: str, value: Any, error: type[Exception]) -> None:
    arguments = {"max_turn_seconds": None, "max_trajectory_seconds": None, "on_timeout": "deliver", name: value}
    with pytest.raises(error, match=rf"{name}={value!r} is not allowed: pass a number greater than 0, or None"):
        make_limits(**arguments)


def test_what_becomes_of_what_is_late_is_one_of_two() -> None:
    assert make_limits(1, 2.5, "drop") == Limits(1.0, 2.5, deliver=False)
    with pytest.raises(ValueError, match="on_timeout='raise' is not allowed: pass 'deliver' or 'drop'"):
        make_limits(None, None, "raise")
