"""A thread that owns an engine: what the thread of a ``vllm.LLM`` and that of a remote engine have in common.

Others give it commands, which it carries out in their order, bring it to rest, and share it by counting who holds it.

Invariants: whatever touches the engine runs in its thread; each hold comes to rest or is given up; the thread ends when
its last holder has released it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from torchrl_llm.errors import CollectorError
from torchrl_llm.policies.engine_sleep import EngineSleep
from torchrl_llm.policies.hold import Hold, OwnerThread
from torchrl_llm.policies.rests import Rests

# Guards which thread owns which engine, and who holds it.
engines_lock = threading.Lock()


class EngineOwner:
    """The thread, its commands, its rests and its end; a subclass starts it when it is ready.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.rests = Rests()
        self.asleep = EngineSleep()
        self.changing = threading.RLock()  # see :mod:`torchrl_llm.changing`
        self.version = 0
        self.holders = 0
        self.closed = False
        self.dead: Exception | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._asked: list[Hold] = []
        self._thread = OwnerThread(target=self._work, name=name, daemon=True)

    def hold(self, mode: str) -> Hold:
        """Brings the thread to rest, for a weight switch; returns at once, see :class:`Hold`.

        Args:
            mode: what becomes of the requests in the engine: ``"continue"``, ``"wait"`` or ``"restart"``.

        Raises:
            CollectorError: if the engine sleeps, or waits for weights after it: its thread rests already.
            RuntimeError: from :meth:`Hold.wait`, if the engine is dead or given back.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("an engine's own thread cannot wait for itself: update weights from another thread")
        if self.asleep.hold is not None:
            raise CollectorError(
                "the policy's engine sleeps, or has no weights since it slept at level 2: any collector that shares it "
                "can call wake_up(), and then update_policy_weights_()"
            )
        hold = Hold(self._thread.name)
        with self._changed:
            if not (self._ended or self.closed):
                self._asked = [other for other in self._asked if not other.decided]
                self._asked.append(hold)
                self._commands.append(lambda: self._begin_hold(hold, mode))
                self._changed.notify()
                return hold
        hold.give_up(RuntimeError("the engine was given back"))
        return hold

    def release(self, deadline: float) -> list[str]:
        """Gives the engine back; the last holder ends the thread and waits for it until ``deadline``.

        Weight updates that wait for a thread that is still busy then wait no longer.
        """
        with engines_lock:
            self.holders -= 1
            if self.holders:
                return []
            self.closed = True
        self.asleep.close()
        with self._changed:
            self._changed.notify()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            return []
        with self._changed:
            for hold in self._asked:
                hold.give_up(RuntimeError("the engine was given back"))
        return [self._thread.name]

    def _command(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _take_commands(self) -> list[Callable[[], None]]:
        """The commands that wait; for a thread that holds the condition."""
        commands = list(self._commands)
        self._commands.clear()
        return commands

    def _begin_hold(self, hold: Hold, mode: str) -> None:
        """In the thread: comes to rest now, or when it can."""
        raise NotImplementedError

    def _work(self) -> None:
        """The thread: carries out commands, and works with the engine, until it is closed; then notes that it ended."""
        raise NotImplementedError
