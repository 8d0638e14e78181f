"""Stop and pause: what other threads may ask of the thread that drives the rollout.

Whoever drives the rollout enters with :meth:`Control.driving`, calls :meth:`Control.checkpoint` between any two events
and while it waits for room in a sink, and there obeys. Everything blocks on one condition, which the one who asks can
always end: a pause ends with its context, a stop is for good.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from torchrl_llm.errors import CollectorError


class Stopped(Exception):
    """The collection was told to stop; raised at a checkpoint in the driving thread."""


class Control:
    """The flags for stop and pause, and who is driving.

    Args:
        wake: makes the driving thread reach a checkpoint if it waits for events.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._stop = False
        self._pausers: list[int] = []
        self._driver: int | None = None
        self._resting = False

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stop

    def stop(self) -> None:
        """Asks the driving thread to stop, also out of a pause. Idempotent, and for good."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._wake()

    def check_may_drive(self) -> None:
        """Refuses a reader that would wait for itself.

        Raises:
            CollectorError: if the calling thread holds a pause.
        """
        with self._changed:
            if threading.get_ident() in self._pausers:
                raise CollectorError("the collector was read inside `with collector.pause()`; leave it first")

    @contextlib.contextmanager
    def driving(self) -> Iterator[None]:
        """Held by the thread that drives the rollout."""
        with self._changed:
            self._driver = threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                self._driver = None
                self._changed.notify_all()

    def checkpoint(self) -> None:
        """Waits while the collection is paused.

        Raises:
            Stopped: if it was told to stop.
        """
        if not (self._stop or self._pausers):
            return
        with self._changed:
            self._resting = True
            self._changed.notify_all()
            while self._pausers and not self._stop:
                self._changed.wait()
            self._resting = False
        if self._stop:
            raise Stopped

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Brings the driving thread to rest, from entry to exit; returns at once when nobody drives."""
        with self._changed:
            self._pausers.append(threading.get_ident())
        self._wake()
        with self._changed:
            # The driving thread itself may pause, in a hook or between two batches: it is at rest by that.
            while not self._stop and not self._resting and self._driver not in (None, threading.get_ident()):
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._pausers.remove(threading.get_ident())
                self._changed.notify_all()
