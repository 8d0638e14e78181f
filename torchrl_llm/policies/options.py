"""How a policy is run, where the defaults do not suit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunnerOptions:
    """A policy, or its constructor, with options for its runner; goes wherever a policy goes.

    Args:
        policy: the policy, or a constructor ``() -> policy``.
        retokenize: make every prompt from its text, as TorchRL's wrappers do, instead of keeping the ids that were
            sampled in earlier turns of the trajectory. For language-model wrappers.
        batch_wait: seconds that a batched policy waits for more requests after the first; 0 (default) takes what is
            there. For policies that are called on batches.
        max_batch: rows in a call of a batched policy at most; ``None`` (default) for all that wait. With
            ``TransformersWrapper`` the rows of a call are of like prompt length, which saves padding; the oldest
            request is always among them.
        prompt_log_probs: whether a ``vLLMWrapper`` over ``vllm.LLM`` with ``return_log_probs=True`` gives the
            log-probs of the prompt's tokens too, as it does by itself. vLLM reads nothing from its prefix cache for
            requests that ask for them; with ``False`` the prompt's part of ``log_probs.full`` is NaN.

    Raises:
        ValueError: if ``batch_wait`` is negative, or ``max_batch`` is no int of at least 1.

    Examples:
        >>> def policy(td):
        ...     return td
        >>> RunnerOptions(policy, batch_wait=0.02).batch_wait
        0.02
    """

    policy: Any = None
    retokenize: bool = False
    batch_wait: float = 0.0
    max_batch: int | None = None
    prompt_log_probs: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.batch_wait, (int, float)) or self.batch_wait < 0:
            raise ValueError(f"batch_wait={self.batch_wait!r} is not allowed: pass seconds, at least 0")
        if self.max_batch is not None and (not isinstance(self.max_batch, int) or self.max_batch < 1):
            raise ValueError(f"max_batch={self.max_batch!r} is not allowed: pass an int of at least 1, or None")


DEFAULT_OPTIONS = RunnerOptions()
