"""The driver's side of the collection: what workers send becomes the reader's batches.

It stands where :class:`~torchrl_llm.rollout.Rollout` stands in the local collector: a
:class:`~torchrl_llm.lifecycle.Collection` drives it, in the reader's thread or in its own, so that a collection on Ray
is read, ends and fails in the same ways. Batches are cut and put together by the same batchers as the local ones;
mostly a worker's batch is handed on as it came. One that is handed on unread may be lost with its node later than it
arrived: its turns are booked as lost then, and their prompts handed out again.

All that this module holds belongs to the thread that drives it; the workers are the fleet's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from tensordict import TensorDictBase

from torchrl_llm.batches import Batcher, Trajectory
from torchrl_llm.budget import Budget
from torchrl_llm.control import Control
from torchrl_llm.lag import Lag
from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.fleet import Fleet
from torchrl_llm.ray.groups import Groups
from torchrl_llm.ray.member import Arrival
from torchrl_llm.ray.messages import Parcel, TurnHead
from torchrl_llm.sinks import BatchLost
from torchrl_llm.stale import Stale
from torchrl_llm.units import UnitBatcher


class ArrivedBatch:
    """A worker's batch at the driver; its turns are read when they are needed.

    Args:
        arrival: what came.
        book: see :class:`~torchrl_llm.sinks.BatchLost`.

    Attributes:
        lost: whether its turns are gone with the node that they lay on.
    """

    def __init__(self, arrival: Arrival, book: Callable[[Sequence[Any]], None]) -> None:
        self.lost = False
        self._book = book
        self.ref = arrival.ref
        self.size = len(arrival.header.heads)
        self._value = arrival.value
        self._rows: list[TensorDictBase] | None = None

    def rows(self) -> list[TensorDictBase]:
        """The turns.

        Raises:
            BatchLost: if they were lost with the node that they lay on.
        """
        if self._rows is None:
            try:
                value = ray.get(self.ref) if self.ref is not None else self._value
            except RayError as error:
                raise self.lose() from error
            batch = value.open() if isinstance(value, Parcel) else value
            self._rows = list(batch.unbind(0))
            self.ref = self._value = None
        return self._rows

    def lose(self) -> BatchLost:
        """Its turns are gone; returns what is to be raised."""
        self.lost = True
        return BatchLost(self._book)


class ArrivedTurn:
    """A turn that a worker sent; for batchers and books what :class:`~torchrl_llm.batches.Turn` is."""

    __slots__ = ("delivery", "done", "head", "place", "step", "trajectory", "version")

    def __init__(self, trajectory: Trajectory, head: TurnHead, delivery: ArrivedBatch, place: int) -> None:
        self.trajectory = trajectory
        self.head = head
        self.step = head.step
        self.done = head.done
        self.version = head.policy_version
        self.delivery = delivery
        self.place = place

    def stamped(self) -> TensorDictBase:
        """The turn's data; its ``"collector"`` entries came with it."""
        return self.delivery.rows()[self.place]


