"""The workers' lives: they are started, asked, watched, restarted, added, removed and ended here.

Everything that a :class:`Fleet` holds is guarded by the lock of its :class:`~torchrl_llm.ray.roster.Roster`;
transitions take it, waiting does not. They are driven by whoever reads the collector
(:mod:`torchrl_llm.ray.rollout`), which hands in the events that Ray's threads post; a thread that adds or removes
workers takes the lock for its part.

Invariants: a worker has one process at a time; events of a process that is over are ignored; each process that is over
has its trajectories recorded in the books; after :meth:`Fleet.close` no actor and no placement group of ours is left.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray

from torchrl_llm.errors import CollectorError, WorkerError
from torchrl_llm.ray import calls
from torchrl_llm.ray.arguments import RayArguments
from torchrl_llm.ray.arrivals import Arrivals
from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.cluster import Placement, disconnect
from torchrl_llm.ray.departures import Departures
from torchrl_llm.ray.ending import finish_seconds, first_line, kill, loss_message
from torchrl_llm.ray.errors import WireError, from_wire
from torchrl_llm.ray.failure import FirstFailure
from torchrl_llm.ray.hooks import WorkerHooks
from torchrl_llm.ray.member import (
    COLLECTING,
    FAILED,
    FINISHED,
    LEAVING,
    LOST,
    REMOVED,
    STARTING,
    Arrival,
    Event,
    Member,
)
from torchrl_llm.ray.messages import Header
from torchrl_llm.ray.newcomers import Newcomers
from torchrl_llm.ray.patience import Patience
from torchrl_llm.ray.prompts import ClusterPrompts
from torchrl_llm.ray.roster import Roster
from torchrl_llm.ray.schedule import Schedule
from torchrl_llm.ray.watch import Watch
from torchrl_llm.ray.worker import Order

logger = logging.getLogger("torchrl_llm")

MakeOrder = Callable[[int, int], Order]


class Fleet:
    """All workers of a collector.

    Args:
        make_order: what a worker is to do, by its number and that of its process.
        arguments: how many there are and what they may use.
        placement: where they run.
        books: the cluster's books.
        schedule: takes what they send.
        hooks: what is called at the turns of their lives.
        events: the driver's queue; ``None`` in it wakes the driver.
        max_restarts: how often each worker may be restarted.
        worker_timeout: seconds without any progress after which a worker is taken for lost; ``None`` for no limit.
        prompts: the shared prompt source, if there is one.

    Attributes:
        first_life: processes that there were before, if the collection went on from a saved state.
    """

    def __init__(
        self,
        *,
        make_order: MakeOrder,
        arguments: RayArguments,
        placement: Placement,
        books: ClusterBooks,
        schedule: Schedule[Arrival],
        hooks: WorkerHooks,
        events: queue.SimpleQueue[Event | None],
        max_restarts: int,
        worker_timeout: float | None,
        prompts: ClusterPrompts | None = None,
    ) -> None:
        self.roster = Roster(books, Patience(books, worker_timeout, self._give_up))
        self.lock = self.roster.lock
        self._members = self.roster.members
        self._failure = FirstFailure()
        self._make_order = make_order
        self._arguments = arguments
        self._placement = placement
        self._books = books
        self._schedule = schedule
        self._hooks = hooks
        self._events = events
        self._max_restarts = max_restarts
        self._prompts = prompts
        self._arrivals = Arrivals(books, schedule, prompts)
        self._departures = Departures(self.roster, books, self._arrivals, self.handle, self._give_back)
        self._newcomers = Newcomers(self.roster, hooks.on_worker_ready, self._begin)
        self._watch = Watch(worker_timeout)
        self._restarts: Counter[int] = Counter()
        self._lives = self.first_life = 0
        self._numbers = itertools.count()
        self._building = True
        self._begun = False
        self._opened_by = 0
        self._closed = False

    @property
    def fatal(self) -> CollectorError | None:
        """What ended the collection."""
        return self._failure.error

    # Starting

    def start(self) -> None:
        """Starts the first workers and waits until their collectors are built.

        Raises:
            CollectorError: why one of them could not be built.
        """
        with self.lock:
            for _ in range(self._arguments.num_workers):
                self._launch(next(self._numbers))
        while self.fatal is None and any(not member.ready for member in self._members.values()):
            self.await_event()
        self._building = False
        if self.fatal is not None:
            raise self.fatal

    def _launch(self, worker: int) -> None:
        life, self._lives = self._lives, self._lives + 1
        self._books.begin(life, worker)
        self._schedule.join(worker)
        order = ray.put(self._make_order(worker, life))
        actor = self._placement.launch(order, worker, self._arguments.demand(worker))
        member = self._members[worker] = Member(worker, life, actor, self._events.put)
        member.ask_ready()

    def send_to(self, opened_by: int) -> bool:
        """Says who will open the workers' parcels; ``False`` if it is too late, since they have begun."""
        with self.lock:
            if not self._begun:
                self._opened_by = opened_by
            return self._opened_by == opened_by

    def state_dict(self) -> dict[str, Any]:
        """How many processes there were, which trajectory ids are made of."""
        with self.lock:
            return {"lives": self.first_life + self._lives}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state.

        Raises:
            CollectorError: if the workers have begun.
        """
        with self.lock:
            if self._begun:
                raise CollectorError("the collector has begun: load a state into a new one, before it is read")
            self.first_life = state["lives"]

    def begin(self) -> None:
        """Lets the workers collect; those that come later begin by themselves."""
        with self.lock:
            if self._begun:
                return
            self._begun = True
            for member in self._members.values():
                if member.ready and member.state == STARTING:
                    self._begin(member)

    def _begin(self, member: Member) -> None:
        if not self._begun:
            return
        self.roster.become(member, COLLECTING)
        member.ask_begin(self._opened_by, self.first_life)
        if self.roster.pauses:
            member.actor.pause.remote()
        member.ask_take()

    # Events

    def await_event(self) -> None:
        """Waits for an answer of a worker, or until it is time to look after them, and does what follows."""
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=self._watch.interval)
            if event is not None:
                self.handle(event)
        self.watch()

    def handle(self, event: Event) -> None:
        """Makes the transition that an answer of a worker asks for."""
        greet = False
        with self.lock:
            member = self.roster.by_life(event.life)
            if member is None or member.state in (LOST, REMOVED):
                return
            if event.error is not None:
                self._on_error(member, event)
            elif event.call in ("ready", "order"):
                greet = self._on_ready(member, event.value)
            elif event.call == "report":
                member.reporting = False
                self._on_report(member, event.value)
            else:
                self._on_take(member, event.value, event.payload)
        if greet:
            self._greet(member)

    def _on_error(self, member: Member, event: Event) -> None:
        if member.state == LEAVING:
            return  # whoever lets it leave counts what did not come
        assert event.error is not None
        if calls.is_loss(event.error):
            self._lose(member, event.error)
        else:
            self._failure.fail(CollectorError(f"{member.name} failed in {event.call}: {event.error}"), event.error)

    def _on_ready(self, member: Member, answer: Any) -> bool:
        """A collector is built, or has carried out a standing order; whether the worker is to be greeted now."""
        if isinstance(answer, WireError):
            error = from_wire(answer)
            if self._building:
                self._failure.fail_by(error, member)
            else:
                self._lose(member, error)
            return False
        return self._newcomers.lead_in(member)

    def _greet(self, member: Member) -> None:
        loss = self._newcomers.greet(member)
        if loss is None:
            self._newcomers.lead_in(member)
            return
        with self.lock:
            if member.state == STARTING:
                self._lose(member, loss)

    def _on_report(self, member: Member, header: Header) -> None:
        if self._books.report(member.life, header.number, header.report):
            member.progress = time.monotonic()

    def _on_take(self, member: Member, header: Header, payload: Any) -> None:
        member.taking = None
        self._on_report(member, header)
        if not header.end:
            self._arrivals.arrive(member, Arrival(member.life, header, ref=payload))
        elif member.state == COLLECTING:
            self._schedule.leave(member.worker)
            if header.error is None:
                self.roster.become(member, FINISHED)
            else:
                self.roster.become(member, FAILED)
                self._failure.fail_by(from_wire(header.error), member)

    # Losing workers

    def _lose(self, member: Member, error: BaseException | None, why: str = "was lost") -> None:
        """A process is gone, or taken for gone: counts what went with it, and starts another."""
        self.roster.become(member, LOST)
        kill(member)
        trajectories, turns = self._books.end(member.life, "worker_died")
        logger.warning(loss_message(member, why, error, trajectories, turns))
        self._give_back(member)
        if self._hooks.on_worker_lost is not None:
            self._hooks.on_worker_lost(member.worker)
        if self.fatal is not None or self._closed:
            return
        if self._restarts[member.worker] >= self._max_restarts:
            self._schedule.leave(member.worker)
            times = f"was restarted {self._restarts[member.worker]} times before (max_restarts={self._max_restarts})"
            self._failure.fail(WorkerError(f"{member.name} {why}, and {times}: {first_line(error)}"), error)
            return
        self._restarts[member.worker] += 1
        self._launch(member.worker)

    def _give_up(self, member: Member, why: str) -> None:
        """Takes a worker for lost that whoever waits for an answer finds hung."""
        with self.lock:
            if member.state in (STARTING, COLLECTING):
                self._lose(member, None, why)
            elif member.state == FINISHED:
                kill(member)  # it has nothing to do again; if more comes, that finds it dead
        self._events.put(None)  # the reader may have a new worker, or an error, to hear of

    def _give_back(self, member: Member) -> None:
        """What a process that is over held is handed out again, if there is anybody left to hand it to."""
        if not self._closed and self.fatal is None:
            self._arrivals.give_back(member)

    def revive(self) -> bool:
        """Lets the workers go on that found no prompts, when some have come back; ``False`` if there is nobody."""
        with self.lock:
            if self._closed or not self._arrivals.more_prompts():
                return False
            finished = self.roster.in_state(FINISHED)
            for member in finished:
                self._schedule.join(member.worker)
                self._begin(member)
            return bool(finished)

    def watch(self) -> None:
        """Asks for reports now and then, and takes for lost what has shown no sign of progress for too long."""
        with self.lock:
            self._watch.ask_for_reports(self._members.values())
            resting = self.roster.pauses > 0 or self.roster.asleep
            for member, why in self._watch.overdue(self._members.values(), resting):
                self._lose(member, None, why)

    # Reading

    def next_arrival(self) -> Arrival | None:
        """The batch that is next; its worker is asked for another."""
        with self.lock:
            arrival = self._schedule.pop()
            if arrival is not None:
                member = self.roster.by_life(arrival.life)
                if member is not None and member.state == COLLECTING and member.taking is None:
                    member.ask_take()
            return arrival

    @property
    def at_work(self) -> bool:
        """Whether anything may still come."""
        with self.lock:
            return bool(self.roster.in_state(STARTING, COLLECTING, LEAVING))

    # Elasticity

    def add(self, count: int) -> list[int]:
        """Starts more workers; they take part when they are built. Returns their numbers."""
        with self.lock:
            if self._closed or self.fatal is not None:
                raise CollectorError("workers cannot be added: the collection is over")
            workers = [next(self._numbers) for _ in range(count)]
            for worker in workers:
                self._launch(worker)
        return workers

    def remove(self, count: int) -> list[int]:
        """Ends the workers with the highest numbers; what they have finished is still delivered.

        Raises:
            ValueError: if none would be left.
        """
        with self.lock:
            present = self.roster.in_state(STARTING, COLLECTING, FINISHED)
            if count >= len(present):
                raise ValueError(f"n={count} is not allowed: there are {len(present)} workers, and one has to stay")
            leaving = present[-count:]
            for member in leaving:
                self.roster.become(member, LEAVING)
        self._departures.leave(leaving, finish_seconds(), "worker_removed")
        self._events.put(None)
        return [member.worker for member in leaving]

    # Ending

    def finish_all(self, deadline: float) -> None:
        """Ends all workers; what they have finished arrives, if they hand it over until then."""
        if not ray.is_initialized():
            return
        with self.lock:
            members = self.roster.in_state(STARTING, COLLECTING, FINISHED, FAILED)
            for member in members:
                self.roster.become(member, LEAVING)
        self._departures.leave(members, finish_seconds(deadline), reason=None)

    def close(self, deadline: float) -> None:
        """Ends everything that was started here."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            there = self.roster.in_state(STARTING, COLLECTING, FINISHED, FAILED)
            for member in there:
                member.state = LEAVING
        # Each of these is done, whatever interrupts or fails before: the last one first.
        with contextlib.ExitStack() as ends:
            ends.callback(disconnect)
            if ray.is_initialized():
                if self._prompts is not None:
                    ends.callback(self._prompts.close)
                ends.callback(self._placement.remove)
                ends.callback(self._departures.kill_rest)
                self._departures.leave(there, finish_seconds(deadline), reason=None)
