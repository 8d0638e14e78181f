"""Observation -> prompt ids: token in, token out.

Within a trajectory the prompt of turn k+1 begins with the full ids of turn k, exactly as they were sampled. Text is
never tokenised again: what an environment adds (a user's or a tool's message, a string after the last one) is
tokenised by itself and appended. This holds where the tokenizer would merge differently, where a response was cut
before its end-of-turn token (the template's closing tokens are appended, as part of the prompt), and where the
template would strip or reorder what was said (thinking blocks): the sampled ids stay.

A prompt is made from scratch at the first turn, and where the environment changed what was said before.

Pure functions, run by the thread that drives the rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchrl.data.llm import History

# Stands for the last response while the template is asked what follows it; no tokenizer or template touches it.
_ANSWER = "\u2402answer\u2403"

Message = tuple[Any, ...]


@dataclass
class Carry:
    """What a turn leaves for the next one of its trajectory.

    Args:
        token_ids: prompt and response.
        sampled: bool, shape ``(len(token_ids),)``: which of them the policy sampled, in this turn or before.
        text: prompt and response as text; ``None`` in tokens mode.
        messages: the conversation with the response; ``None`` but in history mode.
    """

    token_ids: list[int]
    sampled: torch.Tensor
    text: str | None = None
    messages: list[Message] | None = None


@dataclass
class Prompt:
    """A prompt as the engine takes it, and what the turn is to say of it.

    Args:
        token_ids: the prompt for the engine.
        tokens: int64, the prompt's ids for the turn, as the wrapper gives them (with the user's padding, if any).
        text: the prompt as text; ``None`` in tokens mode.
        history: the prompt's history, of batch size ``(messages,)``; ``None`` but in history mode.
        messages: the same as (role, content); ``None`` but in history mode.
        sampled: which of the first ids were sampled in earlier turns; ``None`` for none.
        kept: bool, as many as ``tokens``: which of them the engine gets; ``None`` for all.
    """

    token_ids: list[int]
    tokens: torch.Tensor
    text: str | None = None
    history: History | None = None
    messages: list[Message] | None = None
    sampled: torch.Tensor | None = None
    kept: torch.Tensor | None = None


def text_prompt(text: str, carry: Carry | None, tokenizer: Any) -> Prompt:
    """The prompt for a text; one that goes on from the last turn's keeps that turn's ids.

    Args:
        text: what the policy is to continue.
        carry: the last turn of the trajectory; ``None`` at the first, or to tokenise anew.
        tokenizer: the engine's tokenizer.
    """
    if carry is not None and carry.text is not None and text.startswith(carry.text):
        added = text[len(carry.text) :]
        ids = carry.token_ids + (tokenizer(added, add_special_tokens=False)["input_ids"] if added else [])
        return Prompt(ids, torch.tensor(ids, dtype=torch.long), text, sampled=carry.sampled)
    ids = tokenizer(text)["input_ids"]
    return Prompt(ids, torch.tensor(ids, dtype=torch.long), text)


def tokens_prompt(tokens: torch.Tensor, carry: Carry | None, padding_value: int | None, keep_padding: bool) -> Prompt:
    """The prompt for given ids, without the padding that the environment may have put.

    Args:
        tokens: int64, shape ``(T,)``.
        carry: the last turn of the trajectory; tells which ids were sampled.
        padding_value: the id that is padding.
        keep_padding: whether the turn shows the ids with their padding.
    """
    if tokens.ndim != 1:
        raise ValueError(f"a row's tokens must have shape (T,), and these have {tuple(tokens.shape)}")
    # Ids that were sampled before are no padding, whatever their value.
    known = 0
    if carry is not None and tokens.numel() >= len(carry.token_ids):
        known = len(carry.token_ids) if tokens[: len(carry.token_ids)].tolist() == carry.token_ids else 0
    keep = tokens != padding_value if padding_value is not None else torch.ones_like(tokens, dtype=torch.bool)
    keep[:known] = True
    ids = tokens[keep]
    sampled = carry.sampled if known and carry is not None else None
    if keep_padding:
        return Prompt(ids.tolist(), tokens, sampled=sampled, kept=keep)
    return Prompt(ids.tolist(), ids, sampled=sampled)


def known_tokens_prompt(tokens: torch.Tensor, history: History, tokenizer: Any) -> Prompt:
    """The prompt for a history whose ids the environment keeps (the wrapper's ``prefer_tokens``)."""
    ids = tokens.tolist()
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return Prompt(ids, tokens, text, history, conversation(history))


def history_prompt(history: History, carry: Carry | None, tokenizer: Any, template: Mapping[str, Any]) -> Prompt:
    """The prompt for a conversation; one that goes on from the last turn's keeps that turn's ids.

    Args:
        history: the conversation, of batch size ``(messages,)``.
        carry: the last turn of the trajectory; ``None`` at the first, or to tokenise anew.
        tokenizer: the policy's tokenizer.
        template: keyword arguments of ``History.apply_chat_template`` that choose the chat template.
    """
    messages = conversation(history)
    if carry is not None and carry.messages is not None:
        said = len(carry.messages)
        if messages[:said] == carry.messages:
            added = _after_answer(history, messages, said, tokenizer, template)
            if added is not None:
                return _continued(history, messages, carry, added, tokenizer)
    text = _render(history, tokenizer, template)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Prompt(ids, torch.tensor(ids, dtype=torch.long), text, history, messages)


def conversation(history: History) -> list[Message]:
    """The messages of a history as (role, content)."""
    return list(zip(history.role, history.content, strict=True))


def _continued(history: History, messages: list[Message], carry: Carry, added: str, tokenizer: Any) -> Prompt:
    new = tokenizer(added, add_special_tokens=False)["input_ids"]
    if new and new[0] == carry.token_ids[-1] and new[0] in tokenizer.all_special_ids:
        # The policy has sampled the end-of-turn token itself; the template's is the same one.
        new = new[1:]
    ids = carry.token_ids + new
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return Prompt(ids, torch.tensor(ids, dtype=torch.long), text, history, messages, carry.sampled)


def _after_answer(
    history: History, messages: list[Message], said: int, tokenizer: Any, template: Mapping[str, Any]
) -> str | None:
    """What the template puts after the last response: its closing, the new messages, the generation prompt."""
    answer = _ANSWER
    while any(answer in str(content) for _, content in messages):
        answer += _ANSWER
    rows = list(history.unbind(0))
    rows[said - 1] = History(role=rows[said - 1].role, content=answer)
    rendered = _render(torch.stack(rows), tokenizer, template)
    _, found, after = rendered.rpartition(answer)
    return after if found else None


def _render(history: History, tokenizer: Any, template: Mapping[str, Any]) -> str:
    return history.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=True, **template)
