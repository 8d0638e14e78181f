"""The runner for ``TransformersWrapper``: the wrapper's configuration, the model's own ``generate``.

torchrl's wrapper writes 0 for the first log-prob of a response, takes sampled pad ids out of it, and loses what an
environment adds in token-first mode. This runner reads the wrapper's configuration and calls
``wrapper.model.generate`` on the ids of the prompts, on whatever waits, so that ids, log-probs, masks and finish
reasons obey the same rules as vLLM's. Log-probs are those of the model's raw logits (before temperature and filters),
as vLLM gives them by default.

Threads and invariants are those of :class:`~torchrl_llm.policies.batched.BatchedRunner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.modules.llm.policies import TransformersWrapper
from transformers import LogitsProcessorList

from torchrl_llm.policies.batched import BatchedRunner
from torchrl_llm.policies.observations import PromptMaker
from torchrl_llm.policies.options import DEFAULT_OPTIONS, RunnerOptions
from torchrl_llm.policies.outputs import Completion, respond
from torchrl_llm.policies.prompts import Carry, Prompt
from torchrl_llm.policies.row_sampling import RowSampling, warpers_of
from torchrl_llm.policies.runner import Post, Response, Ticket


class TransformersRunner(BatchedRunner):
    """Runs a ``TransformersWrapper`` on batches of the requests that wait.

    Args:
        policy: the wrapper.
        post: where responses go.
        options: how to run it.

    Raises:
        ValueError: if the wrapper is configured for what cannot be told apart per token: beam search, or stopping
            criteria of its own.
    """

    def __init__(self, policy: TransformersWrapper, post: Post, options: RunnerOptions = DEFAULT_OPTIONS) -> None:
        for name, allowed in (("num_beams", 1), ("stopping_criteria", None)):
            value = policy.generate_kwargs.get(name, allowed)
            if value != allowed:
                raise ValueError(f"the policy has generate_kwargs[{name!r}]={value!r}; only {allowed!r} is allowed")
        config = policy.model.config
        self._context = getattr(config, "max_position_embeddings", None)
        longest = None if self._context is None else self._context - 1
        self._prompts = PromptMaker(policy, longest, retokenize=options.retokenize)
        self._stop_ids = _stop_ids(policy)
        super().__init__(policy, post, options)

    def prepare(self, observation: TensorDictBase, carry: Carry | None) -> Prompt:
        """See :meth:`Runner.prepare`."""
        return self._prompts(observation, carry)

    def _length(self, request: Prompt) -> int:
        return len(request.token_ids)

    def _respond(self, tickets: list[Ticket], requests: list[Any]) -> list[Response]:
        answers = zip(tickets, requests, self._generate(requests, self._sampling(tickets)), strict=True)
        return [
            respond(ticket, self.policy, prompt, completion, self._prompts.tokenizer)
            for ticket, prompt, completion in answers
        ]

    def _sampling(self, tickets: list[Ticket]) -> LogitsProcessorList | None:
        """What samples each row by its own seed; ``None`` without seeds, or if nothing is sampled."""
        seeds = [ticket.sampling_seed(None) for ticket in tickets]
        if all(seed is None for seed in seeds):
            return None
        model = self.policy.model
        warpers = warpers_of(model, self.policy.generate_kwargs)
        if warpers is None:
            return None
        drawn = [int(torch.empty((), dtype=torch.int64).random_()) if seed is None else seed for seed in seeds]
        return LogitsProcessorList([RowSampling(warpers, drawn, model.device)])

    def _generate(self, prompts: list[Prompt], sampling: LogitsProcessorList | None = None) -> list[Completion]:
        policy = self.policy
        width = max(len(prompt.token_ids) for prompt in prompts)
        pad = policy.padding_value if policy.padding_value is not None else 0
        ids = torch.full((len(prompts), width), pad, dtype=torch.long)
        attention = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            # On the left, where generation does not go on.
            start = width - len(prompt.token_ids)
            ids[row, start:] = torch.tensor(prompt.token_ids, dtype=torch.long)
            attention[row, start:] = 1
        device = policy.model.device
        arguments = dict(policy.generate_kwargs, return_dict_in_generate=True, pad_token_id=pad)
        arguments["output_logits"] = policy.return_log_probs
        if sampling is not None:
            arguments["logits_processor"] = LogitsProcessorList([*arguments.get("logits_processor", ()), *sampling])
        with torch.no_grad():
            made = policy.model.generate(input_ids=ids.to(device), attention_mask=attention.to(device), **arguments)
        sampled = made.sequences[:, width:]
        log_probs = _log_probs(made.logits, sampled) if policy.return_log_probs else None
        completions = []
        for row, prompt in enumerate(prompts):
            tokens = sampled[row].tolist()
            length, reason = self._ending(tokens, len(prompt.token_ids))
            scores = None if log_probs is None else log_probs[row, :length].cpu()
            completions.append(Completion(tokens[:length], scores, finish_reason=reason))
        return completions

    def _ending(self, tokens: list[int], prompt_length: int) -> tuple[int, str]:
        """How many of a row's tokens were sampled before it ended (what follows is padding), and why it did."""
        ends = [position + 1 for position, token in enumerate(tokens) if token in self._stop_ids][:1]
        stop_strings = self.policy.generate_kwargs.get("stop_strings") or ()
        for string in [stop_strings] if isinstance(stop_strings, str) else stop_strings:
            decoded = (self._prompts.tokenizer.decode(tokens[:end]) for end in range(1, len(tokens) + 1))
            ends += [end for end, text in enumerate(decoded, start=1) if string in text][:1]
        room = len(tokens) if self._context is None else self._context - prompt_length
        if ends and min(ends) <= room:
            return min(ends), "stop"
        return min(len(tokens), room), "length"


def _log_probs(logits: Sequence[torch.Tensor], sampled: torch.Tensor) -> torch.Tensor:
    """float32, shape ``(N, T)``: log-probs of the sampled ids under the raw logits of each step."""
    steps = [
        torch.log_softmax(step.float(), dim=-1).gather(1, sampled[:, index : index + 1])
        for index, step in enumerate(logits)
    ]
    return torch.cat(steps, dim=1)


def _stop_ids(policy: TransformersWrapper) -> frozenset[int]:
    """The ids that end a response: the wrapper's, else the model's."""
    ids = policy.generate_kwargs.get("eos_token_id")
    if ids is None:
        ids = policy.model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
