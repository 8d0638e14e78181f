"""Where a collection writes its batches: a replay buffer, or a queue with back-pressure.

Used by the thread that drives the rollout. A full queue blocks it, until there is room or it is told to stop; nothing
is ever dropped to make room. A queue gets one ``None`` at the end, however the end came.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from tensordict import TensorDictBase

from torchrl_llm.control import Control
from torchrl_llm.errors import CollectorError

logger = logging.getLogger("torchrl_llm")

# How often a blocked put looks whether it was told to pause or stop.
PUT_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Delivery:
    """The moment at which a batch is handed over.

    Args:
        fresh: whether it may still be delivered; looked at right before it is.
        lock: held meanwhile, so that what ``fresh`` says stays true.
        poll: seconds for which a full queue may hold the lock.
    """

    fresh: Callable[[], bool] = lambda: True
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)
    poll: float = PUT_POLL_SECONDS


ANY_TIME = Delivery()


class BatchLost(Exception):
    """A batch is gone where it lay, before anybody had it.

    Args:
        book: called with the batch's turns: books those that are lost, and takes the others back.
    """

    def __init__(self, book: Callable[[Any], None]) -> None:
        super().__init__("a batch was lost before its delivery")
        self.book = book


class Sink(Protocol):
    """Takes batches until the end."""

    def write(self, batch: TensorDictBase, control: Control, delivery: Delivery = ANY_TIME) -> bool:
        """Hands a batch over; ``False`` if it may not be delivered any more.

        Raises:
            Stopped: if the collection was told to stop before there was room.
            BatchLost: if there is nothing left to hand over.
            CollectorError: if the target does not take the batch.
        """

    def write_last(self, batch: TensorDictBase, deadline: float) -> bool:
        """Hands over a batch of a collection that stops; ``False`` if there was no room until ``deadline``.

        Raises:
            BatchLost: if there is nothing left to hand over.
            CollectorError: if the target does not take the batch.
        """

    def end(self, control: Control, deadline: float | None) -> None:
        """Says that no batch will follow; waits for room until ``deadline``, or until a stop if it is ``None``.

        Raises:
            CollectorError: if the target does not take the end.
        """


class BufferSink:
    """Extends a TorchRL replay buffer.

    Args:
        buffer: anything with ``extend(batch)``.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def write(self, batch: TensorDictBase, control: Control, delivery: Delivery = ANY_TIME) -> bool:
        """See :meth:`Sink.write`."""
        with delivery.lock:
            if not delivery.fresh():
                return False
            self._extend(batch)
        return True

    def _extend(self, batch: TensorDictBase) -> None:
        try:
            self._buffer.extend(batch)
        except Exception as error:
            raise CollectorError(
                f"the replay buffer does not take the batch: {type(error).__name__}: {error}. Turns have text and "
                "tensors of unequal length: use a ReplayBuffer with storage=LazyStackStorage(size)"
            ) from error

    def write_last(self, batch: TensorDictBase, deadline: float) -> bool:
        """See :meth:`Sink.write_last`."""
        self._extend(batch)
        return True

    def end(self, control: Control, deadline: float | None) -> None:
        """A buffer needs no end."""


class QueueSink:
    """Puts batches into a queue.

    Args:
        target: anything with ``put(item, timeout=)`` that raises ``queue.Full``.
    """

    def __init__(self, target: Any) -> None:
        self._queue = target

    def write(self, batch: TensorDictBase, control: Control, delivery: Delivery = ANY_TIME) -> bool:
        """See :meth:`Sink.write`."""
        while True:
            control.checkpoint()
            with delivery.lock:
                if not delivery.fresh():
                    return False
                if self._put_until(batch, time.monotonic() + delivery.poll):
                    return True

    def write_last(self, batch: TensorDictBase, deadline: float) -> bool:
        """See :meth:`Sink.write_last`."""
        return self._put_until(batch, deadline)

    def end(self, control: Control, deadline: float | None) -> None:
        """See :meth:`Sink.end`. A ``queue.Queue`` takes the ``None`` even when it is full, so nobody waits for it."""
        if type(self._queue) is queue.Queue:
            _put_beyond_capacity(self._queue, None)
            return
        while deadline is None and not control.stopping:
            if self._put_until(None, time.monotonic() + PUT_POLL_SECONDS):
                return
        if not self._put_until(None, time.monotonic() if deadline is None else deadline):
            logger.warning("the queue is full and nobody reads it: the None that marks the end could not be put")

    def _put_until(self, item: Any, deadline: float) -> bool:
        try:
            self._queue.put(item, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return False
        except Exception as error:
            what = "None that marks the end" if item is None else "batch"
            raise CollectorError(f"the queue does not take the {what}: {type(error).__name__}: {error}") from error
        return True


def _put_beyond_capacity(target: queue.Queue[Any], item: Any) -> None:
    """``queue.Queue.put`` without its wait for room."""
    with target.mutex:
        target._put(item)
        target.unfinished_tasks += 1
        target.not_empty.notify()


def make_sink(replay_buffer: Any, target_queue: Any) -> Sink | None:
    """The sink for the collector's ``replay_buffer`` and ``queue`` arguments.

    Raises:
        ValueError: if both are given.
        TypeError: if one cannot be written to.
    """
    if replay_buffer is not None and target_queue is not None:
        raise ValueError("replay_buffer and queue were both passed; a collector writes to one of them")
    if replay_buffer is not None:
        if not callable(getattr(replay_buffer, "extend", None)):
            hint = "; pass it as queue=" if hasattr(replay_buffer, "put") else ""
            raise TypeError(f"replay_buffer={replay_buffer!r} has no extend() method{hint}")
        return BufferSink(replay_buffer)
    if target_queue is not None:
        if not callable(getattr(target_queue, "put", None)):
            hint = "; pass it as replay_buffer=" if hasattr(target_queue, "extend") else ""
            raise TypeError(f"queue={target_queue!r} has no put(item, timeout=) method{hint}")
        return QueueSink(target_queue)
    return None
