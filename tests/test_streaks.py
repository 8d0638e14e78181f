"""Failures in a row are counted by the prompts that explain them."""

from __future__ import annotations

from torchrl_llm.seeds import OF_GROUP, OF_SLOT
from torchrl_llm.streaks import FailuresInRow


def member(group: int, index: int = 0) -> tuple[int, ...]:
    return (OF_GROUP, group, index)


def test_a_prompt_that_fails_again_counts_once_whichever_member_of_its_group_it_is() -> None:
    row = FailuresInRow()
    assert [row.add([member(3, index)]) for index in (0, 0, 1, 2)] == [1, 1, 1, 1]
    assert [row.add([member(group)]) for group in (4, 3, 5)] == [2, 2, 3]


def test_trajectories_without_a_source_and_failures_of_nothing_known_count_each() -> None:
    row = FailuresInRow()
    assert [row.add([(OF_SLOT, 0, number)]) for number in range(3)] == [1, 2, 3]
    assert [row.add([]) for _ in range(2)] == [4, 5]


def test_of_a_call_of_many_any_may_be_the_reason_but_only_one_is() -> None:
    row = FailuresInRow()
    assert row.add([member(0), member(1), member(2)]) == 1
    assert row.add([member(1)]) == 1  # it was this one
    assert row.add([member(0)]) == 2  # so this is another reason
    assert row.add([member(1), member(0)]) == 2


def test_a_success_ends_the_row() -> None:
    row = FailuresInRow()
    row.add([member(0)])
    row.add([member(1)])
    row.clear()
    assert row.add([member(2)]) == 1
