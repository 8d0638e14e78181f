"""TorchRL's MCAdvantage and GRPOLoss read a batch of groups as it is."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from dialogs import Feedback
from tensordict import TensorDictBase
from torchrl.data import Composite, LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, Unbounded
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import AutoModelForCausalLM

from torchrl_llm import LLMCollector, PromptSource

GROUP_SIZE = 3
# Of different lengths, so that nothing can be stacked.
QUESTIONS = ["a", "a question that is somewhat longer", "b"]


class LengthReward(Transform):
    """Rewards the characters of an answer, in the shape that torchrl's reward parsers use."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rewards = [float(len(messages[-1].content)) for messages in tensordict["history"].full.unbind(0)]
        return next_tensordict.set("reward", torch.tensor(rewards).view(-1, 1, 1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec


def make_env(turns: int) -> EnvBase:
    env = ChatEnv(batch_size=(1,)).append_transform(StepCounter(max_steps=turns))
    return env.append_transform(LengthReward()).append_transform(Feedback())


def collect(model: Any, tokenizer: Any, turns: int) -> TensorDictBase:
    """Two groups of three trajectories."""
    policy = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="history",
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": 6, "do_sample": True},
    )
    source = PromptSource(QUESTIONS, repeats=GROUP_SIZE)
    make = functools.partial(make_env, turns)
    with LLMCollector(source.env(make), policy, num_envs=5, groups_per_batch=2) as collector:
        batch = next(collector)
    assert batch["collector", "group_id"].tolist() == [0] * (GROUP_SIZE * turns) + [1] * (GROUP_SIZE * turns)
    return batch


def identity(turn: TensorDictBase) -> tuple[int, int]:
    return turn["collector", "traj_ids"].item(), turn["collector", "step"].item()


@pytest.mark.parametrize(("turns", "trajectory_return"), [(1, None), (3, None), (3, "sum")])
@pytest.mark.parametrize("masking_strategy", ["sft", "rlhf"])
def test_advantage_and_loss_of_a_batch_equal_a_hand_computation(
    turns: int, trajectory_return: Any, masking_strategy: Any, tiny_model: str, tokenizer: Any
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    batch = collect(model, tokenizer, turns)
    transform = MCAdvantage(GROUP_SIZE, ("collector", "group_id"), trajectory_return=trajectory_return)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(len(batch)),
        sampler=SamplerWithoutReplacement(),
        batch_size=len(batch),
        transform=transform,
    )
    buffer.extend(batch)
    assert transform.queued_groups == 0
    sample = buffer.sample()

    expected: dict[tuple[int, int], float] = {}
    for group in batch.split(GROUP_SIZE * turns):
        rewards = group["next", "reward"].view(GROUP_SIZE, turns)
        returns = rewards.sum(1, keepdim=True).expand_as(rewards) if trajectory_return else rewards
        spread = returns[:, 0].std() if trajectory_return else returns.std()
        advantages = ((returns - returns.mean()) / spread.clamp_min(1e-6)).flatten().tolist()
        expected.update(zip(map(identity, group.unbind(0)), advantages, strict=True))
    assert len(expected) == len(sample) == 2 * GROUP_SIZE * turns
    for turn in sample.unbind(0):
        assert turn["advantage"].item() == pytest.approx(expected[identity(turn)], abs=1e-5)

    actor = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_model_input=True, return_log_probs=True
    )
    losses = GRPOLoss(actor, masking_strategy=masking_strategy)(sample)
    assert losses.ESS.item() == pytest.approx(1.0, abs=1e-4), "the weights of the model that sampled are all 1"
    assert losses.kl_approx.item() == pytest.approx(0.0, abs=1e-5)
    # With all weights 1 each sampled token contributes its turn's advantage, once: no token of an earlier turn does.
    lengths = {identity(turn): turn["tokens", "response"].numel() for turn in sample.unbind(0)}
    by_hand = -sum(expected[key] * length for key, length in lengths.items()) / sum(lengths.values())
    assert losses.loss_objective.item() == pytest.approx(by_hand, abs=1e-4)
