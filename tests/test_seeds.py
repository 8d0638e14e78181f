"""Seeds: the same trajectories at every run, whatever the scheduling; different answers within a group."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fakes import ScriptedEnv, chat_echo, echo, ids
from tensordict import TensorDictBase
from test_groups import Answered
from test_groups import echo as answer
from torch.utils.data import DataLoader
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm import LLMCollector, PromptSource
from torchrl_llm.seeds import derive

Found = dict[tuple[int, int, int], list[int]]


class Jitter(Transform):
    """Takes another time for each step, so that another order of things comes of it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for _ in range(self._chance.randint(0, 3)):
            torch.rand(100, 100).sum()
        return next_tensordict


def chat(turns: int, seed: int = 0) -> EnvBase:
    env = ChatEnv(batch_size=(1,)).append_transform(StepCounter(max_steps=turns))
    return env.append_transform(Jitter(seed))


def sampled(batches: list[TensorDictBase]) -> Found:
    """The sampled ids of each turn, by (group, index, step)."""
    rows = [row for batch in batches for row in batch.unbind(0)]
    where = zip(ids(rows, "group_id"), ids(rows, "group_index"), ids(rows, "step"), strict=True)
    return {key: row["tokens", "response"].tolist() for key, row in zip(where, rows, strict=True)}


def vllm_policy(llm: Any, tokenizer: Any, **params: Any) -> vLLMWrapper:
    generate = {"max_tokens": 12, "temperature": 1.0, **params}
    return vLLMWrapper(llm, tokenizer=tokenizer, input_mode="history", generate_kwargs=generate)


@pytest.mark.slow
def test_the_set_of_trajectories_is_the_same_at_every_run_on_one_engine(vllm_llm: Any, tokenizer: Any) -> None:
    def run(seed: int | None, slots: int, threads: int, order: str) -> Found:
        source = PromptSource([f"question {i}" for i in range(10)], repeats=4, epochs=1, shuffle=True)
        numbers = iter(range(100))
        with LLMCollector(
            source.env(lambda: chat(2, next(numbers))),
            vllm_policy(vllm_llm, tokenizer),
            num_envs=slots,
            groups_per_batch=3,
            env_threads=threads,
            order=order,
            seed=seed,
        ) as collector:
            return sampled(list(collector))

    first = run(7, 16, 0, "launch")
    assert len(first) == 10 * 4 * 2
    # Members of a group answer differently, though they have one prompt and the collector has one seed.
    assert all(len({tuple(first[group, index, 0]) for index in range(4)}) == 4 for group in range(10))
    for slots, threads, order in ((16, 4, "launch"), (5, 2, "completion"), (16, 1, "launch")):
        assert run(7, slots, threads, order) == first
    assert run(8, 16, 0, "launch") != first
    assert run(None, 16, 0, "launch") != first


def test_a_seed_of_the_policy_gives_different_answers_in_a_group_and_the_same_again_L34(
    vllm_llm: Any, tokenizer: Any
) -> None:
    def run(slots: int) -> Found:
        source = PromptSource(["one question"], repeats=4, epochs=1)
        policy = vllm_policy(vllm_llm, tokenizer)
        policy.sampling_params.seed = 1
        with LLMCollector(source.env(lambda: chat(1)), policy, num_envs=slots, groups_per_batch=1) as collector:
            return sampled(list(collector))

    first = run(4)
    assert len({tuple(tokens) for tokens in first.values()}) == len(first) == 4
    assert run(2) == first


def transformers_policy(model: Any, tokenizer: Any, **generate: Any) -> TransformersWrapper:
    options = {"max_new_tokens": 8, "do_sample": True, **generate}
    return TransformersWrapper(model, tokenizer=tokenizer, input_mode="history", generate_kwargs=options)


@pytest.fixture(scope="module")
def model(tiny_model: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model).eval()


