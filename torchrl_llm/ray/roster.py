"""Who works here, and what is said to all of them: calls, standing orders, pause.

A *standing order* is a call that everybody has had and that newcomers get too, before they take part: the newest
weights, their version, the seed, sleep. Newcomers get them in the order in which they were given. Invariant: whoever
is ready has had all standing orders, or is being called with them by the thread that gives them.

The lock guards the members, here and in the :class:`~torchrl_llm.ray.fleet.Fleet`, which changes them. Any thread may
call; nobody waits for an answer while it holds the lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import ray

from torchrl_llm.ray import calls
from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.member import COLLECTING, Member
from torchrl_llm.ray.patience import Patience, collects

# Names of standing orders.
WEIGHTS, VERSION, SEED, SLEEP = "weights", "version", "seed", "sleep"
# Arguments of a call, by the number of the worker's process.
ArgumentsFor = Callable[[int], tuple[Any, ...]]


class Standing(NamedTuple):
    """A standing order.

    Attributes:
        number: of the order, over all names.
        method: what is called.
        arguments_for: the arguments.
    """

    number: int
    method: calls.Method
    arguments_for: ArgumentsFor


class Roster:
    """The workers by their number.

    Args:
        books: the cluster's books, which say what state each is in.
        patience: waits for what they answer.

    Attributes:
        members: those that are there, or were there last.
        lock: guards them.
        pauses: how many want them to rest.
        asleep: whether their engines sleep.
    """

    def __init__(self, books: ClusterBooks, patience: Patience) -> None:
        self._books = books
        self._patience = patience
        self.lock = threading.RLock()
        self.members: dict[int, Member] = {}
        self.pauses = 0
        self.asleep = False
        self._standing: dict[str, Standing] = {}
        self._orders = 0

    def by_life(self, life: int) -> Member | None:
        """The worker whose process has this number, if that is the last one."""
        with self.lock:
            return next((member for member in self.members.values() if member.life == life), None)

    def in_state(self, *states: str) -> list[Member]:
        """The workers that are in one of these states, in the order of their numbers."""
        with self.lock:
            return [member for _, member in sorted(self.members.items()) if member.state in states]

    def become(self, member: Member, state: str) -> None:
        """A worker's state changes."""
        member.state = state
        self._books.state(member.worker, state)

    def refresh(self) -> None:
        """Begins the time without progress anew: nobody was there to see any."""
        now = time.monotonic()
        with self.lock:
            for member in self.members.values():
                member.progress = max(member.progress, now)

    # Calls

    def lives(self) -> list[int]:
        """The processes whose collectors can be called."""
        with self.lock:
            return [member.life for _, member in sorted(self.members.items()) if member.answers]

    def call(
        self, method: calls.Method, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
    ) -> dict[int, Any]:
        """Calls a method of every worker's collector; see :meth:`RayCollector.call_workers`."""
        return self.call_each(method, lambda life: args, kwargs, timeout)

    def call_each(
        self,
        method: calls.Method,
        arguments_for: ArgumentsFor,
        kwargs: dict[str, Any] = {},  # noqa: B006
        timeout: float | None = None,
    ) -> dict[int, Any]:
        """Calls a method of every worker's collector, with arguments that depend on the number of its process."""
        return calls.gather(method, self._ask(self.lives(), method, arguments_for, kwargs), timeout, self.wait)

    def call_some(
        self, method: calls.Method, arguments: dict[int, tuple[Any, ...]], timeout: float | None = None
    ) -> calls.Answers:
        """Calls a method of some workers' collectors, with the arguments of each, by the number of its process."""
        return calls.collect(self._ask(arguments, method, arguments.__getitem__), timeout, self.wait)

    def wait(self, asked: Mapping[Member, Any], timeout: float | None) -> None:
        """Waits for what a call of any length gives; those whose batch the driver waits for go on meanwhile."""
        self._patience.wait(asked, timeout, lambda member: not self.at_rest and collects(member))

    @property
    def at_rest(self) -> bool:
        """Whether nobody is expected to collect."""
        return self.pauses > 0 or self.asleep

    def _ask(
        self,
        lives: Iterable[int],
        method: calls.Method,
        arguments_for: ArgumentsFor,
        kwargs: dict[str, Any] = {},  # noqa: B006
        send: Callable[..., Any] = calls.ask,
    ) -> dict[Member, Any]:
        with self.lock:
            members = [member for life in lives if (member := self.by_life(life)) is not None and member.answers]
            return {member: send(member, method, arguments_for(member.life), kwargs) for member in members}

    # Standing orders

    def order(
        self,
        name: str,
        method: calls.Method,
        arguments_for: ArgumentsFor,
        timeout: float | None = None,
        at_rest: bool | None = None,
    ) -> None:
        """Calls a method of every worker's collector, and of those that come later, before they take part.

        It replaces the order of that name, unless all workers refuse it. One whose process ends meanwhile is no
        failure: the process that follows gets the order.

        Args:
            name: of the standing order.
            method: what is called.
            arguments_for: its arguments, by the number of the worker's process.
            timeout: seconds to wait for all workers together.
            at_rest: whether nobody is expected to get on until the order is carried out; by default as it is now.

        Raises:
            WorkerError: naming the workers that have not carried it out; see :func:`~torchrl_llm.ray.calls.gather`.
        """
        asked = self._ask(self.lives(), method, arguments_for, send=calls.order)
        resting = self.at_rest if at_rest is None else at_rest

        def wait(asked: Mapping[Member, Any], timeout: float | None) -> None:
            # Between the turns, or quickly: also one whose batch waits for the driver is to carry it out.
            self._patience.wait(asked, timeout, lambda member: not resting and member.state == COLLECTING)

        answers = calls.collect(asked, timeout, wait)
        failures = {worker: error for worker, error in answers.failures.items() if not calls.is_loss(error)}
        refused = failures and not answers.results and not any(isinstance(e, TimeoutError) for e in failures.values())
        if not refused:
            with self.lock:
                self._orders += 1
                self._standing[name] = Standing(self._orders, method, arguments_for)
                # Those that have become ready meanwhile; all that come later see the order above.
                late = self._ask(set(self.lives()) - {m.life for m in asked}, method, arguments_for, send=calls.order)
            more = calls.collect(late, timeout, wait)
            answers.results.update(more.results)
            failures |= {worker: error for worker, error in more.failures.items() if not calls.is_loss(error)}
        if failures:
            raise calls.failure(method, calls.Answers(answers.results, failures))

    def next_order_for(self, member: Member) -> Standing | None:
        """What a newcomer is to be called with next; ``None`` if it may take part."""
        with self.lock:
            left = (order for order in self._standing.values() if order.number not in member.orders)
            return min(left, key=lambda order: order.number, default=None)

    # Pause

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Brings all workers to rest."""
        with self.lock:
            self.pauses += 1
            resting = self._tell_collecting("pause") if self.pauses == 1 else {}
        try:
            # Who is not at rest yet works on something.
            self._patience.wait(resting, None, lambda member: True)
            yield
        finally:
            with self.lock:
                self.pauses -= 1
                self.refresh()
                if self.pauses == 0 and ray.is_initialized():
                    self._tell_collecting("resume")

    def _tell_collecting(self, method: str) -> dict[Member, Any]:
        return {member: getattr(member.actor, method).remote() for member in self.in_state(COLLECTING)}
