"""Engines that sleep, so that training has their GPU: vLLM's sleep levels, for all engines of a collector.

While they sleep, the engines' threads rest: requests wait, and those that were in an engine go on when it is awake. At
level 2 the weights are gone; the threads rest on until new ones have been pushed, and a reader gets an error meanwhile.

Any thread may call; :class:`~torchrl_llm.weights.PolicyWeights` and this module share the process-wide update lock.
"""

from __future__ import annotations

from typing import Any

from torchrl_llm.errors import CollectorError
from torchrl_llm.policies.hold import Hold
from torchrl_llm.policies.weight_target import WeightTarget

LEVELS = (1, 2)


class Sleep:
    """Which engines sleep, and what they need before they can go on.

    Invariant: a hold that is kept here is released by :meth:`wake_up`, by :meth:`pushed`, or by :meth:`end`.
    """

    def __init__(self) -> None:
        self._level = 0
        self._awake_without_weights = False
        self._held: dict[int, tuple[WeightTarget, Hold]] = {}

    @property
    def level(self) -> int:
        """How deep they sleep; 0 if they are awake."""
        return self._level

    def check_ready(self) -> None:
        """Refuses a reader whose engines cannot answer.

        Raises:
            CollectorError: if they sleep, or have woken from level 2 and have no weights yet.
        """
        if self._level:
            raise CollectorError("the collector's engines sleep: call wake_up() before it is read")
        if self._awake_without_weights:
            raise CollectorError(
                "the engines have slept at level 2, which discards their weights: call update_policy_weights_() before "
                "the collector is read"
            )

    def check_can_update(self) -> None:
        """Refuses an update of engines that have no room for weights.

        Raises:
            CollectorError: if they sleep.
        """
        if self._level:
            raise CollectorError("the collector's engines sleep: call wake_up() before update_policy_weights_()")

    def check_has_weights(self) -> None:
        """Refuses an adapter for engines without base weights.

        Raises:
            CollectorError: if they have woken from level 2 and have no weights yet.
        """
        if self._awake_without_weights:
            raise CollectorError(
                "the engines have slept at level 2, which discards their weights, and a LoRA adapter is not all of "
                "them: call update_policy_weights_() with whole weights first, and then with the adapter"
            )

    def _check_can_sleep(self, level: Any) -> None:
        if level not in LEVELS:
            raise ValueError(f"level={level!r} is not allowed: pass 1 (weights to CPU memory) or 2 (weights discarded)")
        if self._level or self._awake_without_weights:
            raise CollectorError("the collector's engines sleep already, or have no weights yet")

    def _check_asleep(self) -> None:
        if not self._level:
            raise CollectorError("the collector's engines do not sleep")

    def sleep(self, targets: list[WeightTarget], level: int) -> None:
        """Puts engines to sleep.

        Raises:
            ValueError: for a level that vLLM does not have, or if no policy is a ``vllm.LLM``.
            CollectorError: if they sleep already.
        """
        self._check_can_sleep(level)
        engines = [target for target in targets if hasattr(target, "sleep")]
        if not engines:
            raise ValueError("no policy of the collector is a vllm.LLM that could sleep")
        holds = [(target, target.hold("restart" if level == 2 else "continue")) for target in engines]
        try:
            for target, hold in holds:
                hold.wait()
                hold.run(lambda target=target: target.sleep(level))  # type: ignore[misc]
        except BaseException:
            for _, hold in holds:
                hold.release()
            raise
        self._level = level
        self._held = {id(target.owner): (target, hold) for target, hold in holds}

    def wake_up(self) -> None:
        """Wakes the engines; after level 2 they rest on until weights are pushed.

        Raises:
            CollectorError: if they do not sleep.
        """
        self._check_asleep()
        for target, hold in self._held.values():
            hold.run(target.wake_up)  # type: ignore[attr-defined]
        self._awake_without_weights = self._level == 2
        self._level = 0
        if not self._awake_without_weights:
            self.end()

    def held(self, target: WeightTarget) -> Hold | None:
        """The hold of an engine that rests here."""
        found = self._held.get(id(target.owner))
        return None if found is None else found[1]

    def pushed(self) -> None:
        """All engines have new weights: those that waited for them go on."""
        if self._awake_without_weights:
            self._awake_without_weights = False
            self.end()

    def end(self) -> None:
        """Lets all engines' threads go."""
        self._level, self._awake_without_weights = 0, False
        held: list[Any] = list(self._held.values())
        self._held.clear()
        for _, hold in held:
            hold.release()
