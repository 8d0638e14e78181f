"""Turns -> batches: pure state machines without I/O, and the functions that stack and split turns.

Invariants: a turn enters a batcher once and leaves it once, by ``pop``, ``flush`` or ``drop``; ``pop`` gives exactly
one unit of the reader's choice; trajectories are contiguous and in turn order in :class:`TrajectoryBatcher`.

Owned by the rollout, and used only by the thread that drives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.tensorclass import NonTensorData

from torchrl_llm.policies.runner import Response


@dataclass
class Trajectory:
    """The life of one prompt in one environment row, under one policy."""

    id: int
    env_id: int
    policy_id: int
    group_id: int = -1
    turns: int = 0
    version: int | None = None


@dataclass
class Turn:
    """One finished step: the TensorDict that the reader gets, whether it ends its trajectory, the policy's answer."""

    trajectory: Trajectory
    step: int
    data: TensorDictBase
    done: bool
    answer: Response | None = None

    @property
    def version(self) -> int:
        """The version of the weights with which the response began."""
        return 0 if self.answer is None else self.answer.policy_version

    def stamped(self) -> TensorDictBase:
        """The turn's data with its ``"collector"`` entries: int64 scalars, and the finish reason if it is known."""
        trajectory, answer = self.trajectory, self.answer
        ids = {
            "traj_ids": trajectory.id,
            "step": self.step,
            "env_id": trajectory.env_id,
            "policy_id": trajectory.policy_id,
            "group_id": trajectory.group_id,
            "policy_version": self.version,
            "policy_version_end": 0 if answer is None else answer.policy_version_end,
        }
        entries = TensorDict({key: torch.tensor(value) for key, value in ids.items()}, batch_size=())
        if answer is not None and answer.finish_reason is not None:
            entries.set("finish_reason", NonTensorData(answer.finish_reason, batch_size=()))
        if answer is not None and answer.token_versions is not None:
            entries.set("token_versions", answer.token_versions)
        self.data.set("collector", entries)
        if answer is not None:
            _agree(self.data, answer.policy_version, answer.policy_version_end)
        return self.data


def _agree(data: TensorDictBase, begin: int, end: int) -> None:
    """Sets what TorchRL's ``PolicyVersion`` wrote, which is the version when the environment was called."""
    for where, version in ((data, begin), (data.get("next", None), end)):
        written = None if where is None else where.get("policy_version", None)
        if isinstance(written, torch.Tensor):
            where.set("policy_version", torch.full_like(written, version))


class Batcher(Protocol):
    """Collects finished turns and gives them back in the reader's unit, ``size`` of them at a time."""

    size: int
    whole_trajectories: bool

    def add(self, turn: Turn) -> None:
        """Takes a finished turn."""

    def pop(self, limit: int | None) -> list[Turn] | None:
        """A full batch, or the last short one that reaches ``limit`` turns; ``None`` while there is none."""

    def flush(self) -> list[Turn]:
        """All that may still be delivered when nothing more will come, as one short batch; may be empty."""

    def drop(self, trajectory: Trajectory) -> int:
        """Forgets an unfinished trajectory; returns how many of its finished turns are lost by that."""

    def expel(self, too_old: Callable[[int], bool]) -> list[Turn]:
        """Takes out what is finished and whose response (of trajectories: the first) began with a too old version."""

    def put_back(self, turns: list[Turn]) -> None:
        """Takes a batch back that was not handed over; it comes first again."""


@dataclass
class StepBatcher:
    """Exactly ``size`` turns per batch, in completion order; trajectories may be split over batches.

    Examples:
        >>> batcher = StepBatcher(size=2)
        >>> batcher.add(Turn(Trajectory(0, 0, 0), 0, TensorDict(), done=True))
        >>> batcher.pop(limit=None) is None, len(batcher.pop(limit=1))
        (True, 1)
    """

    size: int
    whole_trajectories: bool = field(default=False, init=False)
    _turns: deque[Turn] = field(default_factory=deque, init=False)

    def add(self, turn: Turn) -> None:
        """See :meth:`Batcher.add`."""
        self._turns.append(turn)

    def pop(self, limit: int | None) -> list[Turn] | None:
        """See :meth:`Batcher.pop`."""
        size = self.size if limit is None else min(self.size, limit)
        if not size or len(self._turns) < size:
            return None
        return [self._turns.popleft() for _ in range(size)]

    def flush(self) -> list[Turn]:
        """See :meth:`Batcher.flush`."""
        turns = list(self._turns)[: self.size]
        for _ in turns:
            self._turns.popleft()
        return turns

    def drop(self, trajectory: Trajectory) -> int:
        """Nothing is lost: the turns that were finished are delivered, also of a trajectory that failed later."""
        return 0

    def expel(self, too_old: Callable[[int], bool]) -> list[Turn]:
        """See :meth:`Batcher.expel`."""
        old = [turn for turn in self._turns if too_old(turn.version)]
        if old:
            self._turns = deque(turn for turn in self._turns if not too_old(turn.version))
        return old

    def put_back(self, turns: list[Turn]) -> None:
        """See :meth:`Batcher.put_back`."""
        self._turns.extendleft(reversed(turns))


