"""The batchers as state machines, and the functions that stack and split turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from torchrl_llm import split_trajectories
from torchrl_llm.batches import (
    StepBatcher,
    Trajectory,
    Turn,
    ended_trajectories,
    stack_turns,
)
from torchrl_llm.policies.runner import Response, Ticket


def turn(trajectory: Trajectory, done: bool = False) -> Turn:
    step = trajectory.turns
    trajectory.turns += 1
    return Turn(trajectory, step, TensorDict(value=torch.tensor(step)), done)


# What happens, in the order in which it happens: (trajectory, "turn" | "last" | "drop"), or "pop", with its limit.
happenings = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.sampled_from(["turn", "turn", "last", "drop"])),
        st.tuples(st.just("pop"), st.one_of(st.none(), st.integers(0, 6))),
    ),
    min_size=15,
    max_size=60,
)


class Script:
    """Plays happenings on a batcher, and keeps what went in, came out and was lost."""

    def __init__(self, batcher: Any) -> None:
        self.batcher = batcher
        self.added: list[Turn] = []
        self.popped: list[list[Turn]] = []
        self.lost = 0
        self._running: dict[int, Trajectory] = {}
        self._next_id = 0

    def play(self, events: list[tuple[Any, Any]]) -> None:
        for who, what in events:
            if who == "pop":
                batch = self.batcher.pop(what)
                if batch is not None:
                    self.popped.append(batch)
                    self.check(batch, what)
                continue
            trajectory = self._running.get(who)
            if what == "drop":
                if trajectory is not None:
                    self.lost += self.batcher.drop(trajectory)
                    del self._running[who]
                continue
            if trajectory is None:
                trajectory = self._running[who] = Trajectory(self._next_id, who, 0)
                self._next_id += 1
            self.added.append(turn(trajectory, done=what == "last"))
            self.batcher.add(self.added[-1])
            if what == "last":
                del self._running[who]

    def check(self, batch: list[Turn], limit: int | None) -> None:
        raise NotImplementedError

    def flushed(self) -> list[list[Turn]]:
        batches = []
        while batch := self.batcher.flush():
            batches.append(batch)
        assert self.batcher.flush() == []
        assert self.batcher.pop(None) is None
        return batches


class StepScript(Script):
    def check(self, batch: list[Turn], limit: int | None) -> None:
        assert len(batch) == (self.batcher.size if limit is None else min(self.batcher.size, limit))
        assert batch


@settings(derandomize=True, deadline=None)
@given(events=happenings, size=st.integers(1, 5))
def test_a_step_batcher_gives_each_turn_once_and_in_order(events: list[Any], size: int) -> None:
    script = StepScript(StepBatcher(size))
    script.play(events)
    rest = script.flushed()
    assert all(len(batch) == size for batch in rest[:-1])
    assert [item for batch in (*script.popped, *rest) for item in batch] == script.added
    assert script.lost == 0


def test_a_limit_of_zero_gives_nothing() -> None:
    batcher = StepBatcher(2)
    for trajectory in range(3):
        batcher.add(turn(Trajectory(trajectory, 0, 0), done=True))
    assert batcher.pop(0) is None
    assert len(batcher.pop(None)) == 2


def test_a_stamped_turn_holds_its_ids_as_int64_scalars() -> None:
    data = TensorDict(value=torch.zeros(3))
    answer = Response(
        Ticket(2, 0, 1, 7, 4),
        finish_reason="stop",
        policy_version=3,
        policy_version_end=5,
        token_versions=torch.tensor([3, 5]),
    )
    stamped = Turn(Trajectory(7, 2, 1, turns=5), 4, data, True, answer).stamped()
    assert stamped is data
    entries = stamped["collector"]
    assert entries["finish_reason"] == "stop"
    assert entries["token_versions"].tolist() == [3, 5]
    del entries["finish_reason"], entries["token_versions"]
    assert {key: int(entries[key]) for key in entries.keys()} == {
        "traj_ids": 7,
        "step": 4,
        "env_id": 2,
        "policy_id": 1,
        "group_id": -1,
        "group_index": -1,
        "epoch": -1,
        "policy_version": 3,
        "policy_version_end": 5,
    }
    assert {(entries[key].dtype, entries[key].shape) for key in entries.keys()} == {(torch.int64, torch.Size([]))}


def test_a_stack_holds_the_very_turns() -> None:
    trajectory = Trajectory(0, 0, 0)
    turns = [Turn(trajectory, i, TensorDict(tokens=torch.arange(i + 1)), i == 2) for i in range(3)]
    batch = stack_turns(turns)
    assert isinstance(batch, LazyStackedTensorDict)
    assert batch.batch_size == torch.Size([3])
    assert all(row is item.data for row, item in zip(batch.unbind(0), turns, strict=True))
    assert [row["tokens"].tolist() for row in batch.unbind(0)] == [[0], [0, 1], [0, 1, 2]]
    assert ended_trajectories(turns) == [0]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(rows=st.lists(st.integers(0, 3), min_size=1, max_size=12), order=st.randoms(use_true_random=False))
def test_split_trajectories_puts_each_turn_into_its_trajectory(rows: list[int], order: Any) -> None:
    trajectories = {number: Trajectory(10 + number, 0, 0) for number in rows}
    turns = [turn(trajectories[number]) for number in rows]
    order.shuffle(turns)
    parts = split_trajectories(stack_turns(turns))
    assert [int(part[0]["collector", "traj_ids"]) for part in parts] == list(
        dict.fromkeys(item.trajectory.id for item in turns)
    )
    for part in parts:
        assert isinstance(part, LazyStackedTensorDict)
        assert part.ndim == 1
        assert len(set(part["collector", "traj_ids"].tolist())) == 1
        assert part["collector", "step"].tolist() == part["value"].tolist() == list(range(len(part)))
    assert sum(len(part) for part in parts) == len(rows)


def test_split_trajectories_takes_a_dense_batch_and_refuses_what_has_no_ids() -> None:
    rows = [Turn(Trajectory(i, 0, 0), 0, TensorDict(value=torch.tensor(i)), True).stamped() for i in (4, 2, 4)]
    dense = torch.stack([row.clone() for row in rows])
    assert [part["value"].tolist() for part in split_trajectories(dense)] == [[4, 4], [2]]
    with pytest.raises(KeyError, match=r"traj_ids|collector"):
        split_trajectories(lazy_stack([TensorDict(value=torch.zeros(1))] * 2))
