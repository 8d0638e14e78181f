"""Whose batch is next. Pure state machines, guarded by the fleet's lock.

Invariants: what a worker sent comes out in the order in which it was sent, and nothing is dropped; a worker that left
still has what it sent delivered.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")


class Schedule(Protocol[Item]):
    """Takes what workers sent, and says what is next."""

    def join(self, worker: int) -> None:
        """A worker takes part from now on."""

    def leave(self, worker: int) -> None:
        """A worker will send no more."""

    def arrive(self, worker: int, item: Item) -> None:
        """A worker sent something."""

    def pop(self) -> Item | None:
        """What is next; ``None`` while that has not arrived."""

    def drain(self) -> list[Item]:
        """All that has arrived, when nothing more will come."""


class FirstCome(Generic[Item]):
    """First come, first served.

    Examples:
        >>> schedule = FirstCome()
        >>> schedule.arrive(1, "b0")
        >>> schedule.arrive(0, "a0")
        >>> schedule.pop(), schedule.pop(), schedule.pop()
        ('b0', 'a0', None)
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()

    def join(self, worker: int) -> None:
        """See :meth:`Schedule.join`."""

    def leave(self, worker: int) -> None:
        """See :meth:`Schedule.leave`."""

    def arrive(self, worker: int, item: Item) -> None:
        """See :meth:`Schedule.arrive`."""
        self._items.append(item)

    def pop(self) -> Item | None:
        """See :meth:`Schedule.pop`."""
        return self._items.popleft() if self._items else None

    def drain(self) -> list[Item]:
        """See :meth:`Schedule.drain`."""
        items, self._items = list(self._items), deque()
        return items


class RoundRobin(Generic[Item]):
    """Strictly one after the other, in the order of their numbers; the order does not depend on who is fast.

    Examples:
        >>> schedule = RoundRobin()
        >>> for worker in (0, 1):
        ...     schedule.join(worker)
        >>> schedule.arrive(1, "b0")
        >>> schedule.pop()
        >>> schedule.arrive(0, "a0")
        >>> schedule.pop(), schedule.pop()
        ('a0', 'b0')
    """

    def __init__(self) -> None:
        self._arrived: dict[int, deque[Item]] = {}
        self._left: set[int] = set()
        self._turn = 0

    def join(self, worker: int) -> None:
        """See :meth:`Schedule.join`."""
        self._left.discard(worker)
        self._arrived.setdefault(worker, deque())

    def leave(self, worker: int) -> None:
        """See :meth:`Schedule.leave`."""
        self._left.add(worker)

    def arrive(self, worker: int, item: Item) -> None:
        """See :meth:`Schedule.arrive`."""
        self._arrived.setdefault(worker, deque()).append(item)

    def pop(self) -> Item | None:
        """See :meth:`Schedule.pop`."""
        while self._arrived:
            # The next number that takes part, and after the last one the first again.
            worker = min((w for w in self._arrived if w >= self._turn), default=min(self._arrived))
            items = self._arrived[worker]
            if items:
                self._turn = worker + 1
                return items.popleft()
            if worker not in self._left:
                self._turn = worker
                return None
            del self._arrived[worker]
            self._turn = worker + 1
        return None

    def drain(self) -> list[Item]:
        """See :meth:`Schedule.drain`. In turn, as far as that is possible."""
        self._left.update(self._arrived)
        items = []
        while (item := self.pop()) is not None:
            items.append(item)
        return items
