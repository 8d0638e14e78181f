"""A rest of the thread that owns a policy's weights, asked for by another thread.

A weight switch is carried out by the thread that runs the policy (an engine's, or a batched runner's), between two
engine steps or two calls. Whoever updates asks each owner for a :class:`Hold`, waits until all of them rest, runs the
switch in each, and lets them go.

Invariants: the owner calls :meth:`Hold.rest` once, or :meth:`Hold.give_up` if it will not come to that; every wait ends
with one of the two, and every rest with :meth:`Hold.release`, which whoever asked must call however the update ends.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Hold:
    """One rest: from :meth:`rest` in the owner's thread to :meth:`release` in the other.

    Args:
        owner: name of the thread that will rest, for messages.

    Examples:
        >>> import threading
        >>> hold = Hold("engine")
        >>> owner = threading.Thread(target=hold.rest)
        >>> owner.start()
        >>> hold.wait()
        >>> hold.run(lambda: threading.current_thread() is owner)
        True
        >>> hold.release()
        >>> owner.join()
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._reached: Future[None] = Future()
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()

    def wait(self) -> None:
        """Waits until the owner rests. Raises what the owner gave up with."""
        self._reached.result()

    def run(self, task: Callable[[], T]) -> T:
        """Runs ``task`` in the resting thread; returns what it returns and raises what it raises."""
        done: Future[T] = Future()
        self._tasks.put((task, done))
        return done.result()

    def release(self) -> None:
        """Lets the owner go on; one that has not come to rest yet will not."""
        self._tasks.put(None)

    def rest(self) -> None:
        """In the owner's thread: rests, and runs what it is given, until it is released."""
        self._reached.set_result(None)
        while (given := self._tasks.get()) is not None:
            task, done = given
            try:
                done.set_result(task())
            except BaseException as error:
                done.set_exception(error)

    def give_up(self, error: BaseException) -> None:
        """In the owner's thread: it will not come to rest."""
        self._reached.set_exception(error)
