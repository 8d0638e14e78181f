"""Handing batches over: to the reader, or to the sink that takes them in his place.

A batch of the rollout is finished by the user's functions, looked at once more whether it is young enough, and then is
delivered, and in the books as that; or it is taken back, and what is still young in it comes again in a later batch.
So is what is left of a batch of which a part was lost with the machine that it lay on.

Invariant: the version of the weights does not change between the last look at a batch and the moment at which a sink
has it. Used by the thread that drives the collection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tensordict import TensorDictBase

from torchrl_llm.batches import Turn, ended_trajectories
from torchrl_llm.control import Control, Stopped
from torchrl_llm.errors import CollectorError
from torchrl_llm.ledger import Ledger
from torchrl_llm.rollout import Rollout
from torchrl_llm.sinks import ANY_TIME, BatchLost, Delivery, Sink

logger = logging.getLogger("torchrl_llm")

# How long a shutdown waits for room in a full queue: nobody may be reading any more.
FULL_QUEUE_SECONDS = 1.0
# How long a full queue may keep a weight update from ending, when what is delivered may become too old by that.
CHANGING_POLL_SECONDS = 0.01

END = object()


class Handover:
    """Makes batches and hands them over.

    Args:
        rollout: the rollout.
        control: its stop and pause.
        ledger: its books.
        finish_batch: called with the turns of each batch; what it returns is delivered, ``None`` means nothing.
        changing: held while the version of the weights changes, if what is delivered may become too old by that.
    """

    def __init__(
        self,
        rollout: Rollout,
        control: Control,
        ledger: Ledger,
        finish_batch: Callable[[list[Turn]], TensorDictBase | None],
        changing: AbstractContextManager[Any] | None,
    ) -> None:
        self._rollout = rollout
        self._control = control
        self._ledger = ledger
        self._finish_batch = finish_batch
        self._changing = changing

    def next_batch(self, sink: Sink | None, deadline: Callable[[], float]) -> Any:
        """The next batch, ``None`` if ``sink`` has taken it, or :data:`END`.

        Args:
            sink: where batches go; ``None`` gives them to the reader.
            deadline: until when a stop that comes meanwhile may wait for room in the sink.

        Raises:
            Stopped: if the collection was told to stop.
            CollectorError: what stopped the collection.
        """
        while True:
            turns = self._rollout.next_batch()
            if turns is None:
                return END
            batch = self._make_batch(turns)
            if batch is None:
                continue
            delivery = self._delivery(turns)
            if sink is not None:
                try:
                    if not sink.write(batch, self._control, delivery):
                        continue
                except Stopped:
                    self._last_chance(sink, turns, batch, deadline())
                    raise
                except BatchLost as loss:
                    loss.book(turns)
                    continue
                batch = None
            elif not delivery.fresh():
                continue
            self._deliver(turns)
            return batch

    def write_rest(self, sink: Sink, room_until: float, deadline: float) -> None:
        """Writes what was finished, of a collection that stops.

        Args:
            sink: where it goes.
            room_until: until when the sink may make room; what it does not take is recorded.
            deadline: until when the rollout may take to say what was finished.
        """
        while turns := self._rollout.flush(deadline):
            batch = self._make_batch(turns)
            if batch is not None:
                self._write_last(sink, turns, batch, room_until)

    def _delivery(self, turns: list[Turn]) -> Delivery:
        if self._changing is None:
            return ANY_TIME
        return Delivery(lambda: self._rollout.fresh(turns), self._changing, poll=CHANGING_POLL_SECONDS)

    def _make_batch(self, turns: list[Turn]) -> TensorDictBase | None:
        try:
            batch = self._finish_batch(turns)
        except BatchLost as loss:
            loss.book(turns)
            return None
        except Exception as error:
            self._ledger.drop(len(turns), ended_trajectories(turns), "postproc_failed")
            raise CollectorError(f"postproc failed: {type(error).__name__}: {error}") from error
        if batch is None:
            self._ledger.drop(len(turns), ended_trajectories(turns), "postproc_kept")
            self._rollout.delivered(turns)
        return batch

    def _deliver(self, turns: list[Turn]) -> None:
        self._ledger.deliver(len(turns), ended_trajectories(turns))
        self._rollout.delivered(turns)

    def _last_chance(self, sink: Sink, turns: list[Turn], batch: TensorDictBase, deadline: float) -> None:
        """Offers a batch that a full queue did not take once more, when the collection stops."""
        if not self._write_last(sink, turns, batch, min(deadline, time.monotonic() + FULL_QUEUE_SECONDS)):
            logger.warning("shutdown: the queue stayed full, %d finished turns were not delivered", len(turns))

    def _write_last(self, sink: Sink, turns: list[Turn], batch: TensorDictBase, room_until: float) -> bool:
        """Writes a batch, unless it was taken back or lost; ``False`` if there was no room, which is recorded."""
        delivery = self._delivery(turns)
        with delivery.lock:
            if not delivery.fresh():
                return True
            try:
                written = sink.write_last(batch, room_until)
            except BatchLost as loss:
                loss.book(turns)
                return True
        if written:
            self._deliver(turns)
        else:
            self._ledger.drop(len(turns), ended_trajectories(turns), "shutdown")
        return written
