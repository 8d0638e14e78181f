"""What became of every trajectory and turn in the whole cluster: the driver's books.

Workers keep the books of what they launch and fail, and send them along with each batch and about once a second; the
driver keeps those of what was handed to the reader. Together they obey the law of :mod:`torchrl_llm.ledger`: what a
worker launched and neither recorded nor was delivered here is in flight, wherever it is. A *life* is one process of a
worker, from a start to its end; when it ends, what is in flight there and has not arrived is recorded with the reason.

One lock makes each transition atomic; any thread may read :meth:`ClusterBooks.snapshot`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_llm.ledger import Ledger

# What the driver counts itself, and does not add up from the workers' books.
_DRIVERS = (
    "delivered", "trajectories", "recorded", "recorded_by_reason", "in_flight", "turns", "turns_dropped",
    "turns_pending", "batches",
)  # fmt: skip
# What is not added up over workers.
_HIGHEST = ("policy_version", "longest_wait_seconds", "most_overtaken")
# What a worker records when it is told to end: the driver knows why it was.
_TOLD = "shutdown"
# Number of what stands for the sums of a saved state: no worker, and no life of one.
_RESTORED = -1


@dataclass
class Life:
    """One process of a worker: its last report, and what of it has arrived."""

    worker: int
    number: int = -1
    report: Mapping[str, Any] = field(default_factory=lambda: Ledger().snapshot())
    turns: int = 0
    trajectories: int = 0
    over: bool = False

    @property
    def recorded(self) -> Counter[str]:
        """Trajectories that the worker itself recorded, by reason; of a saved state all that were recorded."""
        reasons = Counter(self.report["recorded_by_reason"])
        if self.worker != _RESTORED:
            del reasons[_TOLD]
        return reasons

    @property
    def away(self) -> int:
        """Trajectories that have neither arrived nor were recorded."""
        return int(self.report["launched"] - self.recorded.total() - self.trajectories)


class ClusterBooks:
    """Counts trajectories and turns of all workers from launch to their one end.

    Examples:
        >>> books = ClusterBooks()
        >>> books.begin(life=0, worker=0)
        >>> worker = Ledger()
        >>> for trajectory in (0, 1):
        ...     worker.launch(trajectory)
        >>> worker.finish_turn(1, 1)
        >>> _ = books.report(0, 0, worker.snapshot())
        >>> books.arrive(0, turns=1, ended=1)
        >>> books.deliver(1, [0])
        >>> books.end(0, "worker_died")
        (1, 0)
        >>> now = books.snapshot()
        >>> now["launched"], now["delivered"], now["recorded_by_reason"], now["in_flight"]
        (2, 1, {'worker_died': 1}, 0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lives: dict[int, Life] = {}
        self._restarts: Counter[int] = Counter()
        self._states: dict[int, str] = {}
        self._delivered = 0
        self._turns = 0
        self._batches = 0
        self._reasons: Counter[str] = Counter()
        self._turns_dropped = self._stale_turns = 0
        self._lost = 0
        self._groups: Counter[str] = Counter()
        self._closed = False

    # From the workers

    def begin(self, life: int, worker: int) -> None:
        """A worker's process begins."""
        with self._lock:
            self._restarts[worker] += worker in self._states
            self._lives[life] = Life(worker)
            self._states[worker] = "starting"

    def state(self, worker: int, state: str) -> None:
        """What a worker is doing: ``"starting"``, ``"collecting"``, ``"finished"``, ``"removed"``, ``"lost"``."""
        with self._lock:
            self._states[worker] = state

    def report(self, life: int, number: int, report: Mapping[str, Any]) -> bool:
        """Takes a worker's own books, unless newer ones are known; returns whether something has happened since."""
        with self._lock:
            entry = self._lives[life]
            if self._closed or entry.over or number <= entry.number:
                return False
            before = entry.report
            entry.number, entry.report = number, report
            return any(before[key] != report[key] for key in ("launched", "turns_finished", "recorded"))

    def arrive(self, life: int, turns: int, ended: int) -> None:
        """Counts turns that have come to the driver, and how many trajectories end in them."""
        with self._lock:
            entry = self._lives[life]
            entry.turns += turns
            entry.trajectories += ended

    def end(self, life: int, reason: str) -> tuple[int, int]:
        """Ends a process: what is in flight there will not come any more. Returns how many trajectories and turns."""
        with self._lock:
            return self._end(self._lives[life], reason)

    def _end(self, entry: Life, reason: str) -> tuple[int, int]:
        if entry.over:
            return 0, 0
        entry.over = True
        away = entry.away
        turns = entry.report["turns_finished"] - entry.report["turns_dropped"] - entry.turns
        self._reasons[reason] += away
        # Turns that the worker dropped itself, when it was told to end, are in its own count.
        self._turns_dropped += turns
        if reason == "worker_died":
            self._lost += turns
        return away, turns

    # From the reader's side; the interface of a Ledger

    def deliver(self, turns: int, ended: list[int]) -> None:
        """Counts a batch as handed to the reader: its turns, and the trajectories that end in it."""
        with self._lock:
            self._batches += 1
            self._turns += turns
            self._delivered += len(ended)

    def drop(self, turns: int, ended: list[int], reason: str) -> None:
        """Counts a batch that has arrived but is not handed over, for ``reason``."""
        with self._lock:
            self._turns_dropped += turns
            self._reasons[reason] += len(ended)
            if reason == "stale":
                self._stale_turns += turns
            if reason == "worker_died":
                self._lost += turns

    def group(self, kind: str, count: int = 1) -> None:
        """Counts groups that were put together on the driver, by what became of them; see :meth:`Ledger.group`."""
        with self._lock:
            self._groups[kind] += count

    def state_dict(self) -> dict[str, Any]:
        """The sums as plain data; what is in flight counts as ``"interrupted"``, since no other process has it."""
        with self._lock:
            books = self._sums()
        reasons = Counter(books["recorded_by_reason"]) + Counter(interrupted=books["in_flight"])
        books["recorded_by_reason"] = dict(reasons)
        books["recorded"] = reasons.total()
        books["turns_dropped"] += books["turns_pending"]
        books.update(in_flight=0, turns_pending=0, requests_in_flight=0)
        return books

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the sums of a state, which stand as one process that is over."""
        with self._lock:
            life = Life(_RESTORED, report=dict(state), turns=state["turns"], trajectories=state["delivered"], over=True)
            self._lives[_RESTORED] = life
            self._turns, self._delivered, self._batches = state["turns"], state["delivered"], state["batches"]
            self._lost = state["turns_lost_with_workers"]
            self._restarts[_RESTORED] = state["worker_restarts"]

    def record_rest(self, reason: str) -> None:
        """Ends whatever is in flight or waits for delivery: the collection is over, for ``reason``."""
        with self._lock:
            self._closed = True
            for entry in self._lives.values():
                self._end(entry, reason)
            books = self._sums()
            self._reasons[reason] += books["in_flight"]
            self._turns_dropped += books["turns_pending"]

    @property
    def turns_delivered(self) -> int:
        """Turns handed to the reader so far."""
        with self._lock:
            return self._turns

    @property
    def given_up(self) -> int:
        """Trajectories that workers themselves have recorded so far, as their reports say."""
        with self._lock:
            return sum(entry.report["recorded"] for entry in self._lives.values())

    def snapshot(self) -> dict[str, Any]:
        """All counters at one moment, as plain Python values; see :meth:`RayCollector.stats`."""
        with self._lock:
            books = self._sums()
            books["workers"] = {worker: self._of(worker) for worker in sorted(self._states)}
            return books

    def _sums(self) -> dict[str, Any]:
        books: dict[str, Any] = {}
        for entry in self._lives.values():
            _add(books, entry.report)
        for key, empty in Ledger().snapshot().items():
            books.setdefault(key, empty)
        reasons = Counter(self._reasons)
        for entry in self._lives.values():
            reasons.update(entry.recorded)
        dropped = self._turns_dropped + sum(entry.report["turns_dropped"] for entry in self._lives.values())
        recorded = reasons.total()
        if self._closed:
            books["requests_in_flight"] = 0
        else:
            gone = [entry.report["requests_in_flight"] for entry in self._lives.values() if entry.over]
            books["requests_in_flight"] -= sum(gone)
        for kind, count in self._groups.items():
            books[f"groups_{kind}"] += count
        books["stale_turns"] += self._stale_turns
        books.update(
            delivered=self._delivered,
            stale_trajectories=reasons["stale"],
            trajectories=self._delivered,
            recorded=recorded,
            recorded_by_reason={reason: n for reason, n in reasons.items() if n},
            in_flight=books["launched"] - self._delivered - recorded,
            turns=self._turns,
            turns_dropped=dropped,
            turns_pending=books["turns_finished"] - self._turns - dropped,
            batches=self._batches,
            worker_restarts=self._restarts.total(),
            turns_lost_with_workers=self._lost,
        )
        return books

    def _of(self, worker: int) -> dict[str, Any]:
        """The figures of one worker, over all its lives."""
        lives = [entry for entry in self._lives.values() if entry.worker == worker]
        sums: dict[str, Any] = {}
        for entry in lives:
            _add(sums, {key: value for key, value in entry.report.items() if key not in _DRIVERS})
        return {
            "state": self._states[worker],
            "restarts": self._restarts[worker],
            "turns": sum(entry.turns for entry in lives),
            "trajectories": sum(entry.trajectories for entry in lives),
            "in_flight": sum(entry.away for entry in lives if not entry.over),
            **sums,
        }


def _add(books: dict[str, Any], report: Mapping[str, Any]) -> None:
    """Adds numbers to numbers, and dicts of numbers to such dicts; of others the highest or the last is kept."""
    for key, value in report.items():
        if isinstance(value, Mapping):
            _add(books.setdefault(key, {}), value)
        elif key in _HIGHEST:
            books[key] = max(books.get(key, 0), value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            books[key] = books.get(key, 0) + value
        else:
            books[key] = value
