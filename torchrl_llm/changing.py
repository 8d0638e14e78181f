"""The lock under which the version of a collector's weights changes, and batches that must not age are handed over.

An engine's version is that of all collectors that share it, so an engine has a lock of its own, which they all take.

Invariant: a thread takes the collector's own lock first and then those of its engines, by their identity, so that two
collectors that share engines cannot wait for each other. Any thread may take it, again if it has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from torchrl_llm.policies.engine_owner import EngineOwner


class Changing(AbstractContextManager[None]):
    """The lock of one collector and of its engines.

    Args:
        engines: the threads of the collector's engines at this moment.

    Examples:
        >>> changing = Changing(lambda: [])
        >>> with changing, changing:
        ...     pass
    """

    def __init__(self, engines: Callable[[], list[EngineOwner]]) -> None:
        self._engines = engines
        self._own = threading.RLock()
        self._held: list[ExitStack] = []  # of the thread that has the collector's own lock

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._own)
            for engine in sorted(self._engines(), key=id):
                stack.enter_context(engine.changing)
            self._held.append(stack.pop_all())

    def __exit__(self, *exception: object) -> None:
        self._held.pop().close()
