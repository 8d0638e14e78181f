"""What became of every trajectory and every turn: the collector's books.

The law of conservation, which holds at any moment and is checked by the tests after every scenario::

    launched == delivered + recorded + in_flight(trajectories)
    turns_finished == turns + turns_dropped + turns_pending(turns)

Owns the counters. Any thread may read them by :meth:`Ledger.snapshot`; they are written by the thread that drives
the rollout (see :mod:`torchrl_llm.lifecycle`). One lock makes each transition atomic for readers.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any


class Ledger:
    """Counts trajectories and turns from launch to their one end.

    Examples:
        >>> ledger = Ledger()
        >>> for trajectory in (0, 1):
        ...     ledger.launch(trajectory)
        >>> ledger.finish_turn(prompt_tokens=3, response_tokens=5)
        >>> ledger.deliver(turns=1, ended=[0])
        >>> ledger.record(1, "failed")
        >>> snapshot = ledger.snapshot()
        >>> snapshot["launched"], snapshot["delivered"], snapshot["recorded"], snapshot["in_flight"]
        (2, 1, 1, 0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[int] = set()
        self._launched = 0
        self._delivered = 0
        self._reasons: Counter[str] = Counter()
        self._turns_finished = 0
        self._turns_delivered = 0
        self._turns_dropped: Counter[str] = Counter()
        self._batches = 0
        self._prompt_tokens = 0
        self._response_tokens = 0
        self._errors: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()
        self._requests_in_flight = 0
        self._lag_holds = 0

    def launch(self, trajectory: int) -> None:
        """Counts a trajectory as launched and in flight."""
        with self._lock:
            self._launched += 1
            self._live.add(trajectory)

    def record(self, trajectory: int, reason: str, turns_dropped: int = 0) -> None:
        """Ends a trajectory that is not delivered whole, with the reason and the finished turns lost with it."""
        with self._lock:
            self._live.remove(trajectory)
            self._reasons[reason] += 1
            self._turns_dropped[reason] += turns_dropped

    def record_rest(self, reason: str) -> None:
        """Ends whatever is in flight or waits for delivery: the collection is over, for ``reason``."""
        with self._lock:
            self._reasons[reason] += len(self._live)
            self._live.clear()
            pending = self._turns_finished - self._turns_delivered - self._turns_dropped.total()
            self._turns_dropped[reason] += pending
            self._requests_in_flight = 0

    def finish_turn(self, prompt_tokens: int, response_tokens: int) -> None:
        """Counts a turn that an environment has stepped, with its tokens (0 where the policy gives none)."""
        with self._lock:
            self._turns_finished += 1
            self._prompt_tokens += prompt_tokens
            self._response_tokens += response_tokens

    def deliver(self, turns: int, ended: list[int]) -> None:
        """Counts a batch as handed to the reader: its turns, and the trajectories that end in it."""
        with self._lock:
            self._batches += 1
            self._turns_delivered += turns
            for trajectory in ended:
                # A step batch may hold the last finished turn of a trajectory that failed later.
                if trajectory in self._live:
                    self._live.remove(trajectory)
                    self._delivered += 1

    def drop(self, turns: int, ended: list[int], reason: str) -> None:
        """Counts a batch that was finished but is not handed over, for ``reason``."""
        with self._lock:
            self._turns_dropped[reason] += turns
            for trajectory in ended:
                if trajectory in self._live:
                    self._live.remove(trajectory)
                    self._reasons[reason] += 1

    def hold_for_lag(self) -> None:
        """Counts a slot that could have begun something, had it not been likely to come too late."""
        with self._lock:
            self._lag_holds += 1

    @property
    def in_flight(self) -> int:
        """Trajectories that are launched, and neither delivered nor recorded."""
        with self._lock:
            return len(self._live)

    @property
    def turns_pending(self) -> int:
        """Turns that are finished, and neither delivered nor dropped."""
        with self._lock:
            return self._turns_finished - self._turns_delivered - self._turns_dropped.total()

    def error(self, kind: str) -> None:
        """Counts an error by its kind (``"env"``, ``"policy"``)."""
        with self._lock:
            self._errors[kind] += 1

    def restart(self, kind: str) -> None:
        """Counts an environment or a policy that was rebuilt after an error."""
        with self._lock:
            self._restarts[kind] += 1

    def request(self, change: int) -> None:
        """Counts a request on its way to a policy (+1) or back (-1)."""
        with self._lock:
            self._requests_in_flight += change

    @property
    def turns_delivered(self) -> int:
        """Turns handed to the reader so far."""
        with self._lock:
            return self._turns_delivered

    @property
    def turns_kept(self) -> int:
        """Turns finished so far and not dropped: delivered, or to be."""
        with self._lock:
            return self._turns_finished - self._turns_dropped.total()

    def snapshot(self) -> dict[str, Any]:
        """All counters at one moment, as plain Python values."""
        with self._lock:
            dropped = self._turns_dropped.total()
            return {
                "launched": self._launched,
                "delivered": self._delivered,
                "recorded": self._reasons.total(),
                "recorded_by_reason": {k: v for k, v in self._reasons.items() if v},
                "in_flight": len(self._live),
                "trajectories": self._delivered,
                "turns": self._turns_delivered,
                "turns_finished": self._turns_finished,
                "turns_dropped": dropped,
                "turns_pending": self._turns_finished - self._turns_delivered - dropped,
                "batches": self._batches,
                "prompt_tokens": self._prompt_tokens,
                "response_tokens": self._response_tokens,
                "errors": self._errors.total(),
                "env_errors": self._errors["env"],
                "policy_errors": self._errors["policy"],
                "env_restarts": self._restarts["env"],
                "policy_restarts": self._restarts["policy"],
                "requests_in_flight": self._requests_in_flight,
                "stale_trajectories": self._reasons["stale"],
                "stale_turns": self._turns_dropped["stale"],
                "lag_holds": self._lag_holds,
            }
