"""Engines of all workers that sleep together, so that training has their GPUs.

Guarded by the update lock of :class:`~torchrl_llm.ray.weights.ClusterWeights`; any thread may ask whether they sleep.
Invariant: a worker that is built while the others sleep goes to sleep before it takes part, and wakes with them.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torchrl_llm.errors import WorkerError
from torchrl_llm.ray.calls import refusal
from torchrl_llm.ray.roster import SLEEP, Roster
from torchrl_llm.sleep import Sleep


class ClusterSleep(Sleep):
    """Whether the engines sleep: those of all workers, or none.

    Args:
        roster: the workers.
    """

    def __init__(self, roster: Roster) -> None:
        super().__init__()
        self._roster = roster

    def sleep_all(self, level: int) -> None:
        """Puts the engines of all workers to sleep.

        Raises:
            ValueError: for a level that vLLM does not have, or if no policy is a ``vllm.LLM``.
            CollectorError: if they sleep already.
            WorkerError: naming the workers whose engines could not; those of the others are awake again.
        """
        self._check_can_sleep(level)
        at_rest = self._roster.at_rest
        self._roster.asleep = True
        try:
            self._roster.order(SLEEP, fall_asleep, lambda life: (level,), at_rest=at_rest)
        except BaseException as error:
            with contextlib.suppress(WorkerError):
                self._wake()
            if isinstance(error, WorkerError) and (reason := refusal(error)) is not None:
                raise reason from error
            raise
        self._level = level

    def wake_up(self) -> None:
        """Wakes the engines of all workers; see :meth:`Sleep.wake_up`."""
        self._check_asleep()
        self._wake()
        self._awake_without_weights = self._level == 2
        self._level = 0

    def _wake(self) -> None:
        self._roster.order(SLEEP, awaken, lambda life: ())
        self._roster.refresh()
        self._roster.asleep = False


def fall_asleep(collector: Any, level: int) -> None:
    """In a worker: puts its engines to sleep."""
    collector.sleep(level)


def awaken(collector: Any) -> None:
    """In a worker: wakes its engines, if they sleep."""
    if collector._weights.asleep.level:
        collector.wake_up()
