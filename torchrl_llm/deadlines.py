"""Deadlines: when something that is under way has taken too long.

Pure: a heap of times. Time in which the collection is not driven (nobody reads, or it is paused) does not count: the
rollout tells when it rests. Owned by the rollout, and used only by its thread.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds, and what becomes of what takes longer.

    Args:
        turn: from a request to the end of the environment's step.
        trajectory: from a trajectory's first request to its end.
        deliver: whether what is cut is delivered; else it is dropped.
    """

    turn: float = math.inf
    trajectory: float = math.inf
    deliver: bool = True

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return self.shortest < math.inf

    @property
    def shortest(self) -> float:
        """The limit that holds for a single call."""
        return min(self.turn, self.trajectory)


def make_limits(max_turn_seconds: Any, max_trajectory_seconds: Any, on_timeout: Any) -> Limits:
    """The limits for a collector's arguments.

    Raises:
        TypeError: if a limit is no number.
        ValueError: if it is not positive, or ``on_timeout`` is neither ``"deliver"`` nor ``"drop"``.
    """
    if on_timeout not in ("deliver", "drop"):
        raise ValueError(f"on_timeout={on_timeout!r} is not allowed: pass 'deliver' or 'drop'")
    limits = []
    for name, value in (("max_turn_seconds", max_turn_seconds), ("max_trajectory_seconds", max_trajectory_seconds)):
        if value is None:
            limits.append(math.inf)
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is not allowed: pass a number greater than 0, or None")
        if not value > 0:
            raise ValueError(f"{name}={value!r} is not allowed: pass a number greater than 0, or None")
        limits.append(float(value))
    turn, trajectory = limits
    return Limits(turn, trajectory, deliver=on_timeout == "deliver")


class Deadlines:
    """Things that are under way, each with the time by which it must be over.

    Args:
        clock: seconds.

    Examples:
        >>> now = [0.0]
        >>> deadlines = Deadlines(lambda: now[0])
        >>> deadlines.resume()
        >>> deadlines.set("a", 2.0), deadlines.set("b", 1.0), deadlines.clear("b")
        (None, None, None)
        >>> deadlines.seconds_left(), deadlines.expired()
        (2.0, [])
        >>> now[0] = 3.0
        >>> deadlines.expired(), deadlines.seconds_left()
        (['a'], None)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rested = 0.0
        self._resting_since: float | None = clock()
        self._due: dict[Hashable, float] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._count = itertools.count()

    def now(self) -> float:
        """Seconds in which the collection was driven."""
        until = self._clock() if self._resting_since is None else self._resting_since
        return until - self._rested

    def rest(self) -> None:
        """The collection is not driven from now on."""
        if self._resting_since is None:
            self._resting_since = self._clock()

    def resume(self) -> None:
        """It is driven again."""
        if self._resting_since is not None:
            self._rested += self._clock() - self._resting_since
            self._resting_since = None

    def set(self, thing: Hashable, at: float) -> None:
        """``thing`` must be over at a time of :meth:`now`; one set before does not hold any more."""
        if at == math.inf:
            self._due.pop(thing, None)
            return
        self._due[thing] = at
        heapq.heappush(self._heap, (at, next(self._count), thing))

    def clear(self, thing: Hashable) -> None:
        """``thing`` is over."""
        self._due.pop(thing, None)

    def seconds_left(self) -> float | None:
        """Until the next deadline; ``None`` without one."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0][0] - self.now()) if self._heap else None

    def expired(self) -> list[Any]:
        """What should be over, and is not; each is given once."""
        found = []
        while self.seconds_left() == 0.0:
            _, _, thing = heapq.heappop(self._heap)
            del self._due[thing]
            found.append(thing)
        return found
