"""Whether an engine sleeps: a state of the engine, whichever of the collectors that share it put it to sleep.

From the moment at which it falls asleep until it is awake and has weights its thread rests, on a hold that is kept
here: requests wait, and nobody else may ask the thread to rest.

Invariant: the hold is let go by :meth:`EngineSleep.awake`, :meth:`EngineSleep.pushed` or :meth:`EngineSleep.close`.

Threads: what changes the state is called under the process-wide update lock, but for :meth:`EngineSleep.close`, which
whoever gives the engine back last calls at any moment; any may read.
"""

from __future__ import annotations

import threading

from torchrl_llm.policies.hold import Hold


class EngineSleep:
    """The sleep of one engine.

    Attributes:
        level: how deep it sleeps; 0 if it is awake.
        without_weights: whether it has woken from level 2, and no weights were pushed since.

    Examples:
        >>> sleep = EngineSleep()
        >>> sleep.fell_asleep(2, Hold("engine"))
        True
        >>> sleep.level, sleep.hold is None
        (2, False)
        >>> sleep.awake()
        >>> sleep.level, sleep.without_weights, sleep.hold is None
        (0, True, False)
        >>> sleep.pushed()
        >>> sleep.without_weights, sleep.hold is None
        (False, True)
    """

    def __init__(self) -> None:
        self.level = 0
        self.without_weights = False
        self._hold: Hold | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def hold(self) -> Hold | None:
        """What keeps the engine's thread at rest; ``None`` if nothing does."""
        return self._hold

    def fell_asleep(self, level: int, hold: Hold) -> bool:
        """It sleeps, and its thread rests on; ``False`` if it was given back meanwhile: the caller ends the rest."""
        with self._lock:
            if self._closed:
                return False
            self.level, self._hold = level, hold
            return True

    def awake(self) -> None:
        """It is awake: its thread goes on, if it has weights."""
        self.level, self.without_weights = 0, self.level == 2
        if not self.without_weights:
            self._let_go()

    def pushed(self) -> None:
        """It has new weights: its thread goes on."""
        if self.without_weights:
            self.without_weights = False
            self._let_go()

    def close(self) -> None:
        """The engine was given back, or died: its thread goes on, whether it sleeps or not."""
        with self._lock:
            self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            hold, self._hold = self._hold, None
        if hold is not None:
            hold.release()
