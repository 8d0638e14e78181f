"""Waiting for answers of workers, without end only while they are well.

Run by whichever thread waits, without the fleet's lock. Such a thread cannot leave it to the reader to find workers
that hang: it may be the reader, or hold him at rest. So it asks for reports itself. A worker that is given up is
killed, so that its answer fails and the wait goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.member import COLLECTING, Member
from torchrl_llm.ray.messages import Header
from torchrl_llm.ray.watch import interval_of, no_progress

# Whether a worker that has not answered must get on with its turns meanwhile.
Expected = Callable[[Member], bool]


@dataclass
class Sign:
    """The report that a worker was asked for, and since when."""

    ref: Any
    asked: float


class Patience:
    """Waits for answers of workers.

    Args:
        books: the cluster's books.
        worker_timeout: seconds without an answer to a question for its books, or without any progress where that is
            expected, after which a worker is given up; ``None`` for no limit.
        give_up: takes a worker for lost, for a reason.
    """

    def __init__(
        self, books: ClusterBooks, worker_timeout: float | None, give_up: Callable[[Member, str], None]
    ) -> None:
        self._books = books
        self._worker_timeout = worker_timeout
        self._give_up = give_up

    def wait(self, asked: Mapping[Member, Any], timeout: float | None, expected: Expected) -> None:
        """Returns when all have answered, were given up, or after ``timeout`` seconds.

        Args:
            asked: references to the answers.
            timeout: seconds for all of them together; ``None`` for as long as it takes.
            expected: whether a worker must get on with its turns before it answers.
        """
        if not asked:
            return
        refs = list(asked.values())
        if self._worker_timeout is None:
            ray.wait(refs, num_returns=len(refs), timeout=timeout)
            return
        begun = time.monotonic()
        signs: dict[Member, Sign] = {}
        while True:
            pause = interval_of(self._worker_timeout)
            if timeout is not None:
                pause = min(pause, max(0.0, begun + timeout - time.monotonic()))
            _, silent = ray.wait(refs, num_returns=len(refs), timeout=pause)
            if not silent or (timeout is not None and time.monotonic() >= begun + timeout):
                return
            for member, ref in asked.items():
                if ref in silent:
                    self._look_after(member, signs, begun if expected(member) else None)

    def _look_after(self, member: Member, signs: dict[Member, Sign], since: float | None) -> None:
        assert self._worker_timeout is not None
        sign = signs.get(member)
        if sign is None or self._has_come(member, sign):
            sign = signs[member] = Sign(member.actor.report.remote(), time.monotonic())
        now = time.monotonic()
        if (silent := now - sign.asked) > self._worker_timeout:
            self._give_up(member, f"has not answered for {silent:.1f} s (worker_timeout: {self._worker_timeout:g})")
        elif since is not None and (idle := now - max(since, member.progress)) > self._worker_timeout:
            self._give_up(member, no_progress(idle, self._worker_timeout))

    def _has_come(self, member: Member, sign: Sign) -> bool:
        if not ray.wait([sign.ref], timeout=0)[0]:
            return False
        try:
            header: Header = ray.get(sign.ref)
        except RayError:
            return False  # its process is gone, and what it was asked for fails too
        if self._books.report(member.life, header.number, header.report):
            member.progress = time.monotonic()
        return True


def collects(member: Member) -> bool:
    """Whether the driver waits for a batch of a worker, which is expected to work on it."""
    return member.state == COLLECTING and member.taking is not None and not member.taking.done()
