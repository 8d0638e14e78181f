"""What goes into a vLLM request and what comes out: its seed, and a finished ``RequestOutput`` as a ``Completion``.

Pure functions; run by the engine's thread, and :func:`seeded` by the one that sends the request.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from torchrl_llm.policies.outputs import Completion
from torchrl_llm.policies.runner import Ticket


def completion_of(output: Any) -> Completion:
    """The first completion of a finished ``vllm.RequestOutput``."""
    first = output.outputs[0]
    return Completion(
        token_ids=list(first.token_ids),
        log_probs=_sampled_log_probs(first),
        prompt_log_probs=_prompt_log_probs(output),
        finish_reason=first.finish_reason,
    )


def _sampled_log_probs(completion: Any) -> torch.Tensor | None:
    if not completion.logprobs:
        return None
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    return torch.tensor([entry[token].logprob for entry, token in pairs], dtype=torch.float32)


def seeded(params: Any, ticket: Ticket) -> Any:
    """Sampling parameters with a seed for this request: one seed for all would give equal answers to equal prompts."""
    seed = ticket.sampling_seed(params.seed)
    if seed is None:
        return params
    params = copy.copy(params)
    params.seed = seed
    return params


def _prompt_log_probs(output: Any) -> torch.Tensor | None:
    """Scores of the prompt's tokens; 0 for the first and for cached ones, which have none, as in the wrapper."""
    if output.prompt_logprobs is None:
        return None
    ids = output.prompt_token_ids
    pairs = zip(output.prompt_logprobs, ids, strict=False)
    scores = [0.0 if entry is None else entry[token].logprob for entry, token in pairs]
    return torch.tensor([0.0] * (len(ids) - len(scores)) + scores, dtype=torch.float32)
