"""Engines of all workers that sleep together, so that training has their GPUs.

Guarded by the update lock of :class:`~torchrl_llm.ray.weights.ClusterWeights`; any thread may ask whether they sleep.
Invariants: a worker that is built while the others sleep goes to sleep before it takes part, and wakes with them;
workers that show no progress are left alone only while the cluster sleeps, and not after a sleep that has failed.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torchrl_llm.errors import WorkerError
from torchrl_llm.ray.calls import refusal
from torchrl_llm.ray.roster import SLEEP, Roster
from torchrl_llm.sleep import SleepRules


class ClusterSleep(SleepRules):
    """Whether the engines sleep: those of all workers, or none.

    Args:
        roster: the workers.
    """

    def __init__(self, roster: Roster) -> None:
        self._level = 0
        self._without_weights = False
        self._roster = roster

    @property
    def level(self) -> int:
        """See :class:`SleepRules`."""
        return self._level

    @property
    def without_weights(self) -> bool:
        """See :class:`SleepRules`."""
        return self._without_weights

    def sleep_all(self, level: int) -> None:
        """Puts the engines of all workers to sleep.

        Raises:
            ValueError: for a level that vLLM does not have, or if no policy is a ``vllm.LLM``.
            CollectorError: if they sleep already.
            WorkerError: naming the workers whose engines could not; those of the others are awake again, at level 2
                without weights.
        """
        self._check_can_sleep(level)
        at_rest = self._roster.at_rest
        self._roster.asleep = True
        try:
            self._roster.order(SLEEP, fall_asleep, lambda life: (level,), at_rest=at_rest)
        except BaseException as error:
            try:
                with contextlib.suppress(WorkerError):
                    self._wake()
            finally:
                # Whoever sleeps all the same is not waited for: nothing says any more that he should.
                self._watch_again()
            if isinstance(error, WorkerError) and (reason := refusal(error)) is not None:
                raise reason from error
            # Those that slept are awake and wait for weights.
            self._without_weights = level == 2
            raise
        self._level = level

    def wake_up(self) -> None:
        """Wakes the engines of all workers; see :meth:`Sleep.wake_up`."""
        self._check_asleep()
        self._wake()
        self._watch_again()
        self._without_weights = self._level == 2
        self._level = 0

    def pushed(self) -> None:
        """All workers have new weights."""
        self._without_weights = False

    def _wake(self) -> None:
        self._roster.order(SLEEP, awaken, lambda life: ())

    def _watch_again(self) -> None:
        """Workers without progress are taken for lost from now on."""
        self._roster.refresh()
        self._roster.asleep = False


def fall_asleep(collector: Any, level: int) -> None:
    """In a worker: puts its engines to sleep."""
    collector.sleep(level)


def awaken(collector: Any) -> None:
    """In a worker: wakes its engines, if they sleep."""
    if collector._weights.asleep.level:
        collector.wake_up()
