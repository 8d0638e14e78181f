"""The runner for a ``vLLMWrapper`` whose engine is elsewhere: torchrl's ``AsyncVLLM``, or a Ray actor.

Such an engine takes a call per request and does its own batching, so all requests are sent the moment they are ready.

Threads: :meth:`RemoteRunner.prepare` and :meth:`~RemoteRunner.submit` run in the rollout's thread, outputs are built in
the engine's (see :mod:`torchrl_llm.policies.remote_engine`).
Invariant: each submitted ticket is answered once, unless the runner is closed first.
"""

from __future__ import annotations

import threading
from typing import Any

from tensordict import TensorDictBase
from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm.policies.observations import PromptMaker
from torchrl_llm.policies.options import DEFAULT_OPTIONS, RunnerOptions
from torchrl_llm.policies.outputs import respond
from torchrl_llm.policies.prompts import Carry, Prompt
from torchrl_llm.policies.remote_calls import Answer, Call
from torchrl_llm.policies.remote_engine import acquire
from torchrl_llm.policies.rests import Held
from torchrl_llm.policies.runner import Post, Response, Ticket
from torchrl_llm.policies.vllm import engine_params
from torchrl_llm.policies.vllm_outputs import seeded
from torchrl_llm.policies.weight_target import WeightTarget
from torchrl_llm.policies.weights_remote import RemoteTarget


class RemoteRunner:
    """Keeps many calls of a remote engine in flight.

    Args:
        policy: the wrapper; its model is an ``AsyncVLLM``, or has a Ray actor's ``generate`` method, which may serve
            several calls at a time; see :mod:`torchrl_llm.policies.remote_access`.
        post: where responses go.
        options: how to run it.
    """

    def __init__(self, policy: vLLMWrapper, post: Post, options: RunnerOptions = DEFAULT_OPTIONS) -> None:
        self.policy = policy
        self.broken = False
        self.tokens_discarded = 0
        self.track_token_versions = False
        self._post = post
        self._in_flight: dict[Ticket, Call] = {}
        self._lock = threading.Lock()
        self._engine = acquire(policy.model)
        try:
            self._prompts = PromptMaker(policy, self._engine.access.longest_prompt(), retokenize=options.retokenize)
            self._tokenizer = self._prompts.tokenizer
            self._params = engine_params(policy.sampling_params, options.prompt_log_probs)
        except BaseException:
            self._engine.release(0.0)
            raise

    def prepare(self, observation: TensorDictBase, carry: Carry | None) -> Prompt:
        """See :meth:`Runner.prepare`."""
        return self._prompts(observation, carry)

    def submit(self, ticket: Ticket, request: Prompt) -> None:
        """See :meth:`Runner.submit`."""
        call = Call(
            request.token_ids,
            seeded(self._params, ticket),
            lambda answer, error: self._answer(ticket, request, answer, error),
            self._discarded,
            held=Held(self._engine.rests),
        )
        with self._lock:
            self._in_flight[ticket] = call
        self._engine.add(call)

    @property
    def version(self) -> int:
        """Version of the engine's weights, whoever in this process pushed them."""
        return self._engine.version

    def restore_version(self, version: int) -> None:
        """See :meth:`Runner.restore_version`."""
        self._engine.version = max(self._engine.version, version)

    def weight_target(self) -> WeightTarget:
        """See :meth:`Runner.weight_target`."""
        return RemoteTarget(self._engine, self.track_token_versions)

    def began(self, ticket: Ticket) -> int | None:
        """See :meth:`Runner.began`."""
        with self._lock:
            call = self._in_flight.get(ticket)
        return None if call is None else call.began(self._engine.version)

    def held_seconds(self, ticket: Ticket) -> float:
        """See :meth:`Runner.held_seconds`."""
        with self._lock:
            call = self._in_flight.get(ticket)
        return 0.0 if call is None or call.held is None else call.held.seconds()

    def abort(self, ticket: Ticket) -> None:
        """See :meth:`Runner.abort`. An actor whose ``generate`` is no coroutine works on to the end of the call."""
        with self._lock:
            call = self._in_flight.pop(ticket, None)
        if call is not None:
            self._engine.abort([call])

    def cut(self, ticket: Ticket) -> bool:
        """A call of a remote engine cannot be ended with the tokens made so far."""
        return False

    def close(self, deadline: float) -> list[str]:
        """See :meth:`Runner.close`. The engine itself ends when nobody holds it any more."""
        if self.policy is None:
            return []
        if self._engine.dead is None:
            with self._lock:
                self._engine.abort(list(self._in_flight.values()))
                self._in_flight.clear()
        # A dead engine's thread has answers on its way, which a rollout that goes on without it still needs.
        busy = self._engine.release(deadline)
        # A closed runner that somebody still knows must not keep the engine alive.
        self.policy = None
        del self._prompts
        return busy

    def _discarded(self, tokens: int) -> None:
        with self._lock:
            self.tokens_discarded += tokens

    def _answer(self, ticket: Ticket, request: Prompt, answer: Answer | None, error: Exception | None) -> None:
        with self._lock:
            if self._in_flight.pop(ticket, None) is None:
                return
            policy: Any = self.policy
        if answer is None:
            self.broken = self.broken or self._engine.dead is not None
            self._post(Response(ticket, error=error))
            return
        try:
            response = respond(ticket, policy, request, answer.completion, self._tokenizer)
            response.token_versions = answer.token_versions if self.track_token_versions else None
            response.policy_version, response.policy_version_end = answer.version, answer.version_end
        except Exception as failure:
            response = Response(ticket, error=failure)
        self._post(response)
