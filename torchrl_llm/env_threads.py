"""Worker threads for environments that block: tools, sandboxes, HTTP.

A job is a function without arguments; its outcome is put on the rollout's event queue as an :class:`EnvEvent`.
With ``threads=0`` a job runs at once in the caller's thread, and its outcome is handled there and then, so that a slot
has its next request in the engine before the next slot is looked at.

The threads are daemons: an environment that never returns cannot keep the process from ending. They own nothing; a
slot is lent to one of them for the time of a job, and an environment that never returns is left to it for good.
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


@dataclass(eq=False)
class Call:
    """A job on its way, to give it up by."""

    job: Job
    done: Done
    given_up: bool = False
    finished: bool = False
    thread: threading.Thread | None = None
    began: float = 0.0


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
        self._jobs: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0
        self._threads: list[threading.Thread] = []
        self._stuck: list[threading.Thread] = []
        for _ in range(threads):
            self._add_thread()

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"torchrl_llm-env-{self._count}", daemon=True)
        self._count += 1
        self._threads.append(thread)
        thread.start()

    def submit(self, job: Job, done: Done) -> Call | None:
        """Runs ``job``, now or on a worker thread, and posts its outcome.

        Returns:
            What :meth:`give_up` takes; ``None`` if the job has been run.
        """
        if self._threads:
            call = Call(job, done)
            self._jobs.put(call)
            return call
        value = error = None
        try:
            value = job()
        except Exception as raised:
            error = raised
        done(value, error)
        return None

    def seconds_in(self, call: Call) -> float | None:
        """For how long a thread has been in a job; ``None`` if it has not begun, or is over."""
        with self._lock:
            return None if call.thread is None or call.finished else time.monotonic() - call.began

    def give_up(self, call: Call) -> bool | None:
        """Forgets a job: its outcome is not posted. Another thread takes the place of one that is stuck in it.

        Returns:
            Whether the job has begun, so that a thread is in it; one that has not is never run. ``None`` if it is over
            and cannot be given up: its outcome is posted.
        """
        with self._lock:
            if call.finished:
                return None
            call.given_up = True
            stuck = call.thread
        if stuck is None:
            return False
        self._threads.remove(stuck)
        self._stuck.append(stuck)
        self._add_thread()
        return True

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
        # A thread that was given up is not waited for.
        return [thread.name for thread in (*self._threads, *self._stuck) if thread.is_alive()]

    def _work(self) -> None:
        while (call := self._jobs.get()) is not None and not self._closing:
            if not self._begin(call):
                continue
            event = EnvEvent(call.done)
            try:
                event.value = call.job()
            except BaseException as error:  # also SystemExit: this thread is the only one that can tell
                event.error = error
            if not self._finish(call):
                return  # Another thread has taken this one's place.
            self._post(event)

    def _begin(self, call: Call) -> bool:
        with self._lock:
            call.thread = threading.current_thread()
            call.began = time.monotonic()
            return not call.given_up

    def _finish(self, call: Call) -> bool:
        with self._lock:
            call.finished = not call.given_up
            return call.finished
