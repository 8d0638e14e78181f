"""Multi-turn dialogs on real vLLM: exact ids, masks, log-probs and finish reasons in every turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dialogs import chat_env, check_dialog, raw_log_probs
from torchrl.modules.llm import vLLMWrapper
from transformers import AutoModelForCausalLM

from torchrl_llm import LLMCollector, RunnerOptions, split_trajectories


@pytest.fixture(scope="module")
def model(tiny_model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def policy(llm: Any, **kwargs: Any) -> vLLMWrapper:
    return vLLMWrapper(llm, input_mode="history", generate_kwargs={"max_tokens": 8, **kwargs})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_every_turn_are_those_of_the_raw_logits_at_any_temperature_L55(
    vllm_llm: Any, model: Any, temperature: float
) -> None:
    with LLMCollector(
        lambda: chat_env(3),
        policy(vllm_llm, temperature=temperature),
        num_envs=3,
        trajectories_per_batch=3,
        total_steps=9,
    ) as collector:
        batch = next(collector)
    for trajectory in split_trajectories(batch):
        assert len(trajectory) == 3
        check_dialog(trajectory)
        for turn in trajectory.unbind(0):
            tokens, scores = turn["tokens"], turn["log_probs"]
            expected = raw_log_probs(model, tokens.prompt, tokens.full)
            torch.testing.assert_close(scores.response, expected, atol=1e-3, rtol=0)
            assert len(scores.full) == len(tokens.full)


@pytest.mark.parametrize(
    ("ending", "reason", "length"),
    [({"ignore_eos": True}, "length", 8), ({"stop_token_ids": list(range(512))}, "stop", 1)],
)
def test_finish_reasons_tell_cut_responses_from_ended_ones_L57(
    vllm_llm: Any, ending: dict[str, Any], reason: str, length: int
) -> None:
    wrapper = policy(vllm_llm)
    for name, value in ending.items():
        setattr(wrapper.sampling_params, name, value)
    with LLMCollector(lambda: chat_env(1), wrapper, steps_per_batch=1, total_steps=1) as collector:
        turn = next(collector)[0]
    assert turn["collector", "finish_reason"] == reason
    assert len(turn["tokens", "response"]) == length


def test_retokenize_makes_every_prompt_from_its_text(vllm_llm: Any, tokenizer: Any) -> None:
    options = RunnerOptions(policy(vllm_llm, temperature=1.0), retokenize=True)
    with LLMCollector(lambda: chat_env(3), options, num_envs=2, trajectories_per_batch=2, total_steps=6) as collector:
        batch = next(collector)
    for turn in batch.unbind(0):
        text = turn["history"].prompt.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=True)
        assert turn["text", "prompt"] == text
        assert turn["tokens", "prompt"].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
