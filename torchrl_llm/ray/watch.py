"""Which workers have to be asked how they are, and which have shown no sign of progress for too long.

Guarded by the fleet's lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from torchrl_llm.ray.member import COLLECTING, STARTING, Member

# How often workers are asked for their books while the driver waits for them.
REPORT_SECONDS = 1.0
# How long a process may take until its collector is built: engines load their weights, a cluster makes room.
START_SECONDS = 1800.0


def interval_of(worker_timeout: float | None) -> float:
    """Seconds from one look at the workers to the next."""
    return REPORT_SECONDS if worker_timeout is None else min(REPORT_SECONDS, worker_timeout / 4)


def no_progress(idle: float, worker_timeout: float) -> str:
    """Why a worker is given up that should have got on."""
    return f"has made no progress for {idle:.1f} s (worker_timeout: {worker_timeout:g})"


class Watch:
    """Looks after workers while the driver waits for them.

    Args:
        worker_timeout: seconds without any progress; ``None`` for no limit.

    Attributes:
        interval: seconds from one look to the next.
    """

    def __init__(self, worker_timeout: float | None) -> None:
        self._worker_timeout = worker_timeout
        self._asked = time.monotonic()
        # Often enough for the books to know, when a worker is given up, what goes with it.
        self.interval = interval_of(worker_timeout)

    def ask_for_reports(self, members: Iterable[Member]) -> None:
        """Asks those that collect for their books, about once a second."""
        now = time.monotonic()
        if now - self._asked < self.interval:
            return
        self._asked = now
        for member in members:
            if member.state == COLLECTING:
                member.ask_report()

    def overdue(self, members: Iterable[Member], paused: bool) -> list[tuple[Member, str]]:
        """The workers to give up, and why. One whose batch waits for the driver is not expected to do anything."""
        now = time.monotonic()
        found = []
        for member in members:
            idle = now - member.progress
            collecting = member.state == COLLECTING and member.taking is not None and not paused
            if collecting and self._worker_timeout is not None and idle > self._worker_timeout:
                found.append((member, no_progress(idle, self._worker_timeout)))
            elif member.state == STARTING and not member.ready and idle > START_SECONDS:
                found.append((member, f"was not built within {idle:.1f} s"))
        return found