class RayRollout:
    """Collects the workers' turns into batches.

    Args:
        fleet: the workers.
        batcher: what a batch is.
        budget: how many turns in all.
        books: the cluster's books.
        control: stop and pause.
        groups: the shared prompt source, if there is one.
        lag: how far what is delivered may lie behind the weights; ``None`` for no limit.

    Attributes:
        stay_away: whether turns go from the workers to their target without a way through the driver.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        batcher: Batcher,
        budget: Budget,
        books: ClusterBooks,
        control: Control,
        groups: Groups | None = None,
        lag: Lag | None = None,
    ) -> None:
        self.stay_away = False
        self._fleet = fleet
        self._batcher = batcher
        self._budget = budget
        self._books = books
        self._control = control
        self._groups = groups
        self._stale = Stale(lag, [], batcher, books, self._abandon_nothing, self._lost)  # type: ignore[arg-type]
        self._finishing = False

    def send_to(self, sink: Any) -> None:
        """Prepares for where the batches go: a sink that opens parcels itself gets them unread."""
        opened_by = getattr(sink, "opened_by", 0)
        self.stay_away = self._fleet.send_to(opened_by) and opened_by > 0

    def next_batch(self) -> Sequence[Any] | None:
        """Runs until a batch is ready; ``None`` when there will be no more.

        What was finished before an error, or before the data ran out, is given first, as a short batch.

        Raises:
            CollectorError: what stopped the collection.
            Stopped: if another thread told the collection to stop.
        """
        self._fleet.roster.refresh()
        self._fleet.begin()
        while True:
            self._control.checkpoint()
            left = self._budget.left(self._books.turns_delivered)
            if left == 0:
                return None
            self._stale.drop()
            batch = self._batcher.pop(left)
            if batch is not None:
                return batch
            arrival = self._fleet.next_arrival()
            if arrival is not None:
                self._add(arrival)
            elif self._fleet.fatal is not None:
                if not self._finishing:
                    self._finish(math.inf)
                elif rest := self._batcher.flush():
                    return rest
                else:
                    raise self._fleet.fatal
            elif self._fleet.at_work:
                self._fleet.await_event()
                self._end_failed_groups(last=False)
            else:
                self._end_failed_groups(last=True)
                if not self._fleet.revive():
                    return self._batcher.flush() or None

    def _add(self, arrival: Arrival) -> None:
        delivery = ArrivedBatch(arrival, self._book_lost)
        heads = arrival.header.heads
        if not self.stay_away or (self._groups is not None and self._groups.spread):
            # A member of a group that is put together here is read at once: if it is lost the group waits for another.
            try:
                delivery.rows()
            except BatchLost:
                self._drop(heads)
                return
        for place, head in enumerate(heads):
            self._add_turn(head, delivery, place)
        if self._groups is not None:
            self._groups.settle(self._batcher, self._books)

    def _add_turn(self, head: TurnHead, delivery: ArrivedBatch, place: int) -> None:
        trajectory = Trajectory(
            head.traj_id, head.env_id, head.policy_id, unit=head.traj_id, group_id=head.group_id,
            group_index=head.group_index, version=head.began_with,
        )  # fmt: skip
        size = 1
        if self._groups is not None and self._groups.size is not None:
            trajectory.unit, size = head.group_id, self._groups.size
            if self._groups.has_failed(head.group_id):
                self._books.drop(1, [head.traj_id] if head.done else [], "group_failed")
                return
        if isinstance(self._batcher, UnitBatcher) and not self._batcher.is_open(trajectory.unit):
            self._batcher.open(trajectory.unit, size)
        turn: Any = ArrivedTurn(trajectory, head, delivery, place)
        self._batcher.add(turn)
        self._stale.finished(turn)

    def _end_failed_groups(self, last: bool) -> None:
        if self._groups is not None:
            self._groups.end_failed(self._batcher, self._books, last)

    @staticmethod
    def _abandon_nothing(*_: Any) -> None:
        """Trajectories under way are the workers', who drop what is too old themselves."""

    def _lost(self, trajectory: Trajectory, reason: str) -> None:
        if self._groups is not None:
            self._groups.come_back([(trajectory.group_id, trajectory.group_index)])

    def fresh(self, turns: list[Any]) -> bool:
        """Whether a batch may still be delivered; if not, it is taken back, and what is too old in it dropped."""
        return self._stale.fresh(turns)

    def _book_lost(self, turns: Sequence[ArrivedTurn]) -> None:
        """A batch is gone with the node that it lay on; of one that was put together what is left comes again."""
        gone = [turn for turn in turns if turn.delivery.lost]
        left: list[Any] = [turn for turn in turns if not turn.delivery.lost]
        self._batcher.put_back(left)
        self._drop([turn.head for turn in gone])

    def _drop(self, heads: Sequence[TurnHead]) -> None:
        """Turns are lost with a node; the prompts of the trajectories that end in them are handed out again."""
        ended = [head for head in heads if head.done]
        self._books.drop(len(heads), [head.traj_id for head in ended], "worker_died")
        if self._groups is not None:
            self._groups.come_back([head.member for head in ended])

    def delivered(self, turns: Sequence[ArrivedTurn]) -> None:
        """Turns have reached the reader, or whatever took them in his place."""
        if self._groups is not None:
            self._groups.delivered(turns)

    def _finish(self, deadline: float) -> None:
        """Lets all workers hand over what they have finished."""
        self._finishing = True
        self._fleet.finish_all(deadline)

    def flush(self, deadline: float) -> Sequence[Any]:
        """The finished turns that no batch was made of, when the collection stops; may be empty.

        Args:
            deadline: until when the workers may take to hand them over.
        """
        if not self._finishing:
            self._finish(deadline)
        while (arrival := self._fleet.next_arrival()) is not None:
            self._add(arrival)
        self._stale.drop()
        return self._batcher.flush()

    def close(self, deadline: float) -> list[str]:
        """Ends the workers; nothing of theirs is left busy."""
        self._fleet.close(deadline)
        return []


def whole_delivery(turns: Sequence[Any]) -> ArrivedBatch | None:
    """The worker's batch that these turns are, if they are one, as it came and unread."""
    delivery: ArrivedBatch = turns[0].delivery
    if delivery.ref is None or delivery.size != len(turns):
        return None
    return delivery if all(turn.delivery is delivery for turn in turns) else None
