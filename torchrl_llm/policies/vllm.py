"""The continuous runner: ``vLLMWrapper`` over ``vllm.LLM``, request by request.

Each request enters the engine the moment it is ready and leaves the moment it is finished, so that a long response
never holds back a short one. The wrapper's own configuration is used (input mode, keys, sampling parameters, tokenizer,
chat template, padding choice); nothing in it is changed.

Threads: ``prepare`` and ``submit`` run in the rollout's thread, outputs are
built in the engine's (see :mod:`torchrl_llm.policies.engine`). Both only read the runner's own copy of the tokenizer.
Invariant: each submitted ticket is answered once, unless the runner is closed first.
"""

from __future__ import annotations

from typing import Any

from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm.policies.engine import EngineThread, Request, acquire
from torchrl_llm.policies.engine_runner import EngineRunner
from torchrl_llm.policies.observations import PromptMaker
from torchrl_llm.policies.options import DEFAULT_OPTIONS, RunnerOptions
from torchrl_llm.policies.outputs import respond
from torchrl_llm.policies.prompts import Prompt
from torchrl_llm.policies.rests import Held
from torchrl_llm.policies.runner import Post, Response, Ticket
from torchrl_llm.policies.versions import TokenVersions
from torchrl_llm.policies.vllm_outputs import completion_of, seeded
from torchrl_llm.policies.weight_target import WeightTarget
from torchrl_llm.policies.weights_vllm_reload import ReloadTarget


class ContinuousRunner(EngineRunner[Request]):
    """Runs a ``vLLMWrapper`` whose model is a ``vllm.LLM``, in this process or in its own.

    Args:
        policy: the wrapper.
        post: where responses go.
        options: how to run it.
    """

    _engine: EngineThread

    def __init__(self, policy: vLLMWrapper, post: Post, options: RunnerOptions = DEFAULT_OPTIONS) -> None:
        prompts = PromptMaker(
            policy,
            longest_prompt=policy.model.llm_engine.model_config.max_model_len - 1,
            text_tokenizer=policy.model.get_tokenizer(),
            retokenize=options.retokenize,
        )
        self._params = engine_params(policy.sampling_params, options.prompt_log_probs)
        super().__init__(policy, post, acquire(policy.model), prompts)

    def submit(self, ticket: Ticket, request: Prompt) -> None:
        """See :meth:`Runner.submit`."""
        versions = TokenVersions()
        entering = Request(
            self._engine.new_id(),
            {"prompt_token_ids": request.token_ids},
            seeded(self._params, ticket),
            lambda output, error: self._answer(
                ticket, error, lambda policy: self._respond(policy, ticket, request, versions, output)
            ),
            versions,
            self._discarded,
            held=Held(self._engine.rests),
        )
        with self._lock:
            self._in_flight[ticket] = entering
        self._engine.add(entering)

    def began(self, ticket: Ticket) -> int | None:
        """See :meth:`Runner.began`."""
        request = self._request_of(ticket)
        return None if request is None else request.versions.began()

    def weight_target(self) -> WeightTarget | None:
        """See :meth:`Runner.weight_target`."""
        policy = self.policy
        return None if policy is None else ReloadTarget(policy.model, self._engine)

    def cut(self, ticket: Ticket) -> bool:
        """See :meth:`Runner.cut`."""
        request = self._request_of(ticket)
        if request is not None:
            self._engine.cut(request.id)
        return True

    def _give_up(self, requests: list[Request]) -> None:
        self._engine.abort([request.id for request in requests])

    def _respond(
        self, policy: vLLMWrapper, ticket: Ticket, prompt: Prompt, versions: TokenVersions, output: Any
    ) -> Response:
        completion = completion_of(output)
        response = respond(ticket, policy, prompt, completion, self._tokenizer)
        length, current = len(completion.token_ids), self._engine.version
        response.token_versions = versions.of(length, current) if self.track_token_versions else None
        response.policy_version, response.policy_version_end = versions.ends(length, current)
        return response


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
