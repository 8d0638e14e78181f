"""Workers that leave in order: what they have finished still arrives, and their processes end.

Run by the thread that removes workers or ends the collection; it waits without the fleet's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from torchrl_llm.ray.arrivals import Arrivals
from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.ending import ask_to_finish, await_end, first_line, kill
from torchrl_llm.ray.member import REMOVED, Arrival, Member
from torchrl_llm.ray.roster import Roster

logger = logging.getLogger("torchrl_llm")


class Departures:
    """Lets workers leave.

    Args:
        roster: the workers.
        books: the cluster's books.
        arrivals: takes what they hand over.
        handle_waiting: handles the answers that have come and wait.
        give_back: has a worker's prompts handed out again.
    """

    def __init__(
        self,
        roster: Roster,
        books: ClusterBooks,
        arrivals: Arrivals,
        handle_waiting: Callable[[], None],
        give_back: Callable[[Member], None],
    ) -> None:
        self._roster = roster
        self._books = books
        self._arrivals = arrivals
        self._handle_waiting = handle_waiting
        self._give_back = give_back

    def leave(self, members: Sequence[Member], seconds: float, reason: str | None) -> None:
        """Lets workers hand over what they have finished, and ends their processes.

        Args:
            members: the workers, whose state says already that they leave.
            seconds: how long they get.
            reason: why what is in flight with them does not come; ``None`` if the whole collection ends.
        """
        answers = ask_to_finish(members, seconds)
        # What was taken before is in front of what is left.
        self._handle_waiting()
        with self._roster.lock:
            for member in members:
                if member.life in answers:
                    self._on_finished(member, answers[member.life])
                self._arrivals.leave(member)
                self._roster.become(member, REMOVED)
                if reason is not None:
                    self._books.end(member.life, reason)
                kill(member)
                if reason is not None:
                    self._give_back(member)
        await_end(members)

    def _on_finished(self, member: Member, answer: Any) -> None:
        try:
            parcels, last = ray.get(answer, timeout=0)
        except RayError as error:
            logger.warning("%s did not end in order: %s", member.name, first_line(error))
            self._books.end(member.life, "worker_died")
            return
        for header, parcel in parcels:
            self._books.report(member.life, header.number, header.report)
            self._arrivals.arrive(member, Arrival(member.life, header, value=parcel))
        self._books.report(member.life, last.number, last.report)
