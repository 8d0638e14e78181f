"""Workers that leave in order: what they have finished still arrives, and their processes end.

Run by the thread that removes workers or ends the collection; it waits without the fleet's lock. Events of those that
stay are left to the reader.

Invariant: whoever was to leave is gone when :meth:`Departures.leave` is over, however that came about.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import RayError

from torchrl_llm.ray.arrivals import Arrivals
from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.calls import is_loss
from torchrl_llm.ray.ending import Parting, ask_to_finish, await_end, first_line, kill
from torchrl_llm.ray.member import LEAVING, REMOVED, Arrival, Event, Member
from torchrl_llm.ray.roster import Roster

logger = logging.getLogger("torchrl_llm")


class Departures:
    """Lets workers leave.

    Args:
        roster: the workers.
        books: the cluster's books.
        arrivals: takes what they hand over.
        handle: handles an answer of a worker.
        give_back: has a worker's prompts handed out again.
    """

    def __init__(
        self,
        roster: Roster,
        books: ClusterBooks,
        arrivals: Arrivals,
        handle: Callable[[Event], None],
        give_back: Callable[[Member], None],
    ) -> None:
        self._roster = roster
        self._books = books
        self._arrivals = arrivals
        self._handle = handle
        self._give_back = give_back

    def leave(self, members: Sequence[Member], seconds: float, reason: str | None) -> None:
        """Lets workers hand over what they have finished, and ends their processes, also if it is interrupted.

        Args:
            members: the workers, whose state says already that they leave.
            seconds: how long they get.
            reason: why what is in flight with them does not come; ``None`` if the whole collection ends.
        """
        partings: dict[int, Parting] = {}
        try:
            partings = ask_to_finish(members, seconds)
        finally:
            with self._roster.lock:
                for member in members:
                    try:
                        self._receive(member, partings.get(member.life))
                    finally:
                        self._end(member, reason)
        await_end(members)

    def _receive(self, member: Member, parting: Parting | None) -> None:
        """What a worker has sent arrives: what was taken before is in front of what it hands over."""
        if member.taking is not None and member.taking.done():
            # Its event may be anywhere on its way to the reader, who ignores it when the worker is gone.
            self._handle(member.taking.result())
        if parting is None:
            return
        try:
            parcels, books = ray.get(parting.handed, timeout=0)
        except RayError as error:
            logger.warning("%s did not hand over what it had finished: %s", member.name, first_line(error))
            if is_loss(error):
                self._books.end(member.life, "worker_died")
            return
        for header, parcel in parcels:
            self._books.report(member.life, header.number, header.report)
            self._arrivals.arrive(member, Arrival(member.life, header, value=parcel))
        self._books.report(member.life, books.number, books.report)
        try:
            last = ray.get(parting.last, timeout=0)
        except RayError as error:
            logger.warning("%s did not end in order: %s", member.name, first_line(error))
        else:
            self._books.report(member.life, last.number, last.report)

    def _end(self, member: Member, reason: str | None) -> None:
        kill(member)
        self._arrivals.leave(member)
        self._roster.become(member, REMOVED)
        if reason is not None:
            self._books.end(member.life, reason)
            self._give_back(member)

    def kill_rest(self) -> None:
        """Ends those at once that are still leaving: the collection is over, whichever thread waits for them."""
        with self._roster.lock:
            for member in self._roster.in_state(LEAVING):
                kill(member)
                self._roster.become(member, REMOVED)
