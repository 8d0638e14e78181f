"""Turns -> batches: pure state machines without I/O, and the functions that stack and split turns.

Invariants: a turn enters a batcher once and leaves it once, by ``pop``, ``flush`` or ``drop``; ``pop`` gives exactly
one unit of the reader's choice. Whole trajectories and groups: :mod:`torchrl_llm.units`.

Owned by the rollout, and used only by the thread that drives it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.tensorclass import NonTensorData

from torchrl_llm.policies.runner import Response
from torchrl_llm.prompt_line import Member

# The int64 scalars that each turn has under "collector".
_NUMBERS = (
    "traj_ids",
    "step",
    "env_id",
    "policy_id",
    "group_id",
    "group_index",
    "epoch",
    "policy_version",
    "policy_version_end",
)


@dataclass
class Trajectory:
    """The life of one prompt in one environment row, under one policy.

    Args:
        id: unique in the collector.
        env_id: the slot.
        policy_id: the policy.
        unit: what it is delivered with: its group, or itself.
        group_id: its prompt's group; -1 without a prompt source.
        group_index: its number in the group.
        epoch: the pass over the data that its prompt comes from.
        source: which of the collector's prompt sources that is.
        member: the prompt, as the source handed it out.
        identity: what it is, whatever slot it runs in; seeds are made of it.
        turns: how many are finished.
        due: when it must have ended, see :mod:`torchrl_llm.deadlines`.
    """

    id: int
    env_id: int
    policy_id: int
    unit: int = -1
    group_id: int = -1
    group_index: int = -1
    epoch: int = -1
    source: int = -1
    member: Member | None = None
    identity: tuple[int, ...] = ()
    turns: int = 0
    due: float = math.inf
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
        numbers = (
            trajectory.id,
            self.step,
            trajectory.env_id,
            trajectory.policy_id,
            trajectory.group_id,
            trajectory.group_index,
            trajectory.epoch,
            self.version,
            0 if answer is None else answer.policy_version_end,
        )
        # One tensor taken apart, and no check of what cannot be wrong: this is done for every turn.
        entries: dict[str, Any] = dict(zip(_NUMBERS, torch.tensor(numbers).unbind(0), strict=True))
        if answer is not None and answer.finish_reason is not None:
            entries["finish_reason"] = NonTensorData(answer.finish_reason, batch_size=())
        if answer is not None and answer.token_versions is not None:
            entries["token_versions"] = answer.token_versions
        self.data.set("collector", TensorDict._new_unsafe(entries, torch.Size(())))
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
