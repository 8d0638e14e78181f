"""One worker as the driver sees it: its actor, what is asked of it, and since when it has shown no sign of progress.

Guarded by the fleet's lock. Answers come back as events, posted by a thread of Ray's; that of the open take can be had
from :attr:`Member.taking` too, as soon as it is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torchrl_llm.ray.messages import Header

# A worker's states. The books say them too.
STARTING, COLLECTING, FINISHED, LEAVING, REMOVED, LOST, FAILED = (
    "starting", "collecting", "finished", "leaving", "removed", "lost", "failed",
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """An answer of a worker's process: a value, or why there is none.

    Attributes:
        life: the process.
        call: ``"ready"``, ``"order"``, ``"begin"``, ``"take"`` or ``"report"``.
    """

    life: int
    call: str
    value: Any = None
    error: BaseException | None = None
    payload: Any = None


@dataclass(eq=False)
class Arrival:
    """A batch that has arrived: what it holds, and where its turns are.

    Attributes:
        life: the process that made it.
        header: what it holds.
        ref: reference to its :class:`~torchrl_llm.ray.messages.Parcel` in Ray's object store, or ``None``.
        value: the parcel or the batch itself, where there is no reference.
    """

    life: int
    header: Header
    ref: Any = None
    value: Any = None


@dataclass(eq=False)
class Member:
    """A worker's process.

    Attributes:
        worker: number of the worker.
        life: number of the process.
        actor: its handle.
        post: takes events.
        taking: gives the event that answers the open take; ``None`` when there is none, or its answer was handled.
        orders: numbers of the standing orders that it was called with before it took part.
    """

    worker: int
    life: int
    actor: Any
    post: Callable[[Event], None]
    state: str = STARTING
    ready: bool = False
    greeted: bool = False
    reporting: bool = False
    taking: Future[Event] | None = None
    orders: set[int] = field(default_factory=set)
    progress: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """For messages."""
        return f"worker {self.worker}"

    @property
    def answers(self) -> bool:
        """Whether its collector is there and can be called."""
        return self.ready and self.state in (STARTING, COLLECTING, FINISHED)

    def ask_ready(self) -> None:
        """Asks for a sign when the collector is built."""
        self._listen("ready", self.actor.ready.remote())

    def ask_begin(self, opened_by: int, first_life: int) -> None:
        """Lets it collect; an answer comes only if that fails."""
        self._listen("begin", self.actor.begin.remote(opened_by, first_life), failures_only=True)

    def ask_order(self, number: int, method: Any, args: tuple[Any, ...]) -> None:
        """Calls its collector with a standing order."""
        self.progress = time.monotonic()
        self.orders.add(number)
        self._listen("order", self.actor.call.options(concurrency_group="orders").remote(method, args, {}))

    def ask_take(self) -> None:
        """Asks for the next batch."""
        self.progress = time.monotonic()
        header, payload = self.actor.take.remote()
        self.taking = self._listen("take", header, payload)

    def ask_report(self) -> None:
        """Asks for the worker's books, unless that question is open."""
        if not self.reporting:
            self.reporting = True
            self._listen("report", self.actor.report.remote())

    def _listen(self, call: str, ref: Any, payload: Any = None, failures_only: bool = False) -> Future[Event]:
        # A function that does not hold the fleet: what is posted is all that it knows.
        life, post = self.life, self.post
        answer: Future[Event] = Future()

        def done(future: Future[Any]) -> None:
            error = future.exception()
            value = None if error is not None else future.result()
            event = Event(life, call, value, error, payload)
            answer.set_result(event)
            if error is not None or not failures_only:
                post(event)

        future: Future[Any] = ref.future()
        future.add_done_callback(done)
        return answer
