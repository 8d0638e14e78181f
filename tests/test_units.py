"""Whole trajectories and groups as a state machine: completeness, order of launches, the window, what is waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_llm.batches import Trajectory, Turn
from torchrl_llm.policies.runner import Response, Ticket
from torchrl_llm.units import UnitBatcher


def turn(trajectory: Trajectory, done: bool = False) -> Turn:
    step = trajectory.turns
    trajectory.turns += 1
    return Turn(trajectory, step, TensorDict(value=torch.tensor(step)), done)


class Script:
    """Launches groups, lets their members take turns, end, be retried or be given up, and checks what comes out.

    Keeps its own, plain account of the order and of what waits.
    """

    def __init__(self, batcher: UnitBatcher, size: int, in_order: bool) -> None:
        self.batcher, self.size, self.in_order = batcher, size, in_order
        self.order: list[int] = []  # units neither given out nor closed, by launch
        self.ended: dict[int, set[int]] = {}
        self.completed: list[int] = []  # complete and not given out, by completion
        self.running: list[Trajectory] = []
        self.turns: dict[int, list[Turn]] = {}
        self.out: list[int] = []
        self.next_unit = self.next_id = 0

    def launch(self) -> None:
        unit = self.next_unit
        self.next_unit += 1
        self.batcher.open(unit, self.size)
        self.order.append(unit)
        self.ended[unit] = set()
        for index in range(self.size):
            self.begin(unit, index)

    def begin(self, unit: int, index: int) -> None:
        self.running.append(Trajectory(self.next_id, 0, 0, unit=unit, group_index=index))
        self.turns[self.next_id] = []
        self.next_id += 1

    def step(self, which: int, done: bool) -> None:
        if not self.running:
            return
        trajectory = self.running[which % len(self.running)]
        self.turns[trajectory.id].append(turn(trajectory, done))
        self.batcher.add(self.turns[trajectory.id][-1])
        if done:
            self.running.remove(trajectory)
            self.ended[trajectory.unit].add(trajectory.id)
            if len(self.ended[trajectory.unit]) == self.size:
                self.completed.append(trajectory.unit)

    def retry(self, which: int) -> None:
        if not self.running:
            return
        trajectory = self.running.pop(which % len(self.running))
        assert self.batcher.drop(trajectory) == len(self.turns[trajectory.id])
        assert self.batcher.drop(trajectory) == 0
        self.begin(trajectory.unit, trajectory.group_index)

    def close(self, which: int) -> None:
        open_units = [unit for unit in self.order if unit not in self.completed]
        if not open_units:
            return
        unit = open_units[which % len(open_units)]
        had = [t for t in self.running if t.unit == unit]
        expected = sum(len(self.turns[i]) for i in self.ended[unit]) + sum(len(self.turns[t.id]) for t in had)
        assert len(self.batcher.close(unit)) == expected
        assert self.batcher.close(unit) == [] and not self.batcher.is_open(unit)
        self.running = [t for t in self.running if t.unit != unit]
        self.order.remove(unit)

    def ready(self) -> list[int]:
        if not self.in_order:
            return list(self.completed)
        ready = []
        for unit in self.order:
            if unit not in self.completed:
                break
            ready.append(unit)
        return ready

    def waiting(self) -> int:
        """Ended trajectories of units behind the oldest incomplete one, that were not made ready."""
        ready = self.ready()
        held = [unit for unit in self.order if unit not in ready]
        return sum(len(self.ended[unit]) for unit in held[1:])

    def pop(self, limit: int | None) -> None:
        expected = self.ready()
        batch = self.batcher.pop(limit)
        if batch is None:
            turns = sum(self.lengths(unit) for unit in expected)
            assert limit == 0 or (len(expected) < self.batcher.size and (limit is None or turns < limit))
            return
        units = self.check(batch)
        assert units == expected[: len(units)]
        if limit is None:
            assert len(units) == self.batcher.size
        elif len(units) < self.batcher.size:
            assert len(batch) >= limit > len(batch) - self.lengths(units[-1])

    def lengths(self, unit: int) -> int:
        return sum(len(self.turns[i]) for i in self.ended[unit])

    def check(self, batch: list[Turn]) -> list[int]:
        units = list(dict.fromkeys(item.trajectory.unit for item in batch))
        expected: list[Turn] = []
        for unit in units:
            members = sorted(self.ended[unit], key=lambda i: self.turns[i][0].trajectory.group_index)
            assert [self.turns[i][0].trajectory.group_index for i in members] == list(range(self.size))
            expected += [item for i in members for item in self.turns[i]]
            self.order.remove(unit)
            self.completed.remove(unit)
            self.out.append(unit)
        assert [id(item) for item in batch] == [id(item) for item in expected]
        return units


happenings = st.lists(
    st.one_of(
        st.tuples(st.just("launch")),
        st.tuples(st.just("launch")),
        st.tuples(st.just("step"), st.integers(0, 9), st.just(True)),
        st.tuples(st.just("step"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("step"), st.integers(0, 9), st.just(True)),
        st.tuples(st.just("retry"), st.integers(0, 9)),
        st.tuples(st.just("close"), st.integers(0, 9)),
        st.tuples(st.just("pop"), st.one_of(st.none(), st.integers(0, 6))),
    ),
    min_size=25,
    max_size=60,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(events=happenings, size=st.integers(1, 3), members=st.integers(1, 3), in_order=st.booleans())
def test_units_come_whole_in_their_order_and_waiting_counts_what_is_held_back(
    events: list[Any], size: int, members: int, in_order: bool
) -> None:
    batcher = UnitBatcher(size, "launch" if in_order else "completion")
    script = Script(batcher, members, in_order)
    for name, *arguments in events:
        getattr(script, name)(*arguments)
        assert batcher.waiting == script.waiting()
        assert batcher.under_way == len(script.order)
    left = list(script.completed)
    while rest := batcher.flush():
        assert len(script.check(rest)) <= size
    assert sorted(left) == sorted(script.out[len(script.out) - len(left) :])
    assert len(set(script.out)) == len(script.out)


def ended(unit: int, reward: float = 0.0) -> Turn:
    return Turn(
        Trajectory(unit, 0, 0, unit=unit, group_index=0), 0, TensorDict(reward=torch.tensor(reward)), True, None
    )


def test_a_unit_that_the_filter_does_not_want_is_put_aside_and_lets_those_behind_it_go() -> None:
    batcher = UnitBatcher(1, "launch", keep=lambda turns: float(turns[0].data["reward"]) > 0)
    for unit in range(3):
        batcher.open(unit, 1)
    batcher.add(ended(1, 1.0))
    assert batcher.pop(None) is None and batcher.waiting == 1
    batcher.add(ended(0, 0.0))
    assert [[item.trajectory.unit for item in turns] for turns in batcher.take_unwanted()] == [[0]]
    assert batcher.take_unwanted() == []
    assert [item.trajectory.unit for item in batcher.pop(None)] == [1]
    batcher.add(ended(2, 0.0))
    assert batcher.unwanted_in_row == 2
    assert batcher.flush() == [] and batcher.under_way == batcher.waiting == 0


def test_the_longest_wait_and_the_most_overtaken_are_known() -> None:
    now = [0.0]
    batcher = UnitBatcher(1, "launch", clock=lambda: now[0])
    for unit in range(4):
        batcher.open(unit, 1)
    for unit, at in ((1, 1.0), (3, 2.0), (2, 5.0)):
        now[0] = at
        batcher.add(ended(unit))
    assert batcher.most_overtaken == 1  # 3 ended before 2
    now[0] = 7.0
    batcher.add(ended(0))
    assert batcher.most_overtaken == 3
    assert batcher.longest_wait_seconds == 6.0  # 1 waited for 0
    assert [item.trajectory.unit for _ in range(4) for item in batcher.pop(None)] == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ["launch", "completion"])
def test_what_a_filter_failed_on_is_not_delivered(order: str) -> None:
    def fail(turns: list[Turn]) -> bool:
        raise ZeroDivisionError

    batcher = UnitBatcher(1, order, keep=fail)
    batcher.open(0, 1)
    with pytest.raises(ZeroDivisionError):
        batcher.add(ended(0))
    assert batcher.flush() == []


def versioned(unit: int, index: int, version: int) -> Turn:
    answer = Response(Ticket(0, 0, 0, 0, 0), policy_version=version)
    return Turn(Trajectory(10 * unit + index, 0, 0, unit=unit, group_index=index), 0, TensorDict(), True, answer)


@pytest.mark.parametrize("order", ["launch", "completion"])
def test_what_is_too_old_is_expelled_whole_groups_and_members_of_open_ones(order: str) -> None:
    batcher = UnitBatcher(2, order)
    for unit in range(4):
        batcher.open(unit, 2)
    # 0 and 2 are complete, 1 and 3 have one member each; versions from 1 on will do.
    for unit, index, version in ((0, 0, 1), (0, 1, 0), (2, 0, 1), (2, 1, 1), (1, 0, 0), (3, 1, 1)):
        batcher.add(versioned(unit, index, version))
    expelled = batcher.expel(lambda version: version < 1)
    assert sorted((t.trajectory.unit, t.trajectory.group_index) for t in expelled) == [(0, 0), (0, 1), (1, 0)]
    assert batcher.expel(lambda version: version < 1) == []
    assert batcher.waiting == (3 if order == "launch" else 1)
    for unit, index in ((1, 0), (1, 1)):
        batcher.add(versioned(unit, index, 2))
    batch = batcher.pop(None)
    assert batch is not None
    units = [t.trajectory.unit for t in batch]
    assert units == ([1, 1, 2, 2] if order == "launch" else [2, 2, 1, 1])
    batcher.put_back(batch)
    assert batcher.pop(None) == batch
    assert batcher.under_way == 1 and batcher.waiting == 0


def test_turns_that_came_from_a_worker_are_expelled_by_their_version_too() -> None:
    from torchrl_llm.ray.rollout import ArrivedTurn

    batcher = UnitBatcher(1, "launch")
    for unit, version in ((0, 0), (1, 1)):
        batcher.open(unit, 1)
        trajectory = Trajectory(unit, 0, 0, unit=unit)
        head: Any = SimpleNamespace(step=0, done=True, policy_version=version)
        batcher.add(ArrivedTurn(trajectory, head, None, 0))  # type: ignore[arg-type]
    assert [turn.trajectory.unit for turn in batcher.expel(lambda version: version < 1)] == [0]
    assert [turn.trajectory.unit for turn in batcher.pop(None) or ()] == [1]
