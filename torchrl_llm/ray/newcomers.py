"""From a collector that is built to a worker that takes part: the standing orders, the user's hook, the beginning.

Run by the reader, or by the constructor for the first workers. What changes is guarded by the fleet's lock; the hook
runs without it, since it may take its time and ask for anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torchrl_llm.errors import WorkerError
from torchrl_llm.ray import calls
from torchrl_llm.ray.hooks import Call
from torchrl_llm.ray.member import STARTING, Member
from torchrl_llm.ray.roster import Roster


class Newcomers:
    """Leads workers in.

    Args:
        roster: the workers.
        hook: called with each worker's number and a function that calls its collector, if there is one.
        begin: called with each worker that is ready.
    """

    def __init__(
        self, roster: Roster, hook: Callable[[int, Call], None] | None, begin: Callable[[Member], None]
    ) -> None:
        self._roster = roster
        self._hook = hook
        self._begin = begin

    def lead_in(self, member: Member) -> bool:
        """The next thing to do with a worker that has done what it was told; whether that is :meth:`greet`."""
        with self._roster.lock:
            if member.state != STARTING or member.ready:
                return False
            if (order := self._roster.next_order_for(member)) is not None:
                member.ask_order(order.number, order.method, order.arguments_for(member.life))
                return False
            if self._hook is not None and not member.greeted:
                member.greeted = True
                return True
            member.ready = True
            member.progress = time.monotonic()
            self._begin(member)
            return False

    def greet(self, member: Member) -> BaseException | None:
        """Calls the hook; returns the sign that the worker's process ended meanwhile, if it did."""
        assert self._hook is not None
        try:
            self._hook(member.worker, calls.caller(member, self._roster.wait))
        except WorkerError as error:
            failure = getattr(error, "failures", {}).get(member.worker)
            if failure is None or not calls.is_loss(failure):
                raise
            return failure
        return None
