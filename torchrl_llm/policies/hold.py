"""A rest of the thread that owns a policy's weights, asked for by another thread.

A weight switch is carried out by the thread that runs the policy (an engine's, or a batched runner's), between two
engine steps or two calls. Whoever updates asks each owner for a :class:`Hold`, waits until all of them rest, runs the
switch in each, and lets them go.

Invariants: the owner calls :meth:`Hold.rest` once, or :meth:`Hold.give_up` if it will not come to that, which may also
be called for an owner that is stuck; every wait ends with one of the two, and every rest with :meth:`Hold.release`.
Each task is run, or refused: none is left to an owner that has gone on. Any thread may call anything but ``rest``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class HoldEnded(RuntimeError):
    """A task came for an owner that rests no longer: whoever kept it at rest has let it go meanwhile."""


class OwnerThread(threading.Thread):
    """A thread that owns a policy's weights. It must never wait for one of its kind to rest: it could be itself."""


def refuse_owners() -> None:
    """Refuses what waits for owners to rest to a thread that is one: a policy's call cannot switch weights.

    Raises:
        RuntimeError: in such a thread.
    """
    if isinstance(threading.current_thread(), OwnerThread):
        raise RuntimeError(
            "a policy cannot update its own weights from its call, nor those of others, nor let engines sleep or wake: "
            "do it from another thread"
        )


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
        # Guards the three: what was asked before the end is before the end in the queue.
        self._lock = threading.Lock()
        self._released = False

    def wait(self) -> None:
        """Waits until the owner rests. Raises what the owner gave up with."""
        self._reached.result()

    @property
    def decided(self) -> bool:
        """Whether the owner has come to rest, or will not: nobody waits for that any more."""
        return self._reached.done()

    def run(self, task: Callable[[], T]) -> T:
        """Runs ``task`` in the resting thread; returns what it returns and raises what it raises.

        Raises:
            HoldEnded: if the owner was released or gave up; the task is not run.
        """
        done: Future[T] = Future()
        with self._lock:
            if self._released:
                raise HoldEnded(f"{self.owner} rests no longer")
            self._tasks.put((task, done))
        return done.result()

    def release(self) -> None:
        """Lets the owner go on when it has run what it was given; one that has not come to rest yet will not."""
        with self._lock:
            if not self._released:
                self._released = True
                self._tasks.put(None)

    def rest(self) -> None:
        """In the owner's thread: rests, and runs what it is given, until it is released; not at all if it gave up."""
        with self._lock:
            if self._reached.done():
                return
            self._reached.set_result(None)
        while (given := self._tasks.get()) is not None:
            task, done = given
            try:
                done.set_result(task())
            except BaseException as error:
                done.set_exception(error)

    def give_up(self, error: BaseException) -> None:
        """The owner will not come to rest; nothing happens if it rests already, or has."""
        with self._lock:
            if self._reached.done():
                return
            self._reached.set_exception(error)
            self._released = True
            while not self._tasks.empty():
                given = self._tasks.get()
                if given is not None:
                    given[1].set_exception(HoldEnded(f"{self.owner} did not come to rest: {error}"))
