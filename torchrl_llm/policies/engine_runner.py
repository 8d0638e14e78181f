"""What the runners of ``vLLMWrapper`` have in common, wherever its engine is: requests in flight in an engine's thread.

Threads: the rollout's thread submits, the engine's answers; the requests in flight are guarded by a lock, since a
runner may be closed in between. Invariant: each ticket is answered once, unless it was aborted or the runner closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from tensordict import TensorDictBase
from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm.policies.engine_owner import EngineOwner
from torchrl_llm.policies.observations import PromptMaker
from torchrl_llm.policies.prompts import Carry, Prompt
from torchrl_llm.policies.rests import Held
from torchrl_llm.policies.runner import Post, Response, Ticket


class InFlight(Protocol):
    """A request of a runner in its engine."""

    held: Held | None


R = TypeVar("R", bound=InFlight)


class EngineRunner(Generic[R]):
    """Keeps the requests of a ``vLLMWrapper`` that are in its engine.

    Args:
        policy: the wrapper.
        post: where responses go.
        engine: the thread of its engine, which this runner holds.
        prompts: makes its prompts.
    """

    def __init__(self, policy: vLLMWrapper, post: Post, engine: EngineOwner, prompts: PromptMaker) -> None:
        self.policy = policy
        self.broken = False
        self.tokens_discarded = 0
        self.track_token_versions = False
        self._post = post
        self._engine = engine
        self._prompts = prompts
        self._tokenizer = prompts.tokenizer
        self._in_flight: dict[Ticket, R] = {}
        self._lock = threading.Lock()

    def prepare(self, observation: TensorDictBase, carry: Carry | None) -> Prompt:
        """See :meth:`Runner.prepare`."""
        return self._prompts(observation, carry)

    def held_seconds(self, ticket: Ticket) -> float:
        """See :meth:`Runner.held_seconds`."""
        request = self._request_of(ticket)
        return 0.0 if request is None or request.held is None else request.held.seconds()

    @property
    def version(self) -> int:
        """Version of the engine's weights, whoever in this process pushed them."""
        return self._engine.version

    def restore_version(self, version: int) -> None:
        """See :meth:`Runner.restore_version`."""
        self._engine.version = max(self._engine.version, version)

    def abort(self, ticket: Ticket) -> None:
        """See :meth:`Runner.abort`. An actor whose ``generate`` is no coroutine works on to the end of the call."""
        with self._lock:
            request = self._in_flight.pop(ticket, None)
        if request is not None:
            self._give_up([request])

    def close(self, deadline: float) -> list[str]:
        """See :meth:`Runner.close`. The engine itself ends when nobody holds it any more."""
        if self.policy is None:
            return []
        if self._engine.dead is None:
            with self._lock:
                self._give_up(list(self._in_flight.values()))
                self._in_flight.clear()
        # A dead engine's thread has answers on its way, which a rollout that goes on without it still needs.
        busy = self._engine.release(deadline)
        # A closed runner that somebody still knows must not keep the engine alive.
        self.policy = None
        del self._prompts
        return busy

    def _request_of(self, ticket: Ticket) -> R | None:
        with self._lock:
            return self._in_flight.get(ticket)

    def _give_up(self, requests: list[R]) -> None:
        """Takes requests out of the engine."""
        raise NotImplementedError

    def _discarded(self, tokens: int) -> None:
        with self._lock:
            self.tokens_discarded += tokens

    def _answer(self, ticket: Ticket, error: Exception | None, respond: Callable[[Any], Response]) -> None:
        """In the engine's thread: answers a ticket by its error, or by what ``respond`` makes with the policy."""
        with self._lock:
            if self._in_flight.pop(ticket, None) is None:
                return
            policy, others = self.policy, tuple(self._in_flight)
        if error is not None:
            dead = self._engine.dead is not None
            self.broken = self.broken or dead
            self._post(Response(ticket, error=error, suspects=(ticket, *others) if dead else ()))
            return
        try:
            response = respond(policy)
        except Exception as failure:
            response = Response(ticket, error=failure)
        self._post(response)
