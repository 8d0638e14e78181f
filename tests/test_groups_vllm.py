"""Groups on a real engine: the prefix cache is hit, and torchrl's GRPO loss takes what comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from test_groups import Reward
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm import LLMCollector, PromptSource, RunnerOptions, split_trajectories
from torchrl_llm.policies import vllm as vllm_runner

LONG = " ".join(f"word{number}" for number in range(60))


def make_env(turns: int = 1) -> EnvBase:
    return ChatEnv(batch_size=(1,)).append_transform(StepCounter(max_steps=turns)).append_transform(Reward())


def make_policy(llm: Any, tokenizer: Any, prompt_log_probs: bool) -> RunnerOptions:
    policy = vLLMWrapper(
        llm, tokenizer=tokenizer, input_mode="history", return_log_probs=True, generate_kwargs={"max_tokens": 8}
    )
    return RunnerOptions(policy, prompt_log_probs=prompt_log_probs)


def test_the_members_of_a_group_share_the_engine_s_prefix_cache(
    vllm_llm: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hit_rate(repeats: int, marks: str, prompt_log_probs: bool = False) -> float:
        vllm_llm.reset_prefix_cache()
        cached: list[int] = []
        prompt: list[int] = []
        completion_of = vllm_runner.completion_of

        def watch(output: Any) -> Any:
            cached.append(output.num_cached_tokens)
            prompt.append(len(output.prompt_token_ids))
            return completion_of(output)

        prompts = [f"{marks}{index} {LONG}" for index in range(32 // repeats)]
        source = PromptSource(prompts, repeats=repeats, epochs=1)
        with monkeypatch.context() as patch:
            patch.setattr(vllm_runner, "completion_of", watch)
            with LLMCollector(
                source.env(make_env),
                make_policy(vllm_llm, tokenizer, prompt_log_probs),
                num_envs=8,
                groups_per_batch=1,
            ) as collector:
                for batch in collector:
                    assert_group(batch, repeats)
        assert len(prompt) == 32 and min(prompt) > 128
        return sum(cached) / sum(prompt)

    alone, together = hit_rate(1, "a"), hit_rate(8, "b")
    print(f"prefix cache: {alone:.0%} of the prompt tokens without groups, {together:.0%} in groups of 8")
    # The engine caches whole blocks; the first member of a group computes the prompt, seven find its blocks.
    assert together > 0.5
    assert together - alone > 0.5
    # Log-probs of the prompt, which torchrl's wrapper asks for with return_log_probs=True, are computed, not cached.
    assert hit_rate(8, "c", prompt_log_probs=True) == 0.0


def assert_group(batch: TensorDictBase, repeats: int) -> None:
    assert batch["collector", "group_index"].tolist() == list(range(repeats))
    assert len(set(batch["query"])) == 1


@pytest.mark.parametrize("prompt_log_probs", [True, False])
@pytest.mark.parametrize("turns", [1, 2])
def test_grpo_loss_takes_groups_with_their_advantages_and_its_ratio_is_one(
    turns: int, prompt_log_probs: bool, vllm_llm: Any, tokenizer: Any, tiny_model: str
) -> None:
    import transformers
    from torchrl.objectives.llm import GRPOLoss, MCAdvantage

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    # By tokens: the very ids that were sampled; text might be tokenised in another way.
    actor = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_model_input=True, return_log_probs=True
    )
    loss = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=False)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(100),
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
        transform=MCAdvantage(grpo_size=4, prompt_key=("collector", "group_id")),
    )
    source = PromptSource([{"query": f"question {i}", "answer": i} for i in range(3)], repeats=4, epochs=1)
    with LLMCollector(
        source.env(lambda: make_env(turns)),
        make_policy(vllm_llm, tokenizer, prompt_log_probs),
        num_envs=6,
        groups_per_batch=3,
    ) as collector:
        [batch] = list(collector)
    assert len(split_trajectories(batch)) == 12
    assert [turn.item() for turn in batch["collector", "group_id"]] == [g for g in range(3) for _ in range(4 * turns)]
    buffer.extend(batch)
    assert len(buffer) == 12 * turns
    for minibatch in buffer:
        out = loss(minibatch)
        assert out.loss_objective.isfinite() and out.loss_objective.requires_grad
        # The engine's weights are the model's: the importance ratio is 1.
        torch.testing.assert_close(out.kl_approx, torch.zeros(()), atol=1e-4, rtol=0)
        out.loss_objective.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert batch["collector", "group_index"].tolist() == [i for _ in range(3) for i in range(4) for _ in range(turns)]