@pytest.mark.parametrize("generate", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}])
def test_a_local_model_answers_the_same_whatever_it_is_batched_with_L80(
    model: Any, tokenizer: Any, generate: dict[str, Any]
) -> None:
    def run(seed: int, slots: int) -> Found:
        source = PromptSource([f"{'long ' * i}question {i}" for i in range(5)], repeats=3, epochs=1)
        with LLMCollector(
            source.env(lambda: chat(2)),
            transformers_policy(model, tokenizer, **generate),
            num_envs=slots,
            groups_per_batch=2,
            seed=seed,
        ) as collector:
            return sampled(list(collector))

    first = run(7, 6)
    assert len(first) == 30
    assert len({tuple(first[0, index, 0]) for index in range(3)}) == 3
    torch.manual_seed(3)
    assert run(7, 1) == run(7, 4) == first
    assert run(8, 6) != first


class Dice(Answered):
    """Rewards by chance; its chance is seeded by ``set_seed`` only."""

    def __init__(self) -> None:
        super().__init__(1)
        self.chance = random.Random()

    def _set_seed(self, seed: int | None) -> None:
        self.chance = random.Random(seed)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        following = super()._step(tensordict)
        following["reward"] = torch.tensor([[self.chance.random()]])
        return following


def test_what_an_env_draws_belongs_to_the_trajectory_and_not_to_its_slot() -> None:
    def run(seed: int, slots: int, threads: int) -> dict[tuple[int, int], float]:
        source = PromptSource([f"q{i}" for i in range(10)], repeats=2, epochs=1)
        with LLMCollector(
            source.env(Dice), answer, num_envs=slots, groups_per_batch=1, env_threads=threads, seed=seed
        ) as collector:
            rows = [row for batch in collector for row in batch.unbind(0)]
        rewards = [row["next", "reward"].item() for row in rows]
        return dict(zip(zip(ids(rows, "group_id"), ids(rows, "group_index"), strict=True), rewards, strict=True))

    first = run(1, 4, 0)
    assert len(set(first.values())) == 20
    assert first == run(1, 2, 2) == run(1, 3, 0)
    assert first != run(2, 4, 0)


def test_set_seed_gives_the_same_order_of_prompts_again_L80() -> None:
    def source_order(seed: int | None, own: int | None = None) -> list[str]:
        source = PromptSource([f"q{i}" for i in range(20)], shuffle=True, epochs=1, seed=own)
        with LLMCollector(source.env(Answered), answer, steps_per_batch=20) as collector:
            if seed is not None:
                assert collector.set_seed(seed) == collector.set_seed(seed) != seed
                assert collector.set_seed(seed, static_seed=True) == seed
            return [row["text"] for row in next(collector).unbind(0)]

    def loader_order(seed: int, slots: int = 1) -> list[str]:
        def make_env() -> EnvBase:
            loader = DataLoader([f"q{i}" for i in range(20)], shuffle=True, collate_fn=lambda b: {"query": b})
            return ChatEnv.from_dataloader(loader, batch_size=(1,)).append_transform(StepCounter(max_steps=1))

        with LLMCollector(make_env, chat_echo, num_envs=slots, steps_per_batch=20 * slots, seed=seed) as collector:
            return [row["history"].prompt[-1].content for row in next(collector).unbind(0)]

    assert source_order(1) == source_order(1) != source_order(2)
    assert source_order(1, own=4) == source_order(2, own=4) == source_order(None, own=4)
    assert loader_order(1) == loader_order(1) != loader_order(2)
    assert sorted(loader_order(1)) == sorted(f"q{i}" for i in range(20))
    two = loader_order(1, slots=2)
    assert two == loader_order(1, slots=2) and two[::2] != two[1::2]


def test_seeds_are_ints_and_differ_by_what_they_are_for() -> None:
    assert len({derive(1), derive(2), derive(1, 0), derive(1, 1), derive(1, 0, 0), derive(-1), derive(2**70)}) == 7
    for seed in (1.5, "7", True):
        with pytest.raises(TypeError, match=f"seed={seed!r} is not allowed: pass an int"):
            LLMCollector(ScriptedEnv, echo, steps_per_batch=1, seed=seed)
    with (
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1) as collector,
        pytest.raises(TypeError, match="seed=None is not allowed"),
    ):
        collector.set_seed(None)
