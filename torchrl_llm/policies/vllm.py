"""The continuous runner: ``vLLMWrapper`` over ``vllm.LLM``, request by request.

Each request enters the engine the moment it is ready and leaves the moment it is finished, so that a long response
never holds back a short one. The wrapper's own configuration is used (input mode, keys, sampling parameters, tokenizer,
chat template, padding choice); nothing in it is changed.

Threads: :meth:`ContinuousRunner.prepare` and :meth:`~ContinuousRunner.submit` run in the rollout's thread, outputs are
built in the engine's (see :mod:`torchrl_llm.policies.engine`). Both only read the runner's own copy of the tokenizer.
Invariant: each submitted ticket is answered once, unless the runner is closed first.
"""

from __future__ import annotations

import threading
from typing import Any

from tensordict import TensorDictBase
from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm.policies.engine import Request, acquire
from torchrl_llm.policies.observations import PromptMaker
from torchrl_llm.policies.options import DEFAULT_OPTIONS, RunnerOptions
from torchrl_llm.policies.outputs import respond
from torchrl_llm.policies.prompts import Carry, Prompt
from torchrl_llm.policies.rests import Held
from torchrl_llm.policies.runner import Post, Response, Ticket
from torchrl_llm.policies.versions import TokenVersions
from torchrl_llm.policies.vllm_outputs import completion_of, seeded
from torchrl_llm.policies.weight_target import WeightTarget
from torchrl_llm.policies.weights_vllm_reload import ReloadTarget


class ContinuousRunner:
    """Runs a ``vLLMWrapper`` whose model is a ``vllm.LLM``, in this process or in its own.

    Args:
        policy: the wrapper.
        post: where responses go.
        options: how to run it.
    """

    def __init__(self, policy: vLLMWrapper, post: Post, options: RunnerOptions = DEFAULT_OPTIONS) -> None:
        self.policy = policy
        self.broken = False
        self.tokens_discarded = 0
        self.track_token_versions = False
        self._post = post
        self._prompts = PromptMaker(
            policy,
            longest_prompt=policy.model.llm_engine.model_config.max_model_len - 1,
            text_tokenizer=policy.model.get_tokenizer(),
            retokenize=options.retokenize,
        )
        self._tokenizer = self._prompts.tokenizer
        self._params = engine_params(policy.sampling_params, options.prompt_log_probs)
        self._in_flight: dict[Ticket, Request] = {}
        self._lock = threading.Lock()
        self._engine = acquire(policy.model)

    def prepare(self, observation: TensorDictBase, carry: Carry | None) -> Prompt:
        """See :meth:`Runner.prepare`."""
        return self._prompts(observation, carry)

    def submit(self, ticket: Ticket, request: Prompt) -> None:
        """See :meth:`Runner.submit`."""
        versions = TokenVersions()
        entering = Request(
            self._engine.new_id(),
            {"prompt_token_ids": request.token_ids},
            seeded(self._params, ticket),
            lambda output, error: self._answer(ticket, request, versions, output, error),
            versions,
            self._discarded,
            held=Held(self._engine.rests),
        )
        with self._lock:
            self._in_flight[ticket] = entering
        self._engine.add(entering)

    def began(self, ticket: Ticket) -> int | None:
        """See :meth:`Runner.began`."""
        with self._lock:
            request = self._in_flight.get(ticket)
        return None if request is None else request.versions.began()

    def held_seconds(self, ticket: Ticket) -> float:
        """See :meth:`Runner.held_seconds`."""
        with self._lock:
            request = self._in_flight.get(ticket)
        return 0.0 if request is None or request.held is None else request.held.seconds()

    @property
    def version(self) -> int:
        """Version of the engine's weights, whoever pushed them."""
        return self._engine.version

    def restore_version(self, version: int) -> None:
        """See :meth:`Runner.restore_version`."""
        self._engine.version = max(self._engine.version, version)

    def weight_target(self) -> WeightTarget | None:
        """See :meth:`Runner.weight_target`."""
        policy = self.policy
        return None if policy is None else ReloadTarget(policy.model, self._engine)

    def abort(self, ticket: Ticket) -> None:
        """See :meth:`Runner.abort`."""
        with self._lock:
            request = self._in_flight.pop(ticket, None)
        if request is not None:
            self._engine.abort([request.id])

    def cut(self, ticket: Ticket) -> bool:
        """See :meth:`Runner.cut`."""
        with self._lock:
            request = self._in_flight.get(ticket)
        if request is not None:
            self._engine.cut(request.id)
        return True

    def close(self, deadline: float) -> list[str]:
        """See :meth:`Runner.close`. The engine itself ends when nobody holds its ``vllm.LLM`` any more."""
        if self.policy is None:
            return []
        if self._engine.dead is None:
            with self._lock:
                self._engine.abort([request.id for request in self._in_flight.values()])
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

    def _answer(
        self, ticket: Ticket, request: Prompt, versions: TokenVersions, output: Any, error: Exception | None
    ) -> None:
        with self._lock:
            if self._in_flight.pop(ticket, None) is None:
                return
            policy = self.policy
        if error is not None:
            self.broken = self.broken or self._engine.dead is not None
            self._post(Response(ticket, error=error))
            return
        try:
            completion = completion_of(output)
            response = respond(ticket, policy, request, completion, self._tokenizer)
            length, current = len(completion.token_ids), self._engine.version
            response.token_versions = versions.of(length, current) if self.track_token_versions else None
            response.policy_version, response.policy_version_end = versions.ends(length, current)
        except Exception as failure:
            response = Response(ticket, error=failure)
        self._post(response)


def engine_params(params: Any, prompt_log_probs: bool) -> Any:
    """The wrapper's sampling parameters, without work whose result the wrapper does not use."""
    from vllm.sampling_params import RequestOutputKind

    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    # The response is decoded once at its end; only stop strings need its text while it grows.
    params.detokenize = bool(params.stop)
    if not prompt_log_probs:
        params.prompt_logprobs, params.skip_reading_prefix_cache = None, False
    return params
