"""The continuous runner: ``vLLMWrapper`` over ``vllm.LLM``, request by request.

Each request enters the engine the moment it is ready and leaves the moment it is finished, so that a long response
never holds back a short one. The wrapper's own configuration is used (input mode, keys, sampling parameters, tokenizer,
chat template, padding choice); nothing in it is changed.

Threads: :meth:`ContinuousRunner.prepare` and :meth:`~ContinuousRunner.submit` run in the rollout's thread, outputs are
built in the engine's (see :mod:`torchrl_llm.policies.engine`). The runner has its own copy of the tokenizer, which both
only read. Invariant: each submitted ticket is answered once, unless the runner is closed first.
"""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

from tensordict import TensorDictBase
from tensordict.tensorclass import is_non_tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm.errors import PromptTooLong
from torchrl_llm.policies.engine import acquire
from torchrl_llm.policies.outputs import build_row
from torchrl_llm.policies.prompts import (
    Carry,
    Prompt,
    history_prompt,
    known_tokens_prompt,
    text_prompt,
    tokens_prompt,
)
from torchrl_llm.policies.runner import Post, Response, Ticket
from torchrl_llm.policies.vllm_outputs import completion_of


class ContinuousRunner:
    """Runs a ``vLLMWrapper`` whose model is a ``vllm.LLM``, in this process or in its own.

    Args:
        policy: the wrapper.
        post: where responses go.
    """

    def __init__(self, policy: vLLMWrapper, post: Post) -> None:
        self.policy = policy
        self.broken = False
        self._post = post
        self._tokenizer = copy.deepcopy(policy.tokenizer)
        self._text_tokenizer = copy.deepcopy(policy.model.get_tokenizer())
        self._longest_prompt = policy.model.llm_engine.model_config.max_model_len - 1
        template = {"chat_template": policy.chat_template, "chat_template_name": policy.chat_template_name}
        self._template = {name: value for name, value in template.items() if value is not None}
        self._params = _engine_params(policy.sampling_params)
        self._in_flight: set[str] = set()
        self._lock = threading.Lock()
        self._engine = acquire(policy.model)

    def prepare(self, observation: TensorDictBase, carry: Carry | None) -> Prompt:
        """See :meth:`Runner.prepare`."""
        prompt = self._prompt(observation, carry)
        if len(prompt.token_ids) > self._longest_prompt:
            raise PromptTooLong(len(prompt.token_ids), self._longest_prompt)
        return prompt

    def _prompt(self, observation: TensorDictBase, carry: Carry | None) -> Prompt:
        policy = self.policy
        value = observation.get(policy.input_key, None)
        if value is None:
            raise ValueError(f"the policy reads {policy.input_key!r}; the observation has {list(observation.keys())}")
        if is_non_tensor(value):
            value = value.tolist()
        if policy.input_mode == "text":
            return text_prompt(value, carry, self._text_tokenizer)
        if policy.input_mode == "tokens":
            return tokens_prompt(value, carry, policy.padding_value, keep_padding=policy.pad_output)
        if not isinstance(value, History):
            raise TypeError(f"a History is needed under {policy.input_key!r}, got {type(value).__name__}")
        if policy.prefer_tokens:
            for part in ("prompt", "full"):
                known = observation.get((policy.tokens_key, part), None)
                if known is not None:
                    return known_tokens_prompt(known, value, self._tokenizer)
        return history_prompt(value, carry, self._tokenizer, self._template)

    def submit(self, ticket: Ticket, request: Prompt) -> None:
        """See :meth:`Runner.submit`."""
        request_id = self._engine.new_id()
        with self._lock:
            self._in_flight.add(request_id)
        self._engine.add(
            request_id,
            {"prompt_token_ids": request.token_ids},
            self._params,
            lambda output, error: self._answer(ticket, request, request_id, output, error),
        )

    def close(self, deadline: float) -> list[str]:
        """See :meth:`Runner.close`. The engine itself ends when nobody holds its ``vllm.LLM`` any more."""
        if self._engine.dead is None:
            with self._lock:
                self._engine.abort(list(self._in_flight))
                self._in_flight.clear()
        # A dead engine's thread has answers on its way, which a rollout that goes on without it still needs.
        busy = self._engine.release(deadline)
        self.policy = None
        # vLLM ends its processes when its objects are collected, and they hold each other in cycles.
        gc.collect()
        return busy

    def _answer(self, ticket: Ticket, request: Prompt, request_id: str, output: Any, error: Exception | None) -> None:
        with self._lock:
            if request_id not in self._in_flight:
                return
            self._in_flight.discard(request_id)
            policy = self.policy
        if error is not None:
            self.broken = self.broken or self._engine.dead is not None
            self._post(Response(ticket, error=error))
            return
        try:
            completion = completion_of(output)
            row, carry = build_row(policy, request, completion, self._tokenizer)
        except Exception as failure:
            self._post(Response(ticket, error=failure))
            return
        self._post(
            Response(
                ticket,
                row,
                carry=carry,
                prompt_tokens=len(request.token_ids),
                response_tokens=len(completion.token_ids),
                finish_reason=completion.finish_reason,
            )
        )


def _engine_params(params: Any) -> Any:
    """The wrapper's sampling parameters, without work whose result the wrapper does not use."""
    from vllm.sampling_params import RequestOutputKind

    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    # The response is decoded once at its end; only stop strings need its text while it grows.
    params.detokenize = bool(params.stop)
    return params
