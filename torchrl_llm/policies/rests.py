"""How long requests were held back: by the rests of the thread that runs their policy, or at its door.

While weights are switched or an engine sleeps, requests wait through no fault of theirs; that time does not count as
theirs (see :mod:`torchrl_llm.timeouts`).

Threads: :class:`Rests` and :class:`Held` are written by the policy's thread, and read by any.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Rests:
    """How long a policy's thread has rested in all.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        # Replaced as a whole, so that a reader in another thread sees both parts of one moment.
        self._state: tuple[float, float | None] = (0.0, None)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Held by the thread while it rests."""
        total, since = self._state[0], self.clock()
        self._state = (total, since)
        try:
            yield
        finally:
            self._state = (total + self.clock() - since, None)

    def seconds(self) -> float:
        """In all, with the rest that goes on."""
        total, since = self._state
        return total if since is None else total + self.clock() - since


class Held:
    """How long one request was held back.

    Args:
        rests: of the thread that it is given to.

    Examples:
        >>> now = [0.0]
        >>> held = Held(Rests(lambda: now[0]))
        >>> now[0] = 2.0
        >>> held.entered()
        >>> now[0] = 5.0
        >>> held.seconds()
        2.0
    """

    def __init__(self, rests: Rests) -> None:
        self._rests = rests
        self._asked = rests.clock()
        self._entry: tuple[float, float] | None = None

    def entered(self) -> None:
        """The policy has begun to work on it; what it does later, such as to begin anew, is its own time."""
        if self._entry is None:
            self._entry = (self._rests.clock() - self._asked, self._rests.seconds())

    def seconds(self) -> float:
        """At the door, and by the policy's rests since then."""
        if self._entry is None:
            return self._rests.clock() - self._asked
        at_the_door, rested_before = self._entry
        return at_the_door + self._rests.seconds() - rested_before
