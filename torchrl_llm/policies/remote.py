"""The runner for a ``vLLMWrapper`` whose engine is elsewhere: torchrl's ``AsyncVLLM``, or a Ray actor.

Such an engine takes a call per request and does its own batching, so all requests are sent the moment they are ready.

Threads: ``prepare`` and ``submit`` run in the rollout's thread, outputs are built in
the engine's (see :mod:`torchrl_llm.policies.remote_engine`).
Invariant: each submitted ticket is answered once, unless the runner is closed first.
"""

from __future__ import annotations

from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm.policies.engine_runner import EngineRunner
from torchrl_llm.policies.observations import PromptMaker
from torchrl_llm.policies.options import DEFAULT_OPTIONS, RunnerOptions
from torchrl_llm.policies.outputs import respond
from torchrl_llm.policies.prompts import Prompt
from torchrl_llm.policies.remote_calls import Answer, Call
from torchrl_llm.policies.remote_engine import RemoteEngine, acquire
from torchrl_llm.policies.rests import Held
from torchrl_llm.policies.runner import Post, Response, Ticket
from torchrl_llm.policies.vllm import engine_params
from torchrl_llm.policies.vllm_outputs import seeded
from torchrl_llm.policies.weight_target import WeightTarget
from torchrl_llm.policies.weights_remote import RemoteTarget


class RemoteRunner(EngineRunner[Call]):
    """Keeps many calls of a remote engine in flight.

    Args:
        policy: the wrapper; its model is an ``AsyncVLLM``, or has a Ray actor's ``generate`` method, which may serve
            several calls at a time; see :mod:`torchrl_llm.policies.remote_access`.
        post: where responses go.
        options: how to run it.
    """

    _engine: RemoteEngine

    def __init__(self, policy: vLLMWrapper, post: Post, options: RunnerOptions = DEFAULT_OPTIONS) -> None:
        engine = acquire(policy.model)
        try:
            prompts = PromptMaker(policy, engine.access.longest_prompt(), retokenize=options.retokenize)
            self._params = engine_params(policy.sampling_params, options.prompt_log_probs)
        except BaseException:
            engine.release(0.0)
            raise
        super().__init__(policy, post, engine, prompts)

    def submit(self, ticket: Ticket, request: Prompt) -> None:
        """See :meth:`Runner.submit`."""
        call = Call(
            request.token_ids,
            seeded(self._params, ticket),
            lambda answer, error: self._answer(
                ticket, error, lambda policy: self._respond(policy, ticket, request, answer)
            ),
            self._discarded,
            held=Held(self._engine.rests),
        )
        with self._lock:
            self._in_flight[ticket] = call
        self._engine.add(call)

    def weight_target(self) -> WeightTarget:
        """See :meth:`Runner.weight_target`."""
        return RemoteTarget(self._engine, self.track_token_versions)

    def began(self, ticket: Ticket) -> int | None:
        """See :meth:`Runner.began`."""
        call = self._request_of(ticket)
        return None if call is None else call.began(self._engine.version)

    def cut(self, ticket: Ticket) -> bool:
        """A call of a remote engine cannot be ended with the tokens made so far."""
        return False

    def _give_up(self, requests: list[Call]) -> None:
        self._engine.abort(requests)

    def _respond(self, policy: vLLMWrapper, ticket: Ticket, prompt: Prompt, answer: Answer | None) -> Response:
        assert answer is not None
        response = respond(ticket, policy, prompt, answer.completion, self._tokenizer)
        response.token_versions = answer.token_versions if self.track_token_versions else None
        response.policy_version, response.policy_version_end = answer.version, answer.version_end
        return response
