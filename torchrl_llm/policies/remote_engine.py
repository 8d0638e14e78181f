"""One thread per remote engine: its calls, the versions of its weights, and its rests.

The engine is torchrl's ``AsyncVLLM`` or a Ray actor. Calls are Ray tasks, as many as there are requests; the thread
starts them and takes their results, which Ray hands over as events. All wrappers and collectors of this process that
use the same engine share its thread.

Invariants: each call is answered once, with its response or an error, unless it was given up first. A weight switch
happens while the engine makes no tokens for us, so that it is known which weights made each token; the one exception is
``"continue"`` with an actor that cannot be interrupted.

How it comes to rest: for ``"wait"`` all calls in flight are finished. For ``"continue"`` and ``"restart"`` the engine
is told to pause (``interrupt``), which answers its calls with what they have, and they are called again afterwards, for
the rest or anew. A call that reaches the engine after the pause makes no tokens; it is cancelled and made again.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

from torchrl_llm.policies.engine_owner import EngineOwner, engines_lock
from torchrl_llm.policies.hold import Hold
from torchrl_llm.policies.outputs import Completion
from torchrl_llm.policies.remote_access import Access, make_access
from torchrl_llm.policies.remote_calls import Call, Part, can_go_on
from torchrl_llm.policies.vllm_outputs import completion_of

_engines: dict[int, RemoteEngine] = {}


def acquire(model: Any) -> RemoteEngine:
    """The thread of a remote engine, started if nobody holds it yet; give it back with :meth:`RemoteEngine.release`.

    Args:
        model: a ``vLLMWrapper``'s model: an ``AsyncVLLM``, or something with a Ray actor's methods.
    """
    with engines_lock:
        engine = _engines.get(id(model))
        if engine is None or engine.dead is not None or engine.closed:
            engine = _engines[id(model)] = RemoteEngine(model)
        engine.holders += 1
        return engine


@dataclass(eq=False)
class Attempt:
    """One Ray task of a call.

    Args:
        call: what it is for.
        version: version of the weights when it was sent.
        ref: the task's result to come.
        interrupted: the mode of the weight update that interrupts it.
        given_up: whether nobody waits for it any more.
    """

    call: Call
    version: int
    ref: Any = None
    interrupted: str | None = None
    given_up: bool = False


class RemoteEngine(EngineOwner):
    """Drives a remote engine.

    Args:
        model: the engine; it is left running when the thread ends.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(f"torchrl_llm-remote-{id(model):x}")
        self.access: Access = make_access(model)
        self.name = self.access.name
        self._key = id(model)
        self._in_flight: dict[Call, Attempt] = {}
        self._kept_back: dict[Call, None] = {}
        self._holds: deque[tuple[Hold, str]] = deque()
        self._approaching = False
        self._paused = False
        self._thread.start()

    def add(self, call: Call) -> None:
        """Sends a call. Never blocks."""
        self._command(lambda: self._add(call))

    def abort(self, calls: list[Call]) -> None:
        """Gives calls up: the engine stops working on them if it can; their callbacks are not called any more."""
        self._command(lambda: self._abort(calls))

    def release(self, deadline: float) -> list[str]:
        """See :meth:`EngineOwner.release`. The engine is left as it is."""
        busy = super().release(deadline)
        if self.closed:
            with engines_lock:
                if _engines.get(self._key) is self:
                    del _engines[self._key]
            if not busy:
                del self.access  # Whoever still knows this thread must not keep the engine alive.
        return busy

    def switched(self, version: int) -> None:
        """Notes that the weights have just become those of ``version``; for the engine's thread only."""
        self.version = version

    def fail(self, error: Exception) -> None:
        """Gives the engine up: all that is in flight, and all that comes, gets ``error``; for its thread only."""
        if self.dead is not None:
            return
        self.dead = error
        calls = [*self._in_flight, *self._kept_back]
        for attempt in list(self._in_flight.values()):
            self._give_up(attempt)
        self._kept_back.clear()
        for call in calls:
            call.callback(None, error)
        while self._holds:
            self._holds.popleft()[0].give_up(error)

    # The thread

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._commands and (self._holds or not self.closed):
                    self._changed.wait()
                if not self._commands and not self._holds:
                    self._ended = True
                    break
                commands = self._take_commands()
            for command in commands:
                command()
            self._serve_holds()
        for attempt in list(self._in_flight.values()):
            self._give_up(attempt)

    # Calls

    def _add(self, call: Call) -> None:
        if self.dead is not None:
            call.callback(None, self.dead)
        elif self._holds:
            self._keep_back(call)
        else:
            self._send(call)

    def _keep_back(self, call: Call) -> None:
        """Sends a call at the end of this round, or of the weight switches that are waited for."""
        call.sent_with = None
        self._kept_back[call] = None

    def _send(self, call: Call) -> None:
        attempt = Attempt(call, self.version)
        try:
            attempt.ref = self.access.start(*call.request())
            result = attempt.ref.future()
        except Exception as error:
            call.callback(None, error)
            return
        call.sent_with = self.version
        if call.held is not None:
            call.held.entered()
        self._in_flight[call] = attempt
        # Ray's own thread calls back, also if the engine dies or Ray is shut down.
        result.add_done_callback(lambda done: self._command(lambda: self._returned(attempt, done)))

    def _returned(self, attempt: Attempt, done: Future[Any]) -> None:
        call, (completion, error) = attempt.call, _outcome(done)
        if attempt.given_up:
            if attempt.interrupted and completion is not None:  # It was made to the end all the same.
                call.on_discard(len(completion.token_ids))
            return
        if completion is not None:
            del self._in_flight[call]
            self._take(attempt, completion)
        elif attempt.interrupted and self.access.was_cancelled(error):
            del self._in_flight[call]
            self._keep_back(call)
        elif self.access.tells_of_death(error):
            self.fail(cast(Exception, error))
        else:
            del self._in_flight[call]
            call.callback(None, cast(Exception, error))

    def _take(self, attempt: Attempt, completion: Completion) -> None:
        call = attempt.call
        if attempt.interrupted is None or completion.finish_reason != "abort":
            call.parts.append(Part(completion, attempt.version, self.version))
            call.callback(call.answer(self.version), None)
            return
        if attempt.interrupted == "continue" and can_go_on(call.params):
            call.parts.append(Part(completion, attempt.version, self.version))
        else:
            call.begin_anew(len(completion.token_ids))
        self._keep_back(call)

    def _abort(self, calls: list[Call]) -> None:
        for call in calls:
            self._kept_back.pop(call, None)
            attempt = self._in_flight.get(call)
            if attempt is not None:
                attempt.interrupted = None
                self._give_up(attempt)

    def _give_up(self, attempt: Attempt) -> None:
        attempt.given_up = True
        self._in_flight.pop(attempt.call, None)
        self.access.cancel(attempt.ref)

    # Holds

    def _begin_hold(self, hold: Hold, mode: str) -> None:
        self._holds.append((hold, mode))

    def _serve_holds(self) -> None:
        """Goes as far towards the rests that were asked for as can be gone now."""
        while self._holds and self.dead is None:
            hold, mode = self._holds[0]
            try:
                if not self._approaching:
                    self._approaching = True
                    self._approach(mode)
                if self._in_flight and (mode == "wait" or self.access.interruptible):
                    return
                self._pause()
                self._holds.popleft()
                self._approaching = False
                with self.rests.resting():
                    hold.rest()
                if self._paused:
                    self._paused = False
                    self.access.resume()
            except Exception as error:
                self.fail(error)
        if self.dead is None and not self._holds:
            calls, self._kept_back = list(self._kept_back), {}
            for call in calls:
                self._send(call)

    def _approach(self, mode: str) -> None:
        """Begins what has to happen before a rest."""
        if mode == "wait" or not self._in_flight:
            return
        if self.access.interruptible:
            for attempt in self._in_flight.values():
                attempt.interrupted = mode
            self._pause()
            # What was answered before the pause has come in by now, or comes in a moment: it is looked at first.
            self._command(self._cancel_interrupted)
        elif mode == "restart":
            for call, attempt in list(self._in_flight.items()):
                attempt.interrupted = mode
                self._give_up(attempt)
                self._keep_back(call)

    def _pause(self) -> None:
        """Pauses an engine that can be, whatever the mode: it may still be ending calls that were given up."""
        if self.access.interruptible and not self._paused:
            self._paused = True
            self.access.interrupt()

    def _cancel_interrupted(self) -> None:
        """Takes back the calls that have reached the engine after its pause: it keeps them, and makes no tokens."""
        for attempt in self._in_flight.values():
            if attempt.interrupted:
                self.access.cancel(attempt.ref)


def _outcome(done: Future[Any]) -> tuple[Completion | None, BaseException | None]:
    """What a Ray task has made of the one prompt of a call, or why it could not."""
    error = done.exception()
    if error is not None:
        return None, error
    try:
        result = done.result()
        return completion_of(result[0] if isinstance(result, list) else result), None
    except Exception as failure:
        return None, failure