@dataclass
class TrajectoryBatcher:
    """``size`` complete trajectories per batch, in the order in which they ended.

    Examples:
        >>> batcher, a, b = TrajectoryBatcher(size=1), Trajectory(0, 0, 0), Trajectory(1, 1, 0)
        >>> batcher.add(Turn(a, 0, TensorDict(), done=False))
        >>> batcher.add(Turn(b, 0, TensorDict(), done=True))
        >>> [turn.trajectory.id for turn in batcher.pop(limit=None)]
        [1]
    """

    size: int
    whole_trajectories: bool = field(default=True, init=False)
    _open: dict[int, list[Turn]] = field(default_factory=dict, init=False)
    _complete: deque[list[Turn]] = field(default_factory=deque, init=False)

    def add(self, turn: Turn) -> None:
        """See :meth:`Batcher.add`."""
        turns = self._open.setdefault(turn.trajectory.id, [])
        turns.append(turn)
        if turn.done:
            self._complete.append(self._open.pop(turn.trajectory.id))

    def pop(self, limit: int | None) -> list[Turn] | None:
        """See :meth:`Batcher.pop`. A trajectory is never cut, so ``limit`` may be passed by less than one."""
        if limit == 0:
            return None
        taken = turns = 0
        for trajectory in self._complete:
            taken, turns = taken + 1, turns + len(trajectory)
            if taken == self.size or (limit is not None and turns >= limit):
                return self._take(taken)
        return None

    def flush(self) -> list[Turn]:
        """See :meth:`Batcher.flush`."""
        return self._take(min(self.size, len(self._complete)))

    def drop(self, trajectory: Trajectory) -> int:
        """See :meth:`Batcher.drop`."""
        return len(self._open.pop(trajectory.id, ()))

    def expel(self, too_old: Callable[[int], bool]) -> list[Turn]:
        """See :meth:`Batcher.expel`."""
        old = [turns for turns in self._complete if too_old(turns[0].version)]
        if old:
            self._complete = deque(turns for turns in self._complete if not too_old(turns[0].version))
        return [turn for turns in old for turn in turns]

    def put_back(self, turns: list[Turn]) -> None:
        """See :meth:`Batcher.put_back`."""
        whole: dict[int, list[Turn]] = {}
        for turn in turns:
            whole.setdefault(turn.trajectory.id, []).append(turn)
        self._complete.extendleft(reversed(whole.values()))

    def _take(self, count: int) -> list[Turn]:
        return [turn for _ in range(count) for turn in self._complete.popleft()]


def stack_turns(turns: list[Turn]) -> LazyStackedTensorDict:
    """A batch of turns as a one-dimensional lazy stack, without copying any of them."""
    return LazyStackedTensorDict(*[turn.stamped() for turn in turns], stack_dim=0)


def ended_trajectories(turns: list[Turn]) -> list[int]:
    """Ids of the trajectories whose last turn is among ``turns``."""
    return [turn.trajectory.id for turn in turns if turn.done]


def split_trajectories(batch: TensorDictBase) -> list[TensorDictBase]:
    """Splits a batch into its trajectories, each a one-dimensional lazy stack of turns in order.

    Args:
        batch: a batch of a collector, of shape ``(T,)``; turns of one trajectory may lie anywhere in it.

    Returns:
        One TensorDict of shape ``(T_i,)`` per trajectory, in order of first appearance.

    Raises:
        KeyError: if the batch has no ``("collector", "traj_ids")``.

    Examples:
        >>> rows = [Turn(Trajectory(i, 0, 0), 0, TensorDict(), True).stamped() for i in (4, 2, 4)]
        >>> [len(t) for t in split_trajectories(LazyStackedTensorDict(*rows, stack_dim=0))]
        [2, 1]
    """
    rows: dict[int, list[TensorDictBase]] = {}
    for row in batch.unbind(0):
        rows.setdefault(int(row["collector", "traj_ids"]), []).append(row)
    for turns in rows.values():
        turns.sort(key=lambda row: int(row["collector", "step"]))
    return [LazyStackedTensorDict(*turns, stack_dim=0) for turns in rows.values()]
