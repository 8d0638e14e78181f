"""One thread per vLLM engine: requests enter when they are ready and leave when they are finished.

Everything that touches a ``vllm.LLM`` goes through its :class:`EngineThread`, whether the engine runs in this process
or in its own, and however many wrappers and collectors share it: a ``vllm.LLM`` is not made for more than one thread.

Invariants: the engine is called by its engine thread only; each request is answered once by its callback, with a
finished ``RequestOutput`` or an exception, unless it was aborted first. Callbacks run in the engine thread.
The thread lives while somebody holds the engine by :func:`acquire`, and ends with :meth:`EngineThread.release`.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

Callback = Callable[[Any, Exception | None], None]

# How often a wait for an engine in its own process looks whether that process is alive.
DEATH_POLL_SECONDS = 0.5

_engines: weakref.WeakKeyDictionary[Any, EngineThread] = weakref.WeakKeyDictionary()
_engines_lock = threading.Lock()


def acquire(llm: Any) -> EngineThread:
    """The thread of ``llm``, started if nobody holds it yet; give it back with :meth:`EngineThread.release`."""
    with _engines_lock:
        engine = _engines.get(llm)
        if engine is None or engine.dead is not None or engine.closed:
            # One that died does not touch the engine any more; one that was closed may be in its last step.
            ending = engine if engine is not None and engine.dead is None else None
            engine = _engines[llm] = EngineThread(llm, after=ending)
        engine.holders += 1
        return engine


class EngineThread:
    """Drives ``llm.llm_engine``: ``add_request``, ``step``, ``abort_request``.

    Args:
        llm: a ``vllm.LLM``; it is left running when the thread ends.
        after: an engine thread that may still be ending; this one waits for it.
    """

    def __init__(self, llm: Any, after: EngineThread | None = None) -> None:
        self._engine = llm.llm_engine
        self._after: threading.Thread | None = None if after is None else after._thread
        self._ids = itertools.count()
        self._callbacks: dict[str, Callback] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self.holders = 0
        self.closed = False
        self.dead: Exception | None = None
        self._thread: threading.Thread = threading.Thread(
            target=self._work, name=f"torchrl_llm-engine-{id(llm):x}", daemon=True
        )
        self._thread.start()

    def new_id(self) -> str:
        """An id for a request, unique in the engine."""
        return f"torchrl_llm-{id(self):x}-{next(self._ids)}"

    def add(self, request_id: str, prompt: Any, params: Any, callback: Callback) -> None:
        """Gives a request to the engine. Never blocks."""
        self._command(lambda: self._add(request_id, prompt, params, callback))

    def abort(self, request_ids: list[str]) -> None:
        """Takes requests out of the engine; their callbacks are not called any more."""
        self._command(lambda: self._abort(request_ids))

    def cut(self, request_id: str) -> None:
        """Ends a request now: its callback gets the tokens made so far, with the finish reason ``"abort"``."""
        self._command(lambda: self._cut(request_id))

    def release(self, deadline: float) -> list[str]:
        """Gives the engine back; the last holder ends the thread and waits for it until ``deadline``."""
        with _engines_lock:
            self.holders -= 1
            if self.holders:
                return []
            self.closed = True
        with self._changed:
            self._changed.notify()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            return [self._thread.name]
        del self._engine
        return []

    def _command(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _work(self) -> None:
        if self._after is not None:
            self._after.join()
            self._after = None
        while True:
            with self._changed:
                while not (self._commands or self._callbacks or self.closed):
                    self._changed.wait()
                if self.closed and not self._commands and not self._callbacks:
                    return
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                command()
            if self._callbacks:
                self._step()

    def _add(self, request_id: str, prompt: Any, params: Any, callback: Callback) -> None:
        if self.dead is not None:
            callback(None, self.dead)
            return
        try:
            self._engine.add_request(request_id, prompt, params)
        except Exception as error:
            if _tells_of_death(error):
                self._die(error)
            callback(None, error)
        else:
            self._callbacks[request_id] = callback

    def _abort(self, request_ids: list[str]) -> None:
        ours = [request_id for request_id in request_ids if self._callbacks.pop(request_id, None) is not None]
        if ours and self.dead is None:
            try:
                self._engine.abort_request(ours)
            except Exception as error:
                self._die(error)

    def _cut(self, request_id: str) -> None:
        callback = self._callbacks.get(request_id)
        if callback is None or self.dead is not None:
            return  # Its answer is on its way.
        output = _output_so_far(self._engine, request_id)
        self._abort([request_id])
        callback(output, None)

    def _step(self) -> None:
        try:
            self._await_output()
            outputs = self._engine.step()
        except Exception as error:
            self._die(error)
            return
        for output in outputs:
            if output.finished:
                callback = self._callbacks.pop(output.request_id, None)
                if callback is not None:
                    callback(output, None)

    def _await_output(self) -> None:
        """Waits for what ``step`` would wait for without end if the engine's process were killed meanwhile."""
        core: Any = getattr(self._engine, "engine_core", None)
        outputs = getattr(core, "outputs_queue", None)
        if not isinstance(outputs, queue.Queue):
            return  # an engine in this process
        with outputs.not_empty:
            while not outputs.queue:
                core.ensure_alive()
                outputs.not_empty.wait(DEATH_POLL_SECONDS)

    def _die(self, error: Exception) -> None:
        """An engine that raised in ``step`` cannot go on: all that is in flight, and all that comes, gets its error."""
        self.dead = error
        callbacks = list(self._callbacks.values())
        self._callbacks.clear()
        for callback in callbacks:
            callback(None, error)


def _output_so_far(engine: Any, request_id: str) -> Any:
    """A finished ``RequestOutput`` with the tokens that a request has; the engine itself gives none for an abort."""
    from vllm.v1.engine import FinishReason

    processor = engine.output_processor
    [internal_id] = processor.external_req_ids[request_id]
    state = processor.request_states[internal_id]
    return state.make_request_output(
        new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
    )


def _tells_of_death(error: Exception) -> bool:
    """Whether the engine refused a request because its process has ended, and not because of the request."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)
