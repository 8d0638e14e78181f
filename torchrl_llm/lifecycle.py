"""The life of a collection: read it, run it in a thread, pause it, end it.

A :class:`Collection` is ``open`` until it ends in exactly one way: *finished* (``total_steps`` reached or the data ran
out), *failed* (it raises its error at every later call) or *closed* (``shutdown``; later calls say so). However it
ends, what is in flight is recorded in the ledger, and threads and whatever was built here are released.

Threads: the rollout is driven by one thread at a time, the reader's in :meth:`Collection.read` or the collection's own
after :meth:`Collection.start`; a second reader is refused. Everything else may be called from any thread. The
collection's thread does not know the collector, so that a collector that nobody holds any more can be collected, which
ends the thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from tensordict import TensorDictBase

from torchrl_llm.batches import Turn
from torchrl_llm.busy import thread_name, warn_busy
from torchrl_llm.control import Control, Stopped
from torchrl_llm.errors import CollectorError
from torchrl_llm.handover import END, FULL_QUEUE_SECONDS, Handover
from torchrl_llm.ledger import Ledger
from torchrl_llm.rollout import Rollout
from torchrl_llm.sinks import Sink

logger = logging.getLogger("torchrl_llm")

# How long a shutdown without a timeout waits for threads that cannot be interrupted.
SHUTDOWN_SECONDS = 30.0
# How long threads get to end when the collection finishes or fails by itself.
RELEASE_SECONDS = 5.0
# How long past its deadline a shutdown waits for a driving thread that is closing down already.
CLOSING_SECONDS = 1.0


class Collection:
    """One run of a rollout from its first prompt to its end.

    Args:
        rollout: the rollout.
        control: its stop and pause.
        ledger: its books.
        finish_batch: called with the turns of each batch; what it returns is delivered, ``None`` means nothing.
        sink: where batches go; ``None`` gives them to the reader.
        changing: held while the version of the weights changes, if what is delivered may become too old by that.
    """

    def __init__(
        self,
        rollout: Rollout,
        control: Control,
        ledger: Ledger,
        finish_batch: Callable[[list[Turn]], TensorDictBase | None],
        sink: Sink | None,
        changing: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._rollout = rollout
        self._control = control
        self._ledger = ledger
        self._handover = Handover(rollout, control, ledger, finish_batch, changing)
        self._sink = sink
        self._changed = threading.Condition()
        self._guests: list[Control] = []
        self._driver: int | None = None
        self._thread: threading.Thread | None = None
        self._deadline = 0.0
        self._finished = False
        self._closing = False
        self._released = False
        self._gave_up = False
        self._lingers = False
        self._error: CollectorError | None = None
        self._traceback: TracebackType | None = None

    # Reading

    def read(self) -> Any:
        """The next batch, ``None`` if it went to the sink, or :data:`END`.

        Raises:
            CollectorError: what stopped the collection; or, if it is being read already or was shut down, that.
        """
        with self._changed:
            self._check_readable()
            if self._finished:
                return END
            self._control.check_may_drive()
            self._driver = threading.get_ident()
        try:
            return self._drive_once()
        finally:
            self._leave()

    def _check_readable(self) -> None:
        self.check_open()
        if self._driver is not None:
            started = self._thread is not None and self._thread.ident == self._driver
            raise CollectorError(
                "the collector runs in the background since start(): read its buffer or queue, or shut it down first"
                if started
                else "the collector is being read by another thread: one reader at a time"
            )

    def check_open(self) -> None:
        """Refuses what only makes sense while the collection goes on.

        Raises:
            CollectorError: what stopped the collection, or that it was shut down.
        """
        self._raise_error()
        if self._control.stopping:
            raise CollectorError("the collector was shut down")

    @property
    def finished(self) -> bool:
        """Whether the collection has come to its end by itself, without an error, and its policies are gone."""
        return self._finished and not self._lingers

    def _raise_error(self) -> None:
        if self._error is not None:
            # With the traceback that it came with: each raise would make it longer.
            raise self._error.with_traceback(self._traceback)

    def _keep_error(self, error: CollectorError) -> None:
        with self._changed:
            self._error, self._traceback = error, error.__traceback__

    def _drive_once(self) -> Any:
        try:
            with self._control.driving():
                batch = self._handover.next_batch(self._sink, lambda: self._deadline)
        except Stopped:
            self._close()
            raise CollectorError("the collector was shut down while it was being read") from None
        except CollectorError as error:
            self._end(error)
            raise
        except BaseException as error:
            failure = CollectorError(f"the collection was broken off by {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(failure)
            raise
        if batch is END:
            self._end(None)
        return batch

    # Running in the background

    def start(self, sink: Sink) -> None:
        """Runs the collection in a thread of its own that writes to ``sink``.

        Raises:
            CollectorError: if it runs already, or has ended.
        """
        with self._changed:
            self._check_readable()
            if self._finished:
                raise CollectorError("the collector has delivered all its steps: build a new one to go on")
            self._sink = sink
            self._thread = threading.Thread(target=self._run, name="torchrl_llm-collector", daemon=True)
            self._thread.start()
            self._driver = self._thread.ident

    def _run(self) -> None:
        try:
            while self._drive_once() is not END:
                pass
        except BaseException as error:
            # It is kept for whoever reads or joins; a shutdown is no error.
            if self._error is not None:
                logger.error("the collection stopped: %s: %s", type(error).__name__, error)
        finally:
            self._leave()

    def is_running(self) -> bool:
        """Whether the collection runs in the background."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout: float | None) -> bool:
        """Waits for the background run to end; ``False`` if ``timeout`` seconds were not enough.

        Raises:
            CollectorError: what stopped the run, or that it was never started.
        """
        if self._thread is None:
            raise CollectorError("join() waits for what start() began; start() was not called")
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._raise_error()
        return True

    @contextlib.contextmanager
    def guest(self, control: Control) -> Iterator[None]:
        """Held by a rollout that uses the collection's policies; it is stopped when they end.

        Raises:
            CollectorError: if they have ended: the collection finished, failed or was shut down.
        """
        with self._changed:
            self._raise_error()
            if self._released or self._control.stopping:
                raise CollectorError("the collector has ended, and its policies with it: evaluate before that")
            self._guests.append(control)
        try:
            yield
        finally:
            with self._changed:
                self._guests.remove(control)

    # Ending

    def shutdown(self, timeout: float | None) -> None:
        """Ends the collection; what was finished is still written to its sink, as far as that takes it.

        Raises:
            CollectorError: if what was finished could not be written.
        """
        with self._changed:
            if timeout is None and self._gave_up:
                return  # An earlier call has waited for the same in vain.
            self._deadline = time.monotonic() + (SHUTDOWN_SECONDS if timeout is None else timeout)
            self._control.stop()
            driver = self._driver
            if driver is None:
                if self._released:
                    return
                self._driver = threading.get_ident()
        if driver is None:
            failed_before = self._error is not None
            self._leave()
            if not failed_before:
                self._raise_error()
        elif driver != threading.get_ident():
            self._await_driver()

    def _leave(self) -> None:
        """Ends the calling thread's part as the driver; if a stop was asked for meanwhile, obeys it first."""
        with self._changed:
            stopped = self._control.stopping and not self._released
        try:
            if stopped:
                self._close()
        finally:
            with self._changed:
                # A stop that comes between the two looks finds a driver that never saw it.
                missed = not stopped and self._control.stopping and not self._released
                if not missed:
                    self._driver = None
                    self._changed.notify_all()
        if missed:
            self._leave()

    def _await_driver(self) -> None:
        with self._changed:
            while self._driver is not None:
                left = self._deadline - time.monotonic() + (CLOSING_SECONDS if self._closing else 0.0)
                if left <= 0:
                    self._gave_up = True
                    warn_busy([thread_name(self._driver)])
                    return
                self._changed.wait(left)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSING_SECONDS)

    def _close(self) -> None:
        """The work of a shutdown, done by the driver: writes what was finished, and lets go. Keeps what fails."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        room_until = min(self._deadline, time.monotonic() + FULL_QUEUE_SECONDS)
        try:
            if self._sink is not None:
                try:
                    self._handover.write_rest(self._sink, room_until, self._deadline)
                finally:
                    self._sink.end(self._control, room_until)
        except CollectorError as error:
            logger.error("shutdown: %s", error)
            self._keep_error(error)
        finally:
            self._release("shutdown", self._deadline)

    def linger(self) -> None:
        """When the data end nothing is let go until :meth:`shutdown`; if they had ended, there are more."""
        with self._changed:
            self._lingers = True
            self._finished = False

    def _end(self, error: CollectorError | None) -> None:
        """The end by itself, in the driving thread: finished or failed."""
        if error is None:
            self._finished = True
        else:
            self._keep_error(error)
        try:
            if error is None and self._lingers:
                return
            self._release("cut_off" if error is None else "aborted", time.monotonic() + RELEASE_SECONDS)
        finally:
            self._end_sink()

    def _end_sink(self) -> None:
        if self._sink is None:
            return
        try:
            self._sink.end(self._control, deadline=None)
        except CollectorError as error:
            if self._error is not None:
                logger.error("after the collection failed: %s", error)
                return
            self._keep_error(error)
            raise

    def _release(self, reason: str, deadline: float) -> None:
        """Ends threads and engines of ours, and books what was in flight."""
        with self._changed:
            if self._released:
                return
            self._released = True
            guests = list(self._guests)
        for control in guests:
            control.stop()
        try:
            busy = self._rollout.close(deadline)
        finally:
            self._ledger.record_rest(reason)
        if busy:
            warn_busy(busy)
