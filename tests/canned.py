"""A vllm.LLM without an engine: it answers with the finished outputs that it was given."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tensordict import TensorDictBase
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from torchrl_llm.policies.runner import Response, Ticket
from torchrl_llm.policies.vllm import ContinuousRunner

Script = Callable[[list[int]], RequestOutput]


def make_output(
    prompt_ids: Sequence[int] | None,
    response_ids: Sequence[int],
    *,
    log_probs: Sequence[float] | None = None,
    prompt_log_probs: Sequence[float | None] | None = None,
    finish_reason: str = "stop",
) -> RequestOutput:
    """A finished output as vLLM makes it: at each position the sampled token, and a better one beside it."""

    def entry(token: int, value: float) -> dict[int, Logprob]:
        return {token: Logprob(value, 2, None), token + 1000: Logprob(value / 2, 1, None)}

    sampled = None
    if log_probs is not None:
        sampled = [entry(t, v) for t, v in zip(response_ids, log_probs, strict=True)]
    scored = None
    if prompt_log_probs is not None:
        assert prompt_ids is not None
        scored = [None if v is None else entry(t, v) for t, v in zip(prompt_ids, prompt_log_probs, strict=True)]
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=list(response_ids),
        cumulative_logprob=None if log_probs is None else sum(log_probs),
        logprobs=sampled,
        finish_reason=finish_reason,
    )
    return RequestOutput("canned", None, None if prompt_ids is None else list(prompt_ids), scored, [completion], True)


class LLM:
    """Stands in for ``vllm.LLM``, both for ``generate`` and for ``llm_engine``.

    Args:
        tokenizer: the model's tokenizer.
        script: the finished output for a prompt's ids.
        on_step: called before each step of the engine; it may raise.
    """

    def __init__(self, tokenizer: Any, script: Script, on_step: Callable[[], None] = lambda: None) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self.prompts: list[list[int]] = []
        self.llm_engine = _Engine(self, on_step)

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def generate(self, prompts: list[Any], sampling_params: Any = None, **_: Any) -> list[RequestOutput]:
        return [self.answer(prompt) for prompt in prompts]

    def answer(self, prompt: Any) -> RequestOutput:
        ids = self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt["prompt_token_ids"]
        self.prompts.append(list(ids))
        return self._script(list(ids))


LLM.__module__ = "vllm.canned"  # vLLMWrapper tells what it was given by the class's name and module


class _Engine:
    """The calls of ``llm_engine`` that an engine thread makes."""

    def __init__(self, llm: LLM, on_step: Callable[[], None]) -> None:
        self._answer = llm.answer
        self._on_step = on_step
        self._waiting: list[RequestOutput] = []
        self.model_config = SimpleNamespace(max_model_len=100_000)

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        output = self._answer(prompt)
        output.request_id = request_id
        self._waiting.append(output)

    def step(self) -> list[RequestOutput]:
        self._on_step()
        outputs, self._waiting = self._waiting, []
        return outputs

    def abort_request(self, request_ids: list[str]) -> None:
        self._waiting = [output for output in self._waiting if output.request_id not in request_ids]


def run_rows(policy: Any, rows: Sequence[TensorDictBase]) -> list[TensorDictBase]:
    """What the continuous runner writes for ``rows``, each a request of its own."""
    answers: queue.SimpleQueue[Response] = queue.SimpleQueue()
    runner = ContinuousRunner(policy, answers.put)
    try:
        for index, row in enumerate(rows):
            runner.submit(Ticket(0, index, 0, index, 0), runner.prepare(row.copy(), None))
        outputs: dict[int, TensorDictBase] = {}
        for _ in rows:
            response = answers.get(timeout=60)
            if response.error is not None:
                raise response.error
            assert response.output is not None
            outputs[response.ticket.row] = response.output
    finally:
        assert runner.close(time.monotonic() + 60) == []
    return [outputs[index] for index in range(len(rows))]
