"""A call of a remote engine that is interrupted: what is asked for next, and what is told in the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrl_llm.policies.outputs import Completion
from torchrl_llm.policies.remote_calls import Call, Part, can_go_on

pytest.importorskip("vllm")


def call_of(**params: Any) -> tuple[Call, list[int]]:
    from vllm import SamplingParams

    discarded: list[int] = []
    return Call([1, 2], SamplingParams(**params), lambda answer, error: None, discarded.append), discarded


def part(tokens: list[int], version: int, reason: str = "abort", end: int | None = None, scores: bool = True) -> Part:
    log_probs = torch.tensor([-0.1 * token for token in tokens]) if scores and tokens else None
    completion = Completion(tokens, log_probs, torch.tensor([0.0, -1.0]), reason)
    return Part(completion, version, version if end is None else end)


def test_a_call_that_goes_on_asks_for_the_rest() -> None:
    call, _ = call_of(max_tokens=10, min_tokens=4, seed=7, prompt_logprobs=0, temperature=0.5)
    assert call.request() == ([1, 2], call.params)
    call.parts.append(part([5, 6, 7], 0))
    prompt, params = call.request()
    assert prompt == [1, 2, 5, 6, 7]
    assert (params.max_tokens, params.min_tokens, params.seed, params.prompt_logprobs) == (7, 1, 10, None)
    assert params.temperature == 0.5
    call.parts.append(part([8, 9], 1))
    prompt, params = call.request()
    assert prompt == [1, 2, 5, 6, 7, 8, 9]
    assert (params.max_tokens, params.min_tokens, params.seed) == (5, 0, 12)
    assert (call.params.max_tokens, call.params.min_tokens, call.params.seed) == (10, 4, 7)


def test_the_answer_is_the_whole_response() -> None:
    call, _ = call_of()
    call.parts += [part([], 0), part([5, 6], 1), part([], 2), part([7], 3, "stop")]
    answer = call.answer(current=3)
    assert answer.completion.token_ids == [5, 6, 7]
    torch.testing.assert_close(answer.completion.log_probs, torch.tensor([-0.5, -0.6, -0.7]))
    assert answer.completion.prompt_log_probs.tolist() == [0.0, -1.0]
    assert answer.completion.finish_reason == "stop"
    assert (answer.version, answer.version_end) == (1, 3)
    assert answer.token_versions.tolist() == [1, 1, 3]


def test_an_answer_without_tokens_is_of_the_weights_in_use() -> None:
    call, _ = call_of()
    call.parts.append(part([], 0, "stop"))
    answer = call.answer(current=4)
    assert (answer.completion.token_ids, answer.version, answer.version_end) == ([], 4, 4)
    assert answer.token_versions.tolist() == []


def test_token_versions_are_not_told_where_the_weights_changed_meanwhile() -> None:
    call, _ = call_of()
    call.parts.append(part([5, 6], 1, "stop", end=2))
    answer = call.answer(current=2)
    assert (answer.version, answer.version_end, answer.token_versions) == (1, 2, None)


def test_log_probs_that_were_not_asked_for_stay_away() -> None:
    call, _ = call_of()
    call.parts += [part([5], 0, scores=False), part([6], 1, "stop", scores=False)]
    assert call.answer(1).completion.log_probs is None


def test_a_call_that_begins_anew_counts_what_it_threw_away() -> None:
    call, discarded = call_of(max_tokens=10)
    call.begin_anew(0)
    assert discarded == []
    call.parts.append(part([5, 6, 7], 0))
    call.begin_anew(2)
    assert discarded == [5]
    assert call.request() == ([1, 2], call.params)


@pytest.mark.parametrize(
    ("params", "can"),
    [
        ({}, True),
        ({"temperature": 0.7, "top_p": 0.9, "seed": 3, "min_tokens": 2, "repetition_penalty": 1.1}, True),
        ({"stop_token_ids": [4], "ignore_eos": True, "logit_bias": {3: 1.0}}, True),
        ({"stop": ["end"]}, False),
        ({"bad_words": ["no"]}, False),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"extra_args": {"processor": 1}}, False),
        ({"thinking_token_budget": 0}, False),
    ],
)
def test_what_depends_on_where_a_response_began_cannot_go_on(params: dict[str, Any], can: bool) -> None:
    call, _ = call_of(**params)
    assert can_go_on(call.params) is can


def test_a_call_tells_when_it_began_once_the_weights_have_changed() -> None:
    call, _ = call_of()
    assert call.began(current=3) is None
    call.sent_with = 2
    assert (call.began(current=2), call.began(current=3)) == (None, 2)
    call.parts.append(part([5], 1))
    assert call.began(current=3) == 1
    call.begin_anew(0)
    call.sent_with = None
    assert call.began(current=3) is None
