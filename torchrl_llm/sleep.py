"""Engines that sleep, so that training has their GPU: vLLM's sleep levels, for all engines of a collector.

While they sleep, the engines' threads rest: requests wait, and those that were in an engine go on when it is awake. At
level 2 the weights are gone; the threads rest on until new ones have been pushed, and a reader gets an error meanwhile.

Whether an engine sleeps is the engine's own (:mod:`torchrl_llm.policies.engine_sleep`), so that all collectors that
share it know; here is what a collector does with all of its engines.

Any thread may call; :class:`~torchrl_llm.weights.PolicyWeights` and this module share the process-wide update lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from torchrl_llm.errors import CollectorError
from torchrl_llm.policies.engine_owner import EngineOwner
from torchrl_llm.policies.hold import Hold, HoldEnded
from torchrl_llm.policies.weight_target import WeightTarget

logger = logging.getLogger("torchrl_llm")

LEVELS = (1, 2)


class SleepRules:
    """What may be asked of engines that may sleep. A subclass knows whether they do."""

    @property
    def level(self) -> int:
        """How deep they sleep; 0 if they are awake."""
        raise NotImplementedError

    @property
    def without_weights(self) -> bool:
        """Whether they have woken from level 2, and no weights were pushed since."""
        raise NotImplementedError

    def check_ready(self) -> None:
        """Refuses a reader whose engines cannot answer.

        Raises:
            CollectorError: if they sleep, or have woken from level 2 and have no weights yet.
        """
        if self.level:
            raise CollectorError("the collector's engines sleep: call wake_up() before it is read")
        if self.without_weights:
            raise CollectorError(
                "the engines have slept at level 2, which discards their weights: call update_policy_weights_() before "
                "the collector is read"
            )

    def check_can_update(self) -> None:
        """Refuses an update of engines that have no room for weights.

        Raises:
            CollectorError: if they sleep.
        """
        if self.level:
            raise CollectorError("the collector's engines sleep: call wake_up() before update_policy_weights_()")

    def check_has_weights(self) -> None:
        """Refuses an adapter for engines without base weights.

        Raises:
            CollectorError: if they have woken from level 2 and have no weights yet.
        """
        if self.without_weights:
            raise CollectorError(
                "the engines have slept at level 2, which discards their weights, and a LoRA adapter is not all of "
                "them: call update_policy_weights_() with whole weights first, and then with the adapter"
            )

    def _check_can_sleep(self, level: Any) -> None:
        if level not in LEVELS:
            raise ValueError(f"level={level!r} is not allowed: pass 1 (weights to CPU memory) or 2 (weights discarded)")
        if self.level or self.without_weights:
            raise CollectorError("the collector's engines sleep already, or have no weights yet")

    def _check_asleep(self) -> None:
        if not self.level:
            raise CollectorError("the collector's engines do not sleep")


class SleepTarget(Protocol):
    """An engine that can sleep; its calls are to be run in its owner's thread."""

    name: str
    owner: EngineOwner

    def hold(self, mode: str) -> Hold:
        """See :class:`WeightTarget`."""

    def sleep(self, level: int) -> None:
        """Puts the engine to sleep with the requests that are in it."""

    def wake_up(self) -> None:
        """Wakes it."""


class Sleep(SleepRules):
    """Which of a collector's engines sleep, whoever put them to sleep.

    Args:
        engines: the collector's engines at this moment, each once, without those that are gone.
    """

    def __init__(self, engines: Callable[[], list[SleepTarget]]) -> None:
        self._engines = engines

    @property
    def level(self) -> int:
        """How deep they sleep: the deepest of them; 0 if all are awake."""
        return max((target.owner.asleep.level for target in self._engines()), default=0)

    @property
    def without_weights(self) -> bool:
        """Whether one has woken from level 2, and no weights were pushed since."""
        return any(target.owner.asleep.without_weights for target in self._engines())

    def sleep(self, level: int) -> None:
        """Puts all engines to sleep.

        Raises:
            ValueError: for a level that vLLM does not have, or if no policy is a ``vllm.LLM``.
            CollectorError: if one sleeps already, or the collector is shut down meanwhile.

        Whatever stops it half way, those that slept already are awake again; at level 2 they have no weights.
        """
        self._check_can_sleep(level)
        engines = self._engines()
        if not engines:
            raise ValueError("no policy of the collector is a vllm.LLM that could sleep")
        holds: list[Hold] = []
        asleep: list[SleepTarget] = []
        try:
            for target in engines:
                holds.append(target.hold("restart" if level == 2 else "continue"))
            for hold in holds:
                hold.wait()
            for target, hold in zip(engines, holds, strict=True):
                _put_to_sleep(target, level, hold)
                asleep.append(target)
        except BaseException:
            for hold in holds[len(asleep) :]:
                hold.release()
            for target in asleep:
                try:
                    _wake(target)
                except Exception as failure:
                    logger.error("%s sleeps on, and did not wake: %s: %s", target.name, type(failure).__name__, failure)
            raise

    def wake_up(self) -> None:
        """Wakes the engines that sleep; after level 2 they rest on until weights are pushed.

        Raises:
            CollectorError: if none sleeps, or the collector is shut down meanwhile.
        """
        self._check_asleep()
        for target in self._engines():
            if target.owner.asleep.level:
                _wake(target)

    def held(self, target: WeightTarget) -> Hold | None:
        """The hold of an engine that is awake and rests until it has weights."""
        asleep = getattr(target.owner, "asleep", None)  # A module's runner has none.
        return asleep.hold if asleep is not None and asleep.without_weights else None

    def pushed(self) -> None:
        """All engines have new weights: those that waited for them go on."""
        for target in self._engines():
            target.owner.asleep.pushed()


def _put_to_sleep(target: SleepTarget, level: int, hold: Hold) -> None:
    hold.run(lambda: target.sleep(level))
    if not target.owner.asleep.fell_asleep(level, hold):
        hold.run(target.wake_up)
        raise CollectorError(f"the collector was shut down while {target.name} fell asleep: it is awake again")


def _wake(target: SleepTarget) -> None:
    state = target.owner.asleep
    hold = state.hold
    try:
        if hold is None:
            raise HoldEnded
        hold.run(target.wake_up)
    except HoldEnded:
        raise CollectorError(f"the collector was shut down before {target.name} was woken: it sleeps on") from None
    state.awake()
