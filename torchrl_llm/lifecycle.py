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

import logging
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from torchrl_llm.batches import Turn, ended_trajectories, stack_turns
from torchrl_llm.control import Control, Stopped
from torchrl_llm.errors import CollectorError
from torchrl_llm.ledger import Ledger
from torchrl_llm.rollout import Rollout
from torchrl_llm.sinks import Sink

logger = logging.getLogger("torchrl_llm")

# How long a shutdown without a timeout waits for threads that cannot be interrupted.
SHUTDOWN_SECONDS = 30.0
# How long threads get to end when the collection finishes or fails by itself.
RELEASE_SECONDS = 5.0
# How long a shutdown waits for room in a full queue: nobody may be reading any more.
FULL_QUEUE_SECONDS = 1.0

END = object()
Hook = Callable[[TensorDictBase | None], TensorDictBase | None]


class Collection:
    """One run of a rollout from its first prompt to its end.

    Args:
        rollout: the rollout.
        control: its stop and pause.
        ledger: its books.
        finish_batch: called with each stacked batch; what it returns is delivered, ``None`` means nothing.
    """

    def __init__(
        self,
        rollout: Rollout,
        control: Control,
        ledger: Ledger,
        finish_batch: Callable[[TensorDictBase], TensorDictBase | None],
    ) -> None:
        self._rollout = rollout
        self._control = control
        self._ledger = ledger
        self._finish_batch = finish_batch
        self._changed = threading.Condition()
        self._driver: int | None = None
        self._thread: threading.Thread | None = None
        self._deadline = 0.0
        self._finished = False
        self._closed = False
        self._released = False
        self.error: CollectorError | None = None

    # Reading

    def read(self, sink: Sink | None) -> Any:
        """The next batch, ``None`` if it went to ``sink``, or :data:`END`.

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
            return self._drive_once(sink)
        finally:
            with self._changed:
                self._driver = None
                self._changed.notify_all()

    def _check_readable(self) -> None:
        if self._driver is not None:
            started = self._thread is not None and self._thread.ident == self._driver
            raise CollectorError(
                "the collector runs in the background since start(): read its buffer or queue, or shut it down first"
                if started
                else "the collector is being read by another thread: one reader at a time"
            )
        if self.error is not None:
            raise self.error
        if self._closed or self._control.stopping:
            raise CollectorError("the collector was shut down")

    def _drive_once(self, sink: Sink | None) -> Any:
        try:
            with self._control.driving():
                batch = self._next(sink)
        except Stopped:
            self._close_driven(sink)
            raise CollectorError("the collector was shut down while it was being read") from None
        except CollectorError as error:
            self._end(sink, error)
            raise
        except BaseException as error:
            failure = CollectorError(f"the collection was broken off by {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(sink, failure)
            raise
        if batch is END:
            self._end(sink, None)
        return batch

    def _next(self, sink: Sink | None) -> Any:
        while True:
            turns = self._rollout.next_batch()
            if turns is None:
                return END
            batch = self._make_batch(turns)
            if batch is None:
                continue
            if sink is not None:
                try:
                    sink.write(batch, self._control)
                except Stopped:
                    self._last_chance(sink, turns, batch)
                    raise
                batch = None
            self._ledger.deliver(len(turns), ended_trajectories(turns))
            return batch

    def _make_batch(self, turns: list[Turn]) -> TensorDictBase | None:
        try:
            batch = self._finish_batch(stack_turns(turns))
        except Exception as error:
            self._ledger.drop(len(turns), ended_trajectories(turns), "postproc_failed")
            raise CollectorError(f"postproc failed: {type(error).__name__}: {error}") from error
        if batch is None:
            self._ledger.drop(len(turns), ended_trajectories(turns), "postproc_kept")
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
            self._thread = threading.Thread(target=self._run, args=(sink,), name="torchrl_llm-collector", daemon=True)
            self._thread.start()
            self._driver = self._thread.ident

    def _run(self, sink: Sink) -> None:
        try:
            while self._drive_once(sink) is not END:
                pass
        except CollectorError as error:
            if not self._closed:
                logger.error("the collection stopped: %s", error)
        except BaseException as error:
            # Kept in self.error, for whoever reads or joins.
            logger.error("the collection stopped: %s: %s", type(error).__name__, error)
        finally:
            with self._changed:
                self._driver = None
                self._changed.notify_all()

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
        if self.error is not None:
            raise self.error
        return True

    # Ending

    def shutdown(self, timeout: float | None) -> None:
        """Ends the collection; what was finished is still written to its sink, as far as that takes it."""
        with self._changed:
            self._deadline = time.monotonic() + (SHUTDOWN_SECONDS if timeout is None else timeout)
            self._control.stop()
            ended = self._released
            driver = self._driver
            if not ended and driver is None:
                self._closed = True
        if ended:
            return
        if driver is None:
            self._release("shutdown", self._deadline)
        elif driver != threading.get_ident():
            self._await_driver()

    def _await_driver(self) -> None:
        with self._changed:
            while self._driver is not None:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._closed = True
                    _warn_busy([f"thread {self._driver}"])
                    return
                self._changed.wait(left)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, self._deadline - time.monotonic()))

    def _close_driven(self, sink: Sink | None) -> None:
        """The driving thread's part of a shutdown."""
        self._closed = True
        room_until = min(self._deadline, time.monotonic() + FULL_QUEUE_SECONDS)
        while sink is not None and (turns := self._rollout.flush()):
            batch = self._make_batch(turns)
            if batch is not None and sink.write_last(batch, room_until):
                self._ledger.deliver(len(turns), ended_trajectories(turns))
            elif batch is not None:
                self._ledger.drop(len(turns), ended_trajectories(turns), "shutdown")
        if sink is not None:
            sink.end(self._control, room_until)
        self._release("shutdown", self._deadline)

    def _last_chance(self, sink: Sink, turns: list[Turn], batch: TensorDictBase) -> None:
        """Offers a batch that a full queue did not take once more, when the collection stops."""
        if sink.write_last(batch, min(self._deadline, time.monotonic() + FULL_QUEUE_SECONDS)):
            self._ledger.deliver(len(turns), ended_trajectories(turns))
        else:
            logger.warning("shutdown: the queue stayed full, %d finished turns were not delivered", len(turns))
            self._ledger.drop(len(turns), ended_trajectories(turns), "shutdown")

    def _end(self, sink: Sink | None, error: CollectorError | None) -> None:
        """The end by itself, in the driving thread: finished or failed."""
        with self._changed:
            self.error = error
            self._finished = error is None
        self._release("cut_off" if error is None else "aborted", time.monotonic() + RELEASE_SECONDS)
        if sink is not None:
            sink.end(self._control, deadline=None)

    def _release(self, reason: str, deadline: float) -> None:
        """Ends threads and engines of ours, and books what was in flight."""
        with self._changed:
            if self._released:
                return
            self._released = True
        busy = self._rollout.close(deadline)
        self._ledger.record_rest(reason)
        if busy:
            _warn_busy(busy)


def _warn_busy(threads: list[str]) -> None:
    warnings.warn(
        f"the collector ended while {', '.join(threads)} could not be interrupted: an environment's step or a policy's "
        "call has not returned. The thread is a daemon and ends with that call or with the process",
        RuntimeWarning,
        stacklevel=3,
    )
