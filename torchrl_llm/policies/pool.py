"""The collector's policies: how each is built, run, replaced and closed.

The pool belongs to the thread that drives the rollout; the runners in it have threads of their own. What was built from
a constructor is ours to end, an instance is left as it was.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from torchrl.modules.llm.policies import LLMWrapperBase, TransformersWrapper
from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm.policies.batched import BatchedRunner
from torchrl_llm.policies.options import DEFAULT_OPTIONS, RunnerOptions
from torchrl_llm.policies.remote import RemoteRunner
from torchrl_llm.policies.runner import Post, Response, Runner
from torchrl_llm.policies.transformers import TransformersRunner
from torchrl_llm.policies.vllm import ContinuousRunner
from torchrl_llm.streaks import FailuresInRow

REBUILD_WAIT_SECONDS = 30.0


def make_runner(policy: Any, post: Post, options: RunnerOptions = DEFAULT_OPTIONS) -> Runner:
    """The runner for a policy.

    Continuous for ``vLLMWrapper`` over ``vllm.LLM``, a call per request for one over a remote engine, the model's own
    ``generate`` for ``TransformersWrapper``, and batched for any other policy.

    Args:
        policy: the policy.
        post: where its responses go.
        options: how to run it.

    Raises:
        ValueError: if a wrapper does not generate, or makes several samples per prompt.
    """
    if isinstance(policy, LLMWrapperBase):
        check_wrapper(policy)
    if isinstance(policy, vLLMWrapper):
        if policy._model_type == "sync_vllm":
            return ContinuousRunner(policy, post, options)
        return RemoteRunner(policy, post, options)
    if isinstance(policy, TransformersWrapper) and type(policy).forward is TransformersWrapper.forward:
        return TransformersRunner(policy, post, options)
    return BatchedRunner(policy, post, options)


def check_wrapper(policy: LLMWrapperBase) -> None:
    """Refuses a language-model wrapper that cannot answer one prompt by one response.

    Raises:
        ValueError: if it does not generate, or makes several samples per prompt.
    """
    kind = type(policy).__name__
    if not policy.generate:
        raise ValueError(f"the policy is a {kind} with generate=False; a collector needs generate=True")
    if policy.num_samples is not None:
        raise ValueError(
            f"the policy is a {kind} with num_samples={policy.num_samples}; only one sample per prompt is allowed: "
            "give each prompt to several environments, or repeat it in the data"
        )


def _send_back(response: Response) -> None:
    """Gives a response to whoever sent the request: several rollouts may share a pool."""
    assert response.ticket.post is not None
    response.ticket.post(response)


class PolicyPool:
    """The policies of a collector, by index.

    ``guest`` says whether requests are an evaluation's, beside the training stream.

    Args:
        policies: the policies, as built or as given.
        constructors: how to build each anew; ``None`` for those that were given.
        options: how to run each.
    """

    guest = False

    def __init__(
        self,
        policies: list[Any],
        constructors: list[Callable[[], Any] | None],
        options: list[RunnerOptions],
    ) -> None:
        self._options = options
        self._constructors = constructors
        self._track = False
        self.on_rebuild: Callable[[Runner], None] | None = None
        self.loads = [0] * len(policies)
        self.failures_in_row = [FailuresInRow() for _ in policies]
        self.runners: list[Runner] = []
        try:
            for policy, how in zip(policies, options, strict=True):
                self.runners.append(make_runner(policy, _send_back, how))
        except BaseException:
            self.close(time.monotonic() + REBUILD_WAIT_SECONDS)
            raise

    def rebuild(self, policy_id: int) -> None:
        """Replaces a broken policy by a new one from its constructor.

        Raises:
            TypeError: if the policy was given as an instance.
        """
        constructor = self._constructors[policy_id]
        if constructor is None:
            raise TypeError("it was passed as an instance; pass a constructor for on_error='restart'")
        self.runners[policy_id].close(time.monotonic() + REBUILD_WAIT_SECONDS)
        self._collect_engines()
        runner = make_runner(constructor(), _send_back, self._options[policy_id])
        runner.track_token_versions = self._track
        runner.tokens_discarded = self.runners[policy_id].tokens_discarded
        self.runners[policy_id] = runner
        if self.on_rebuild is not None:
            self.on_rebuild(runner)

    def track_token_versions(self, track: bool) -> None:
        """Whether responses tell the version of each of their tokens."""
        self._track = track
        for runner in self.runners:
            runner.track_token_versions = track

    @property
    def version(self) -> int:
        """The newest version of weights that a policy has."""
        return max(runner.version for runner in self.runners)

    @property
    def tokens_discarded(self) -> int:
        """Sampled tokens that weight updates have thrown away."""
        return sum(runner.tokens_discarded for runner in self.runners)

    def restore_version(self, version: int) -> None:
        """Counts versions from ``version`` on, when the collection goes on from a state."""
        for runner in self.runners:
            runner.restore_version(version)

    def close(self, deadline: float) -> list[str]:
        """Ends the runners; returns the names of the threads that are still busy at ``deadline``."""
        busy = [name for runner in self.runners for name in runner.close(deadline)]
        self._collect_engines()
        return busy

    def _collect_engines(self) -> None:
        """Ends the vLLM engines that nobody holds: they end when they are collected, and hold themselves in cycles."""
        built = zip(self.runners, self._constructors, strict=False)
        engines = (ContinuousRunner, RemoteRunner)
        if any(isinstance(runner, engines) and constructor is not None for runner, constructor in built):
            gc.collect()
