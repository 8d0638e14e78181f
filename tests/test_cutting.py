"""Generations that take too long, on a real engine: cut with what they have."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import assert_conserved, assert_settled
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm import LLMCollector, PromptSource


@pytest.mark.parametrize("on_timeout", ["deliver", "drop"])
def test_a_runaway_generation_is_cut_with_what_it_has(on_timeout: str, vllm_llm: Any, tokenizer: Any) -> None:
    def make_env() -> EnvBase:
        return ChatEnv(batch_size=(1,)).append_transform(StepCounter(max_steps=1))

    policy = vLLMWrapper(
        vllm_llm,
        tokenizer=tokenizer,
        input_mode="history",
        generate_kwargs={"max_tokens": 450},
    )
    policy.sampling_params.ignore_eos = True
    source = PromptSource(["question 0"], epochs=1)
    with LLMCollector(
        source.env(make_env), policy, trajectories_per_batch=1, max_turn_seconds=0.05, on_timeout=on_timeout
    ) as collector:
        batches = list(collector)
        stats = collector.stats()
    assert_settled(stats)
    if on_timeout == "drop":
        assert batches == [] and stats["recorded_by_reason"] == {"timed_out": 3}
        return
    [row] = batches[0].unbind(0)
    assert bool(row["next", "done"]) and bool(row["next", "truncated"])
    assert row["collector", "finish_reason"] == "abort"
    assert len(row["tokens", "response"]) < 450
    assert row["tokens", "full"].tolist() == row["tokens", "prompt"].tolist() + row["tokens", "response"].tolist()
    assert (stats["generation_timeouts"], stats["env_timeouts"]) == (1, 0)
    assert_conserved(stats)
