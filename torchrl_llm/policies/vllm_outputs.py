"""A finished ``vllm.RequestOutput`` -> the TensorDict that ``vLLMWrapper`` would have made of it.

Every key has the name, type, dtype, shape and value that torchrl's ``vLLMWrapper`` gives for the same engine output on
a batch of one, built once and directly: no padding, no nested tensors, no clone. The tests compare the two.

Pure functions; run by the engine's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.tensorclass import NonTensorData
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens
from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper


@dataclass
class VLLMRequest:
    """A prompt as the engine takes it, and what the turn is to say of it.

    Args:
        token_ids: the prompt for the engine.
        tokens: the prompt's ids for the turn, as the wrapper gives them (with the user's padding, if there is any).
        text: the prompt as text; ``None`` in tokens mode.
        history: the prompt's history, of batch size ``(messages,)``; ``None`` but in history mode.
    """

    token_ids: list[int]
    tokens: torch.Tensor
    text: str | None = None
    history: History | None = None


def build_output(wrapper: vLLMWrapper, request: VLLMRequest, output: Any, tokenizer: Any) -> TensorDict:
    """What ``wrapper`` writes for ``request``, given the engine's ``output``.

    Args:
        wrapper: gives the input mode and the output keys.
        request: what was asked.
        output: a finished ``vllm.RequestOutput`` with one completion.
        tokenizer: decodes the response.
    """
    completion = output.outputs[0]
    response = torch.tensor(completion.token_ids, dtype=torch.long)
    prompt = request.tokens
    full = None if wrapper.input_mode == "text" else torch.cat([prompt, response])
    out = TensorDict(batch_size=())
    out.set(wrapper.masks_key, _masks(wrapper, prompt, response))
    shown = None if wrapper.input_mode == "text" else prompt
    out.set(wrapper.tokens_key, _pack(Tokens, wrapper, prompt=shown, response=response, full=full))
    if wrapper.return_log_probs:
        out.set(wrapper.log_probs_key, _log_probs(wrapper, prompt, completion, output))
    if wrapper.input_mode == "text":
        assert request.text is not None
        out.set(wrapper.text_key, _text(request.text, tokenizer.decode(response.tolist(), skip_special_tokens=False)))
    elif wrapper.input_mode == "history":
        assert request.text is not None and request.history is not None
        answer = tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        # The wrapper decodes the whole sequence, which differs from a concatenation where bytes meet in the middle.
        whole = tokenizer.decode([*request.token_ids, *completion.token_ids], skip_special_tokens=False)
        out.set(wrapper.text_key, _text(request.text, answer, whole))
        out.set(wrapper.history_key, _chat_history(request.history, answer))
    return out


def _pack(kind: Any, wrapper: vLLMWrapper, **tensors: torch.Tensor | None) -> Any:
    given = {key: value for key, value in tensors.items() if value is not None}
    given["padded"] = NonTensorData(wrapper.pad_output, batch_size=())  # type: ignore[assignment]
    missing = dict.fromkeys(key for key, value in tensors.items() if value is None)
    return kind._from_tensordict(TensorDict._new_unsafe(given, batch_size=torch.Size(())), missing)


def _masks(wrapper: vLLMWrapper, prompt: torch.Tensor, response: torch.Tensor) -> Any:
    if wrapper.input_mode == "text":
        return _pack(Masks, wrapper, all_attention_mask=None, all_assistant_mask=None)
    attention = torch.ones(prompt.numel() + response.numel(), dtype=torch.bool)
    if wrapper.pad_output:
        attention[: prompt.numel()] = prompt != wrapper.padding_value
    assistant = torch.zeros_like(attention)
    assistant[prompt.numel() :] = True
    return _pack(Masks, wrapper, all_attention_mask=attention, all_assistant_mask=assistant)


def _log_probs(wrapper: vLLMWrapper, prompt: torch.Tensor, completion: Any, output: Any) -> Any:
    response = _sampled_log_probs(completion)
    if wrapper.input_mode == "text":
        return _pack(LogProbs, wrapper, prompt=None, response=response, full=response)
    scores = _prompt_log_probs(output)
    if wrapper.pad_output and scores.numel() < prompt.numel() and scores.numel():
        scores = torch.cat([scores.new_zeros(prompt.numel() - scores.numel()), scores])
    usable = bool(scores.any()) if wrapper.pad_output else scores.numel() > 0
    if usable:
        return _pack(LogProbs, wrapper, prompt=scores, response=response, full=torch.cat([scores, response]))
    # As in the wrapper: NaN keeps `full` aligned with the tokens where the engine gave no score; 0 would be one.
    unknown = response.new_full(prompt.shape, float("nan"))
    return _pack(LogProbs, wrapper, prompt=None, response=response, full=torch.cat([unknown, response]))


def _sampled_log_probs(completion: Any) -> torch.Tensor:
    if not completion.logprobs:
        return torch.tensor([], dtype=torch.float32)
    return torch.tensor([entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)])


def _prompt_log_probs(output: Any) -> torch.Tensor:
    """Scores of the prompt's tokens; the first has none, nor have tokens from the prefix cache: 0, as in the wrapper."""
    if output.prompt_logprobs is None:
        return torch.tensor([])
    ids = output.prompt_token_ids
    scores = [0.0 if entry is None else entry[token].logprob for entry, token in zip(output.prompt_logprobs, ids, strict=False)]
    return torch.tensor([0.0] * (len(ids) - len(scores)) + scores)


def _text(prompt: str, response: str, full: str | None = None) -> Any:
    values = {"prompt": prompt, "response": response, "full": prompt + response if full is None else full}
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
