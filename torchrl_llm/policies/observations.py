"""What a language-model wrapper reads of an observation, as the prompt for its engine.

Used by the runners of ``vLLMWrapper`` and ``TransformersWrapper``, in the thread that drives the rollout. The maker has
its own copies of the tokenizers, which nobody else reconfigures.
"""

from __future__ import annotations

import copy
from typing import Any

from tensordict import TensorDictBase
from tensordict.tensorclass import is_non_tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_llm.errors import PromptTooLong
from torchrl_llm.policies.prompts import (
    Carry,
    Prompt,
    history_prompt,
    known_tokens_prompt,
    text_prompt,
    tokens_prompt,
)


class PromptMaker:
    """Makes prompts by a wrapper's own configuration: input mode and key, tokenizer, chat template, padding.

    Args:
        wrapper: the policy.
        longest_prompt: tokens that leave room for a response; ``None`` for no limit.
        text_tokenizer: tokenises in text mode; defaults to the wrapper's tokenizer.
        retokenize: whether to forget the sampled ids of earlier turns.
    """

    def __init__(
        self,
        wrapper: LLMWrapperBase,
        longest_prompt: int | None,
        text_tokenizer: Any = None,
        retokenize: bool = False,
    ) -> None:
        self._wrapper = wrapper
        self._longest_prompt = longest_prompt
        self._retokenize = retokenize
        self.tokenizer = copy.deepcopy(wrapper.tokenizer)
        self._text_tokenizer = self.tokenizer if text_tokenizer is None else copy.deepcopy(text_tokenizer)
        template = {"chat_template": wrapper.chat_template, "chat_template_name": wrapper.chat_template_name}
        self._template = {name: value for name, value in template.items() if value is not None}

    def __call__(self, observation: TensorDictBase, carry: Carry | None) -> Prompt:
        """The prompt for an observation of batch size ``()``.

        Raises:
            PromptTooLong: if the context has no room for a response.
            ValueError: if the observation lacks what the wrapper reads.
        """
        prompt = self._make(observation, None if self._retokenize else carry)
        if self._longest_prompt is not None and len(prompt.token_ids) > self._longest_prompt:
            raise PromptTooLong(len(prompt.token_ids), self._longest_prompt)
        return prompt

    def _make(self, observation: TensorDictBase, carry: Carry | None) -> Prompt:
        wrapper = self._wrapper
        value = observation.get(wrapper.input_key, None)
        if value is None:
            raise ValueError(f"the policy reads {wrapper.input_key!r}; the observation has {list(observation.keys())}")
        if is_non_tensor(value):
            value = value.tolist()
        if wrapper.input_mode == "text":
            return text_prompt(value, carry, self._text_tokenizer)
        if wrapper.input_mode == "tokens":
            return tokens_prompt(value, carry, wrapper.padding_value, keep_padding=wrapper.pad_output)
        if not isinstance(value, History):
            raise TypeError(f"a History is needed under {wrapper.input_key!r}, got {type(value).__name__}")
        if carry is None and wrapper.prefer_tokens:
            for part in ("prompt", "full"):
                known = observation.get((wrapper.tokens_key, part), None)
                if known is not None:
                    return known_tokens_prompt(known, value, self.tokenizer)
        return history_prompt(value, carry, self.tokenizer, self._template)
