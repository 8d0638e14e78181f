"""Whole units per batch: trajectories or groups of them, in the order of their launches or as they are completed.

A unit is what is delivered whole: a group of ``size`` trajectories, or a single trajectory. It is *opened* when its
first trajectory is launched, *complete* when all have ended, and leaves by a batch or is closed without one.

With ``order="launch"`` a complete unit waits until all that were opened before it are complete or closed, so that slow
and fast ones are delivered in the mix in which they were launched. The window bounds what waits:
:attr:`UnitBatcher.waiting` counts the ended trajectories of units behind the oldest incomplete one. Those of the oldest
unit itself do not count, so that it can always be completed.

Invariants: a turn enters once and leaves once, by ``pop``, ``flush``, ``drop``, ``close``, ``expel`` or
``take_unwanted``; ``pop`` gives whole units, each contiguous, its trajectories in the order of their index, each
contiguous and in turn order.

A pure state machine but for the filter, which is the user's function. Owned by the rollout, used only by its thread.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torchrl_llm.batches import Trajectory, Turn

Filter = Callable[[list[Turn]], bool]


@dataclass
class _Unit:
    """An open or complete unit: the turns of its trajectories, by their index in it."""

    size: int
    opened: int
    turns: dict[int, list[Turn]] = field(default_factory=dict)
    ended: int = 0
    complete: bool = False
    completed_at: float = 0.0

    def all_turns(self) -> list[Turn]:
        return [turn for index in sorted(self.turns) for turn in self.turns[index]]


class UnitBatcher:
    """``size`` complete units per batch.

    Args:
        size: units per batch.
        order: ``"launch"`` or ``"completion"``.
        keep: called with the turns of a unit when it is complete; one that it does not want is put aside for
            :meth:`take_unwanted`.
        clock: seconds, for the longest wait.

    Examples:
        >>> batcher = UnitBatcher(size=1, order="launch")
        >>> a, b = Trajectory(0, 0, 0, unit=0), Trajectory(1, 1, 0, unit=1)
        >>> for trajectory in (a, b):
        ...     batcher.open(trajectory.unit, size=1)
        >>> batcher.add(Turn(b, 0, None, True, None))
        >>> batcher.pop(None) is None, batcher.waiting
        (True, 1)
        >>> batcher.add(Turn(a, 0, None, True, None))
        >>> [turn.trajectory.id for _ in range(2) for turn in batcher.pop(None)]
        [0, 1]
    """

    whole_trajectories = True

    def __init__(
        self, size: int, order: str, keep: Filter | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.size = size
        self._in_order = order == "launch"
        self._keep = keep
        self._clock = clock
        self._units: dict[int, _Unit] = {}  # in the order of their opening
        self._ready: deque[list[Turn]] = deque()
        self._unwanted: list[list[Turn]] = []
        self._opened = self._settled = 0
        self.waiting = 0
        self.unwanted_in_row = 0
        self.longest_wait_seconds = 0.0
        self.most_overtaken = 0

    # Units

    def open(self, unit: int, size: int) -> None:
        """A unit's first trajectory is being launched; it gets its place behind all that were opened before."""
        self._units[unit] = _Unit(size, self._opened)
        self._opened += 1

    def is_open(self, unit: int) -> bool:
        """Whether a unit still wants trajectories."""
        return unit in self._units

    @property
    def under_way(self) -> int:
        """Units opened and not given out."""
        return len(self._units) + len(self._ready)

    def open_units(self) -> list[int]:
        """Units that are not complete, oldest first."""
        return [unit for unit, state in self._units.items() if not state.complete]

    def close(self, unit: int) -> list[Turn]:
        """Gives a unit up; returns the turns that it had, which are not delivered."""
        found = self._units.get(unit)
        if found is None:
            return []
        if unit != next(iter(self._units)):
            self.waiting -= found.ended
        self._settled += not found.complete
        self._leave(unit)
        return found.all_turns()

    def take_unwanted(self) -> list[list[Turn]]:
        """The units that the filter did not want since the last call."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    # See Batcher

    def add(self, turn: Turn) -> None:
        """See :meth:`Batcher.add`."""
        trajectory = turn.trajectory
        unit = self._units[trajectory.unit]
        unit.turns.setdefault(trajectory.group_index, []).append(turn)
        if not turn.done:
            return
        unit.ended += 1
        if trajectory.unit != next(iter(self._units)):
            self.waiting += 1
        if unit.ended == unit.size:
            self._complete(trajectory.unit, unit)

    def pop(self, limit: int | None) -> list[Turn] | None:
        """See :meth:`Batcher.pop`. A unit is never cut, so ``limit`` may be passed by less than one."""
        if limit == 0:
            return None
        taken = turns = 0
        for unit in self._ready:
            taken, turns = taken + 1, turns + len(unit)
            if taken == self.size or (limit is not None and turns >= limit):
                return self._take(taken)
        return None

    def flush(self) -> list[Turn]:
        """See :meth:`Batcher.flush`. What is complete is given, also if an older unit will never be."""
        complete = [unit for unit, state in self._units.items() if state.complete]
        for unit in complete:
            self._make_ready(unit)
        return self._take(min(self.size, len(self._ready)))

    def drop(self, trajectory: Trajectory) -> int:
        """See :meth:`Batcher.drop`. The unit stays open: it may get another trajectory in its place."""
        unit = self._units.get(trajectory.unit)
        return 0 if unit is None else len(unit.turns.pop(trajectory.group_index, ()))

    def expel(self, too_old: Callable[[int], bool]) -> list[Turn]:
        """Takes out what has ended and whose first response began with a too old version of the weights.

        A complete unit goes whole; of an incomplete one only the trajectories that are too old: the unit wants others
        in their place.
        """
        expelled: list[Turn] = []
        for turns in list(self._ready):
            if _began_too_early(turns, too_old):
                self._ready.remove(turns)
                expelled += turns
        for key, unit in list(self._units.items()):
            if unit.complete:
                turns = unit.all_turns()
                if _began_too_early(turns, too_old):
                    self.close(key)
                    expelled += turns
                continue
            for index, turns in list(unit.turns.items()):
                if turns[-1].done and _began_too_early(turns, too_old):
                    del unit.turns[index]
                    unit.ended -= 1
                    self.waiting -= key != next(iter(self._units))
                    expelled += turns
        return expelled

    def put_back(self, turns: list[Turn]) -> None:
        """Takes a batch back that was not handed over; it comes first again."""
        units: dict[int, list[Turn]] = {}
        for turn in turns:
            units.setdefault(turn.trajectory.unit, []).append(turn)
        self._ready.extendleft(reversed(units.values()))

    # Order

    def _complete(self, key: int, unit: _Unit) -> None:
        # What was opened later and is settled already has overtaken it.
        before = itertools.takewhile(lambda other: other != key, self._units)
        older = sum(not self._units[other].complete for other in before)
        self.most_overtaken = max(self.most_overtaken, self._settled - (unit.opened - older))
        self._settled += 1
        unit.completed_at = self._clock()
        if self._keep is not None and not self._keep(unit.all_turns()):
            if key != next(iter(self._units)):
                self.waiting -= unit.ended
            self._leave(key)
            self._unwanted.append(unit.all_turns())
            self.unwanted_in_row += 1
            return
        self.unwanted_in_row = 0
        unit.complete = True
        if not self._in_order:
            self._make_ready(key)
        else:
            self._release()

    def _release(self) -> None:
        """Makes ready what is complete at the head of the line."""
        while self._units:
            key = next(iter(self._units))
            if not self._units[key].complete:
                return
            self._make_ready(key)

    def _make_ready(self, key: int) -> None:
        unit = self._units[key]
        if key != next(iter(self._units)):
            self.waiting -= unit.ended
        self.longest_wait_seconds = max(self.longest_wait_seconds, self._clock() - unit.completed_at)
        self._remove(key)
        self._ready.append(unit.all_turns())

    def _leave(self, key: int) -> None:
        """Takes a unit out of the line; those behind it may be ready by that."""
        self._remove(key)
        if self._in_order:
            self._release()

    def _remove(self, key: int) -> None:
        was_head = key == next(iter(self._units))
        del self._units[key]
        if was_head and self._units:
            # The new head waits for nobody.
            self.waiting -= self._units[next(iter(self._units))].ended

    def _take(self, count: int) -> list[Turn]:
        return [turn for _ in range(count) for turn in self._ready.popleft()]


def _began_too_early(turns: list[Turn], too_old: Callable[[int], bool]) -> bool:
    """Whether any trajectory among whole ones began with a too old version."""
    return any(turn.step == 0 and too_old(turn.version) for turn in turns)
