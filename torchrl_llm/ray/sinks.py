"""Targets that are Ray actors: batches go to them from the workers' nodes, and not through the driver.

Used by the thread that drives the collection, which decides what is written and in which order, and waits for room:
only references pass through it. A batch that was lost with the node that it lay on is no fault of the target's: it is
told from one by Ray's error. Batches that the driver has read itself (cut at the end of ``total_steps``, or changed by
``postproc``) are sent by value.
"""

from __future__ import annotations

import queue
import time
from typing import Any, TypeAlias

import ray
from ray.exceptions import ObjectLostError, RayError
from ray.util.queue import Queue
from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_llm.control import Control
from torchrl_llm.errors import CollectorError
from torchrl_llm.ray.messages import Parcel
from torchrl_llm.ray.rollout import ArrivedBatch
from torchrl_llm.ray.transport import pack
from torchrl_llm.sinks import ANY_TIME, Delivery, QueueSink, Sink, make_sink

Shipment: TypeAlias = "TensorDictBase | ArrivedBatch"

# Who opens a parcel: whoever extends the buffer, or takes it from the queue.
OPENED_IN_BUFFER, OPENED_FROM_QUEUE = 1, 2


class RayQueueSink:
    """Puts batches into a ``ray.util.queue.Queue``, whose readers get what the loop would have yielded.

    Args:
        target: the queue.
    """

    opened_by = OPENED_FROM_QUEUE

    def __init__(self, target: Queue) -> None:
        self._queue = target
        self._ends = QueueSink(target)

    def write(self, batch: Shipment, control: Control, delivery: Delivery = ANY_TIME) -> bool:
        """See :meth:`~torchrl_llm.sinks.Sink.write`."""
        item = _item(batch, self.opened_by)
        while True:
            control.checkpoint()
            with delivery.lock:
                if not delivery.fresh():
                    return False
                if self._put(batch, item, delivery.poll):
                    return True

    def write_last(self, batch: Shipment, deadline: float) -> bool:
        """See :meth:`~torchrl_llm.sinks.Sink.write_last`."""
        return self._put(batch, _item(batch, self.opened_by), max(0.0, deadline - time.monotonic()))

    def end(self, control: Control, deadline: float | None) -> None:
        """See :meth:`~torchrl_llm.sinks.Sink.end`."""
        self._ends.end(control, deadline)

    def _put(self, batch: Shipment, item: Any, seconds: float) -> bool:
        try:
            # An argument of its own, so that the queue's actor gets what the reference stands for.
            ray.get(self._queue.actor.put.remote(item, seconds))
        except queue.Full:
            return False
        except (RayError, ValueError, TypeError) as error:
            _check_there(batch, error)
            raise CollectorError(f"the queue does not take the batch: {type(error).__name__}: {error}") from error
        return True


class RayBufferSink:
    """Extends a TorchRL ``RayReplayBuffer``.

    Args:
        buffer: the buffer.
    """

    opened_by = OPENED_IN_BUFFER

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def write(self, batch: Shipment, control: Control, delivery: Delivery = ANY_TIME) -> bool:
        """See :meth:`~torchrl_llm.sinks.Sink.write`."""
        with delivery.lock:
            if not delivery.fresh():
                return False
            self._extend(batch)
        return True

    def write_last(self, batch: Shipment, deadline: float) -> bool:
        """See :meth:`~torchrl_llm.sinks.Sink.write_last`."""
        self._extend(batch)
        return True

    def end(self, control: Control, deadline: float | None) -> None:
        """A buffer needs no end."""

    def _extend(self, batch: Shipment) -> None:
        try:
            ray.get(self._buffer._rb.extend.remote(_item(batch, self.opened_by)))
        except Exception as error:
            _check_there(batch, error)
            raise CollectorError(
                f"the replay buffer does not take the batch: {type(error).__name__}: {error}. Turns have text and "
                "tensors of unequal length: use storage=functools.partial(LazyStackStorage, size)"
            ) from error


def _check_there(batch: Shipment, error: Exception) -> None:
    """Raises :class:`~torchrl_llm.sinks.BatchLost` if that is what an error of the target's says.

    Whoever waits for the target has Ray's error, or that of the target's task with Ray's as its cause.
    """
    reasons = (error, getattr(error, "cause", None))
    if isinstance(batch, ArrivedBatch) and any(isinstance(reason, ObjectLostError) for reason in reasons):
        raise batch.lose() from error


def _item(batch: Shipment, opened_by: int) -> Any:
    if isinstance(batch, ArrivedBatch):
        return batch.ref
    if isinstance(batch, LazyStackedTensorDict):
        return Parcel(pack(batch.tensordicts), opened_by)
    return batch


def make_ray_sink(replay_buffer: Any, target_queue: Any) -> Sink | None:
    """The sink for the ``replay_buffer`` and ``queue`` arguments: one of these where it can be, else a local one."""
    if isinstance(target_queue, Queue) and replay_buffer is None:
        return RayQueueSink(target_queue)
    is_ray = type(replay_buffer).__name__ == "RayReplayBuffer" and replay_buffer.transport_kind == "ray"
    if is_ray and target_queue is None:
        return RayBufferSink(replay_buffer)
    return make_sink(replay_buffer, target_queue)
