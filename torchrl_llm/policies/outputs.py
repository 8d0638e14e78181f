"""A prompt and its completion -> the TensorDict that TorchRL's wrapper would have written for them.

Every key has the name, type, dtype, shape and value that torchrl's ``vLLMWrapper`` gives for the same engine output on
a batch of one, built once and directly: no padding, no nested tensors, no clone. The tests compare the two.

One thing goes beyond the wrapper: from the second turn of a trajectory on, ``masks.all_assistant_mask`` is true on the
sampled tokens of *all* turns, where the wrapper marks those of the last one only.

Pure functions; run by a runner's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import MetaData, TensorDict, TensorDictBase, lazy_stack
from tensordict.tensorclass import NonTensorData
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LLMWrapperBase, LogProbs, Masks, Text, Tokens

from torchrl_llm.policies.prompts import Carry, Prompt
from torchrl_llm.policies.runner import Response, Ticket


@dataclass
class Completion:
    """What an engine made of a prompt.

    Args:
        token_ids: the sampled ids, with the token that ended the response if one was sampled.
        log_probs: float32, one per sampled id; ``None`` if they were not asked for.
        prompt_log_probs: float32, one per id of the prompt; empty if the engine gave none.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``.
    """

    token_ids: list[int]
    log_probs: torch.Tensor | None = None
    prompt_log_probs: torch.Tensor | None = None
    finish_reason: str | None = None


def build_row(
    wrapper: LLMWrapperBase, prompt: Prompt, completion: Completion, tokenizer: Any
) -> tuple[TensorDict, Carry]:
    """What ``wrapper`` writes for ``prompt``, given ``completion``; and what the next turn needs to know of this one.

    Args:
        wrapper: gives the input mode, the output keys and the padding choice.
        prompt: what was asked.
        completion: what was answered.
        tokenizer: decodes the response.
    """
    ids = completion.token_ids
    response = torch.tensor(ids, dtype=torch.long)
    full = None if wrapper.input_mode == "text" else torch.cat([prompt.tokens, response])
    sampled = _sampled_mask(prompt, len(ids))
    out = TensorDict(batch_size=())
    out.set(wrapper.masks_key, _masks(wrapper, prompt, response, sampled))
    shown = None if wrapper.input_mode == "text" else prompt.tokens
    out.set(wrapper.tokens_key, _pack(Tokens, wrapper, prompt=shown, response=response, full=full))
    if wrapper.return_log_probs:
        out.set(wrapper.log_probs_key, _log_probs(wrapper, prompt.tokens, completion))
    carry = Carry([*prompt.token_ids, *ids], sampled)
    if prompt.text is not None:
        answer = tokenizer.decode(ids, skip_special_tokens=False)
        carry.text = prompt.text + answer
        if prompt.history is not None and prompt.messages is not None:
            # The wrapper decodes the whole sequence here, which differs where bytes meet in the middle.
            carry.text = tokenizer.decode(carry.token_ids, skip_special_tokens=False)
            carry.messages = [*prompt.messages, ("assistant", answer)]
            out.set(wrapper.history_key, _chat_history(prompt.history, answer))
        out.set(wrapper.text_key, _text(prompt.text, answer, carry.text))
    return out, carry


def respond(
    ticket: Ticket, wrapper: LLMWrapperBase, prompt: Prompt, completion: Completion, tokenizer: Any
) -> Response:
    """The answer to ``ticket``: the row of :func:`build_row`, with what the books and the next turn need."""
    row, carry = build_row(wrapper, prompt, completion, tokenizer)
    return Response(
        ticket,
        row,
        carry=carry,
        prompt_tokens=len(prompt.token_ids),
        response_tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason,
    )


def _sampled_mask(prompt: Prompt, length: int) -> torch.Tensor:
    """True on the sampled tokens of all turns, over prompt and response."""
    mask = torch.zeros(len(prompt.token_ids) + length, dtype=torch.bool)
    if prompt.sampled is not None:
        mask[: prompt.sampled.numel()] = prompt.sampled
    mask[len(prompt.token_ids) :] = True
    return mask


def _pack(kind: Any, wrapper: LLMWrapperBase, **tensors: torch.Tensor | None) -> Any:
    given: dict[str, Any] = {key: value for key, value in tensors.items() if value is not None}
    given["padded"] = MetaData(wrapper.pad_output)
    missing = dict.fromkeys(key for key, value in tensors.items() if value is None)
    return kind._from_tensordict(TensorDict._new_unsafe(given, batch_size=torch.Size(())), missing)


def _masks(wrapper: LLMWrapperBase, prompt: Prompt, response: torch.Tensor, sampled: torch.Tensor) -> Any:
    if wrapper.input_mode == "text":
        return _pack(Masks, wrapper, all_attention_mask=None, all_assistant_mask=None)
    attention = torch.ones(prompt.tokens.numel() + response.numel(), dtype=torch.bool)
    if prompt.kept is not None:
        attention[: prompt.tokens.numel()] = prompt.kept
        sampled = torch.zeros_like(attention).masked_scatter_(attention, sampled)
    return _pack(Masks, wrapper, all_attention_mask=attention, all_assistant_mask=sampled)


def _log_probs(wrapper: LLMWrapperBase, prompt: torch.Tensor, completion: Completion) -> Any:
    response = completion.log_probs
    if response is None:
        response = torch.tensor([], dtype=torch.float32)
    if wrapper.input_mode == "text":
        return _pack(LogProbs, wrapper, prompt=None, response=response, full=response)
    scores = completion.prompt_log_probs
    if scores is None:
        scores = torch.tensor([], dtype=torch.float32)
    if wrapper.pad_output and 0 < scores.numel() < prompt.numel():
        scores = torch.cat([scores.new_zeros(prompt.numel() - scores.numel()), scores])
    usable = bool(scores.any()) if wrapper.pad_output else scores.numel() > 0
    if usable:
        return _pack(LogProbs, wrapper, prompt=scores, response=response, full=torch.cat([scores, response]))
    # As in the wrapper: NaN keeps `full` aligned with the tokens where the engine gave no score; 0 would be one.
    unknown = response.new_full(prompt.shape, float("nan"))
    return _pack(LogProbs, wrapper, prompt=None, response=response, full=torch.cat([unknown, response]))


def _text(prompt: str, response: str, full: str) -> Any:
    values = {"prompt": prompt, "response": response, "full": full}
    data = {key: NonTensorData(value, batch_size=()) for key, value in values.items()}
    return Text._from_tensordict(TensorDict._new_unsafe(data, batch_size=torch.Size(())))


def _chat_history(prompt: History, answer: str) -> Any:
    message = History(role="assistant", content=answer)
    parts: dict[str, TensorDictBase] = {
        "prompt": prompt,
        "response": lazy_stack([message]),
        "full": prompt.append(message, inplace=False, dim=-1),
    }
    return ChatHistory._from_tensordict(TensorDict._new_unsafe(parts, batch_size=torch.Size(())))
