"""One thread per vLLM engine: requests enter when they are ready and leave when they are finished.

Everything that touches a ``vllm.LLM`` goes through its :class:`EngineThread`, whether the engine runs in this process
or in its own, and however many wrappers and collectors share it: a ``vllm.LLM`` is not made for more than one thread.

Invariants: the engine is called by its engine thread only; each request is answered once by its callback, with a
finished ``RequestOutput`` or an exception, unless it was aborted first. Callbacks run in the engine thread.
The thread lives while somebody holds the engine by :func:`acquire`, and ends with :meth:`EngineThread.release`.

:meth:`EngineThread.hold` brings the thread to rest between two steps, so that weights can be switched. The versions of
weights are those of the engine, whoever pushed them, and each request is told by which version its tokens were made.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchrl_llm.policies.engine_owner import EngineOwner, engines_lock
from torchrl_llm.policies.hold import Hold
from torchrl_llm.policies.rests import Held
from torchrl_llm.policies.versions import TokenVersions

Callback = Callable[[Any, Exception | None], None]

# How often a wait for an engine in its own process looks whether that process is alive.
DEATH_POLL_SECONDS = 0.5

_engines: weakref.WeakKeyDictionary[Any, EngineThread] = weakref.WeakKeyDictionary()


def acquire(llm: Any) -> EngineThread:
    """The thread of ``llm``, started if nobody holds it yet; give it back with :meth:`EngineThread.release`."""
    with engines_lock:
        engine = _engines.get(llm)
        if engine is None or engine.dead is not None or engine.closed:
            # One that died does not touch the engine any more; one that was closed may be in its last step.
            ending = engine if engine is not None and engine.dead is None else None
            engine = _engines[llm] = EngineThread(llm, after=ending)
        engine.holders += 1
        return engine


@dataclass
class Request:
    """A request that is in the engine, or waits to enter it."""

    id: str
    prompt: Any
    params: Any
    callback: Callback
    versions: TokenVersions = field(default_factory=TokenVersions)
    on_restart: Callable[[int], None] | None = None
    cut: bool = False
    held: Held | None = None


class EngineThread(EngineOwner):
    """Drives ``llm.llm_engine``: ``add_request``, ``step``, ``abort_request``.

    Args:
        llm: a ``vllm.LLM``; it is left running when the thread ends.
        after: an engine thread that may still be ending; this one waits for it.
    """

    def __init__(self, llm: Any, after: EngineThread | None = None) -> None:
        super().__init__(f"torchrl_llm-engine-{id(llm):x}")
        self._engine = llm.llm_engine
        self._after: threading.Thread | None = None if after is None else after._thread
        self._ids = itertools.count()
        self._requests: dict[str, Request] = {}
        self._draining: deque[Hold] = deque()
        self._kept_back: dict[str, Request] = {}
        self.adapter: Any = None
        self._thread.start()

    def new_id(self) -> str:
        """An id for a request, unique in the engine."""
        return f"torchrl_llm-{id(self):x}-{next(self._ids)}"

    def add(self, request: Request) -> None:
        """Gives a request to the engine. Never blocks."""
        self._command(lambda: self._add(request))

    def abort(self, request_ids: list[str]) -> None:
        """Takes requests out of the engine; their callbacks are not called any more."""
        self._command(lambda: self._abort(request_ids))

    def cut(self, request_id: str) -> None:
        """Ends a request now: its callback gets the tokens made so far, with the finish reason ``"abort"``."""
        self._command(lambda: self._cut(request_id))

    def release(self, deadline: float) -> list[str]:
        """See :meth:`EngineOwner.release`. The engine is left as it is."""
        busy = super().release(deadline)
        if self.closed and not busy:
            del self._engine
        return busy

    def _work(self) -> None:
        if self._after is not None:
            self._after.join()
            self._after = None
        # torch sets a thread's number of OpenMP threads at the first use, and vLLM counts them before and after that.
        torch.get_num_threads()
        while True:
            with self._changed:
                while not (self._commands or self._requests or self._draining or self.closed):
                    self._changed.wait()
                if self.closed and not self._commands and not self._requests and not self._draining:
                    self._ended = True
                    return
                commands = self._take_commands()
            for command in commands:
                command()
            if self._requests:
                self._step()
            elif self._draining:
                self._end_drain()

    def _add(self, request: Request) -> None:
        if self.dead is not None:
            request.callback(None, self.dead)
        elif self._draining:
            self._kept_back[request.id] = request
        else:
            self._enter(request)

    def _enter(self, request: Request) -> None:
        try:
            # What an engine without adapters does not know is not passed.
            adapter = {} if self.adapter is None else {"lora_request": self.adapter}
            self._engine.add_request(request.id, request.prompt, request.params, **adapter)
        except Exception as error:
            if _tells_of_death(error):
                self._die(error)
            request.callback(None, error)
        else:
            self._requests[request.id] = request
            if request.held is not None:
                request.held.entered()
            if request.cut:
                self._cut(request.id)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._kept_back.pop(request_id, None)
        ours = [request_id for request_id in request_ids if self._requests.pop(request_id, None) is not None]
        if ours and self.dead is None:
            try:
                self._engine.abort_request(ours)
            except Exception as error:
                self._die(error)

    def _cut(self, request_id: str) -> None:
        if request_id in self._kept_back:
            self._kept_back[request_id].cut = True  # It enters for a moment, after the hold.
        request = self._requests.get(request_id)
        if request is None or self.dead is not None:
            return  # Its answer is on its way.
        output = _output_so_far(self._engine, request_id)
        self._abort([request_id])
        request.callback(output, None)

    # Holding

    def _begin_hold(self, hold: Hold, mode: str) -> None:
        """Requests stay in the engine, or it drains and keeps new ones back, or they are taken out and begin again."""
        if self.dead is not None:
            hold.give_up(self.dead)
        elif mode == "wait":
            self._draining.append(hold)
        else:
            restarting = self._take_out() if mode == "restart" else []
            self._rest(hold)
            for request in restarting:
                self._add(request)

    def _end_drain(self) -> None:
        """All that was in the engine is finished: rests, and then lets in what was kept back."""
        hold = self._draining.popleft()
        self._rest(hold)
        if not self._draining:
            kept_back, self._kept_back = list(self._kept_back.values()), {}
            for request in kept_back:
                self._add(request)

    def _rest(self, hold: Hold) -> None:
        try:
            self._stop_stepping()
        except Exception as error:
            self._die(error)
        if self.dead is not None:
            hold.give_up(self.dead)
            return
        with self.rests.resting():
            hold.rest()
        try:
            self._go_on_stepping()
        except Exception as error:
            self._die(error)

    def _stop_stepping(self) -> None:
        """Makes an engine in its own process pause, and takes what it has made until then."""
        outputs = self._outputs_queue()
        if outputs is not None:
            self._engine.engine_core.sleep(0, "keep")
            # Its answer to that came after all outputs that it had made.
            while outputs.queue:
                self._step()

    def _go_on_stepping(self) -> None:
        if self.dead is None and self._outputs_queue() is not None:
            self._engine.engine_core.wake_up(["scheduling"])

    def _take_out(self) -> list[Request]:
        """Aborts all requests of the engine, to be added again; tells each how many tokens that throws away."""
        made = self.tokens_made()
        requests = list(self._requests.values())
        self._abort([request.id for request in requests])
        for request in requests:
            request.versions.restarted()
            if request.on_restart is not None:
                request.on_restart(made.get(request.id, 0))
        return requests

    def tokens_made(self) -> dict[str, int]:
        """Sampled tokens so far of each request in the engine; for the engine's thread only."""
        states = self._engine.output_processor.request_states.values()
        return {s.external_req_id: s.detokenizer.num_output_tokens() for s in states if s.detokenizer is not None}

    def switched(self, version: int) -> None:
        """Notes that the weights have just become those of ``version``; for the engine's thread only."""
        if self._requests:
            made = self.tokens_made()
            for request in self._requests.values():
                request.versions.switched(made.get(request.id, 0), self.version)
        self.version = version

    def fail(self, error: Exception) -> None:
        """Gives the engine up: all that is in flight, and all that comes, gets ``error``; for its thread only."""
        self._die(error)

    # Stepping

    def _step(self) -> None:
        try:
            self._await_output()
            outputs = self._engine.step()
        except Exception as error:
            self._die(error)
            return
        for output in outputs:
            if output.finished:
                request = self._requests.pop(output.request_id, None)
                if request is not None:
                    request.callback(output, None)

    def _outputs_queue(self) -> queue.Queue[Any] | None:
        """Where the outputs of an engine in its own process arrive; ``None`` for an engine in this process."""
        outputs = getattr(getattr(self._engine, "engine_core", None), "outputs_queue", None)
        return outputs if isinstance(outputs, queue.Queue) else None

    def _await_output(self) -> None:
        """Waits for what ``step`` would wait for without end if the engine's process were killed meanwhile."""
        outputs = self._outputs_queue()
        if outputs is None:
            return
        with outputs.not_empty:
            while not outputs.queue:
                self._engine.engine_core.ensure_alive()
                outputs.not_empty.wait(DEATH_POLL_SECONDS)

    def _die(self, error: Exception) -> None:
        """An engine that raised in ``step`` cannot go on: all that is in flight, and all that comes, gets its error."""
        if self.dead is not None:
            return
        self.dead = error
        requests = [*self._requests.values(), *self._kept_back.values()]
        self._requests.clear()
        self._kept_back.clear()
        for request in requests:
            request.callback(None, error)
        self.asleep.close()
        while self._draining:
            self._draining.popleft().give_up(error)


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
