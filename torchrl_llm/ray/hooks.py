"""What a cluster of workers is extended by: the user's own places beside weights and prompts.

Pure data; who calls what on which thread is said at each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Calls a method of one worker's collector: `(method, *args, timeout=None)`.
Call = Callable[..., Any]


@dataclass(frozen=True)
class WorkerHooks:
    """Called at the turns of a worker's life; none of them has to be given.

    Args:
        handle: travels to every worker, also to restarted and added ones, where it is called with the worker's number
            and the arguments that its collector is built from (a dict with ``env``, ``policy`` and the keyword
            arguments); it returns the arguments to use. It may hold the handle of a Ray actor, and is pickled.
        on_worker_ready: called on the driver with the worker's number and a function ``call(method, *args,
            timeout=None)`` that calls a method of its collector, when that is built and before it collects. On the
            thread that reads, so that no batch passes it by; for the first workers on the constructor's thread. If the
            worker dies in such a call, it is restarted.
        on_worker_lost: called on the driver with the number of a worker whose process was lost, before it is restarted,
            on the thread that reads or on one that waits for the worker.
    """

    handle: Callable[[int, dict[str, Any]], dict[str, Any]] | None = None
    on_worker_ready: Callable[[int, Call], None] | None = None
    on_worker_lost: Callable[[int], None] | None = None
