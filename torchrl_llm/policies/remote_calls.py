"""One call of a remote engine, from the request to its answer: what it has made so far, and by which weights.

A weight update may interrupt a call. vLLM then answers with the tokens made so far, and the call goes on as a new one
whose prompt ends with these tokens; that is known as a partial rollout. What is told to the rollout is the whole.

Pure state; owned by the thread of the :class:`~torchrl_llm.policies.remote_engine.RemoteEngine`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchrl_llm.policies.outputs import Completion
from torchrl_llm.policies.rests import Held


@dataclass
class Part:
    """A stretch of a response, made without an interruption.

    Args:
        completion: its tokens.
        version: version of the weights when it was asked for.
        version_end: their version when it was there.
    """

    completion: Completion
    version: int
    version_end: int


@dataclass
class Answer:
    """The whole response of a call.

    Args:
        completion: the response.
        version: version of the weights that made its first token.
        version_end: that of the weights that made its last token.
        token_versions: int64, shape ``(T,)``; ``None`` where it cannot be told.
    """

    completion: Completion
    version: int
    version_end: int
    token_versions: torch.Tensor | None


@dataclass(eq=False)
class Call:
    """A request of a remote engine.

    Args:
        prompt: the ids of the prompt.
        params: sampling parameters of the whole response.
        callback: gets the answer, or the error; called once, in the engine's thread.
        on_discard: called with the number of tokens that were thrown away, when the call begins anew.
        parts: what was made before interruptions.
        sent_with: version of the weights when the call was sent; ``None`` while it is kept back.
        held: for how long it was.
    """

    prompt: list[int]
    params: Any
    callback: Callable[[Answer | None, Exception | None], None]
    on_discard: Callable[[int], None]
    parts: list[Part] = field(default_factory=list)
    sent_with: int | None = None
    held: Held | None = None

    def began(self, current: int) -> int | None:
        """The version that made the first token, if it is another than ``current``; may be read by any thread."""
        made = next((part.version for part in list(self.parts) if part.completion.token_ids), self.sent_with)
        return made if made is not None and made < current else None

    def tokens(self) -> list[int]:
        """The sampled ids so far."""
        return [token for part in self.parts for token in part.completion.token_ids]

    def request(self) -> tuple[list[int], Any]:
        """The prompt and the sampling parameters for the rest of the response."""
        made = self.tokens()
        if not made:
            return self.prompt, self.params
        params = self.params.clone()
        if params.max_tokens is not None:
            params.max_tokens -= len(made)
        params.min_tokens = max(0, params.min_tokens - len(made))
        params.prompt_logprobs = None
        if params.seed is not None:
            params.seed += len(made)  # The same seed again would draw the same numbers again.
        return self.prompt + made, params

    def begin_anew(self, lost: int) -> None:
        """Throws away what was made, and ``lost`` tokens that were not noted yet."""
        lost += len(self.tokens())
        self.parts.clear()
        if lost:
            self.on_discard(lost)

    def answer(self, current: int) -> Answer:
        """The whole response; ``current`` is the version of the weights in use."""
        sampled = [part for part in self.parts if part.completion.token_ids]
        versions = None
        if all(part.version == part.version_end for part in sampled):
            spans = [torch.full((len(part.completion.token_ids),), part.version) for part in sampled]
            versions = torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)
        begin, end = (sampled[0].version, sampled[-1].version_end) if sampled else (current, current)
        return Answer(_joined(self.parts), begin, end, versions)


def can_go_on(params: Any) -> bool:
    """Whether a response can be interrupted and go on as a new request: nothing depends on where it began.

    Penalties count, and stop strings, bad words and grammars are looked for, in the response alone.
    """
    return not (
        params.presence_penalty
        or params.frequency_penalty
        or params.stop
        or params.bad_words
        or params.structured_outputs
        or params.extra_args
        or getattr(params, "thinking_token_budget", None) is not None
        or getattr(params, "repetition_detection", None) is not None
    )


def _joined(parts: list[Part]) -> Completion:
    completions = [part.completion for part in parts]
    if len(completions) == 1:
        return completions[0]
    scores = [completion.log_probs for completion in completions if completion.token_ids]
    known = [score for score in scores if score is not None]
    return Completion(
        token_ids=[token for completion in completions for token in completion.token_ids],
        log_probs=torch.cat(known) if known and len(known) == len(scores) else None,
        prompt_log_probs=completions[0].prompt_log_probs,
        finish_reason=completions[-1].finish_reason,
    )
