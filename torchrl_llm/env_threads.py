"""Worker threads for environments that block: tools, sandboxes, HTTP.

A job is a function without arguments; its outcome is put on the rollout's event queue as an :class:`EnvEvent`.
With ``threads=0`` a job runs at once in the caller's thread, and its outcome is handled there and then, so that a slot
has its next request in the engine before the next slot is looked at.

The threads are daemons: an environment that never returns cannot keep the process from ending. They own nothing; a
slot is lent to one of them for the time of a job.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchrl_llm.policies.runner import IDLE_SECONDS

Job = Callable[[], Any]
Done = Callable[[Any, "BaseException | None"], None]


@dataclass
class EnvEvent:
    """The outcome of a job: ``done(value, error)`` is to be called by the thread that drives the rollout."""

    done: Done
    value: Any = None
    error: BaseException | None = None


class EnvThreads:
    """Runs environment jobs, on ``threads`` worker threads or in place.

    Args:
        threads: how many; 0 runs each job in the thread that submits it.
        post: where events go.
    """

    def __init__(self, threads: int, post: Callable[[EnvEvent], None]) -> None:
        self._post = post
        self._closing = False
        self._jobs: queue.SimpleQueue[tuple[Job, Done] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"torchrl_llm-env-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, done: Done) -> None:
        """Runs ``job``, now or on a worker thread, and posts its outcome."""
        if self._threads:
            self._jobs.put((job, done))
            return
        value = error = None
        try:
            value = job()
        except Exception as raised:
            error = raised
        done(value, error)

    def close(self, deadline: float) -> list[str]:
        """Ends the threads after the jobs that they are in; returns the names of those still busy at ``deadline``.

        Jobs that wait for a thread are given up.
        """
        self._closing = True
        for _ in self._threads:
            self._jobs.put(None)
        deadline = max(deadline, time.monotonic() + IDLE_SECONDS)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None and not self._closing:
            job, done = item
            event = EnvEvent(done)
            try:
                event.value = job()
            except BaseException as error:  # also SystemExit: this thread is the only one that can tell
                event.error = error
            self._post(event)
