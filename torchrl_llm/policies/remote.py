"""The runner for a ``vLLMWrapper`` whose engine is elsewhere: torchrl's ``AsyncVLLM``, or a Ray actor.

Such an engine takes a call per request and does its own batching, so the runner keeps many calls in flight, each in a
thread that waits for its answer; threads are started as they are needed, up to :data:`MAX_CALLS_IN_FLIGHT`.

Invariant: each submitted ticket is answered once, unless the runner is closed first. A call that is under way when the
runner closes cannot be cut short; its answer is dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from tensordict import TensorDictBase
from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm.policies.observations import PromptMaker
from torchrl_llm.policies.options import DEFAULT_OPTIONS, RunnerOptions
from torchrl_llm.policies.outputs import respond
from torchrl_llm.policies.prompts import Carry, Prompt
from torchrl_llm.policies.runner import Post, Response, Ticket
from torchrl_llm.policies.vllm_outputs import completion_of, seeded

MAX_CALLS_IN_FLIGHT = 256


class RemoteRunner:
    """Keeps many calls of a remote engine in flight.

    Args:
        policy: the wrapper; its model is an ``AsyncVLLM`` or a Ray actor with a ``generate`` method that serves
            several calls at a time.
        post: where responses go.
        options: how to run it.
    """

    def __init__(self, policy: vLLMWrapper, post: Post, options: RunnerOptions = DEFAULT_OPTIONS) -> None:
        self.policy = policy
        self.broken = False
        self.version = 0
        self.tokens_discarded = 0
        self.track_token_versions = False
        self._post = post
        engine_args = getattr(policy.model, "engine_args", None)
        context = getattr(engine_args, "max_model_len", None)
        longest = context - 1 if isinstance(context, int) else None
        self._prompts = PromptMaker(policy, longest, retokenize=options.retokenize)
        self._waiting: deque[tuple[Ticket, Prompt]] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._called_with: dict[Ticket, int] = {}
        self._free = 0
        self._closing = False

    def prepare(self, observation: TensorDictBase, carry: Carry | None) -> Prompt:
        """See :meth:`Runner.prepare`."""
        return self._prompts(observation, carry)

    def submit(self, ticket: Ticket, request: Prompt) -> None:
        """See :meth:`Runner.submit`."""
        with self._changed:
            self._waiting.append((ticket, request))
            if len(self._waiting) > self._free and len(self._threads) < MAX_CALLS_IN_FLIGHT:
                thread = threading.Thread(target=self._work, name="torchrl_llm-remote", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def restore_version(self, version: int) -> None:
        """See :meth:`Runner.restore_version`."""
        self.version = version

    def weight_target(self) -> None:
        """Its weights are elsewhere: the user's own ``weight_updater`` or ``weight_sync_schemes`` reach them."""
        return None

    def began(self, ticket: Ticket) -> int | None:
        """The version when the call was made, if it is under way and the weights have changed since."""
        version = self._called_with.get(ticket)
        return version if version is not None and version < self.version else None

    def abort(self, ticket: Ticket) -> None:
        """See :meth:`Runner.abort`. A call that is under way goes on."""
        with self._changed:
            self._waiting = deque(item for item in self._waiting if item[0] is not ticket)

    def cut(self, ticket: Ticket) -> bool:
        """A call of the remote engine cannot be cut short."""
        return False

    def close(self, deadline: float) -> list[str]:
        """See :meth:`Runner.close`."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _work(self) -> None:
        while True:
            with self._changed:
                self._free += 1
                while not self._waiting and not self._closing:
                    self._changed.wait()
                self._free -= 1
                if self._closing:
                    return
                ticket, prompt = self._waiting.popleft()
                begun_with = self._called_with[ticket] = self.version
            response = self._call(ticket, prompt)
            with self._changed:
                del self._called_with[ticket]
            response.policy_version, response.policy_version_end = begun_with, self.version
            if not self._closing:
                self._post(response)

    def _call(self, ticket: Ticket, prompt: Prompt) -> Response:
        policy = self.policy
        try:
            outputs: Any = policy._call_generate(
                prompt_token_ids=[prompt.token_ids], sampling_params=seeded(policy.sampling_params, ticket)
            )
            completion = completion_of(outputs[0] if isinstance(outputs, list) else outputs)
            return respond(ticket, policy, prompt, completion, self._prompts.tokenizer)
        except Exception as error:
            return Response(ticket, error=error)
