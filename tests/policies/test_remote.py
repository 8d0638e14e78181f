"""The runner for engines that live elsewhere, on a real Ray actor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from models import load_tokenizer
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import vLLMWrapper

from torchrl_llm import LLMCollector, PolicyError

ray = pytest.importorskip("ray")

IN_FLIGHT = 4


def engine_class() -> Any:
    # Made in a function, since a worker cannot import this module.
    class Engine:
        """Answers no call before ``IN_FLIGHT`` of them are there, each by the last id of its prompt."""

        def __init__(self) -> None:
            self._together = threading.Barrier(IN_FLIGHT)

        def generate(self, prompts: list[Any], sampling_params: Any = None) -> list[Any]:
            from vllm.logprobs import Logprob
            from vllm.outputs import CompletionOutput, RequestOutput

            assert len(prompts) == 1, "one call per request"
            ids = prompts[0]["prompt_token_ids"]
            if len(ids) > 400:
                raise OverflowError(f"{len(ids)} tokens")
            self._together.wait(timeout=60)
            sampled = [ids[-1], 100 + len(ids)]
            if sampling_params.seed is not None:
                sampled.append(sampling_params.seed % 500)
            scores = [{token: Logprob(-0.5 - i, 1, None)} for i, token in enumerate(sampled)]
            done = CompletionOutput(0, "", sampled, -2.0, scores, finish_reason="length")
            return [RequestOutput("r", None, ids, None, [done], finished=True)]

    return Engine


class Handle:
    """What torchrl's wrapper takes for a Ray actor: it looks for ``generate`` and ``remote``."""

    def __init__(self, actor: Any) -> None:
        self.generate = actor.generate
        self.remote = None


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    actor = ray.remote(engine_class()).options(max_concurrency=IN_FLIGHT, num_cpus=0).remote()
    ray.get(actor.__ray_ready__.remote())
    yield actor
    ray.shutdown()


def env(question: str = "hello") -> EnvBase:
    made = ChatEnv.from_dataloader([{"query": [question]}], batch_size=(1,))
    return made.append_transform(StepCounter(max_steps=1))


def test_many_calls_of_a_ray_actor_are_in_flight_at_once(actor: Any, tiny_model: str) -> None:
    policy = vLLMWrapper(Handle(actor), tokenizer=load_tokenizer(tiny_model), input_mode="history")
    with LLMCollector(env, policy, num_envs=IN_FLIGHT, steps_per_batch=IN_FLIGHT, total_steps=IN_FLIGHT) as collector:
        batch = next(collector)
    for turn in batch.unbind(0):
        prompt = turn["tokens", "prompt"].tolist()
        assert turn["tokens", "response"].tolist() == [prompt[-1], 100 + len(prompt)]
        assert turn["log_probs", "response"].tolist() == [-0.5, -1.5]
        assert turn["collector", "finish_reason"] == "length"
    assert sorted(batch["collector", "env_id"].tolist()) == list(range(IN_FLIGHT))


def test_each_call_has_a_seed_of_its_own_that_is_the_same_again(actor: Any, tiny_model: str) -> None:
    def seeds(seed: int) -> list[int]:
        policy = vLLMWrapper(Handle(actor), tokenizer=load_tokenizer(tiny_model), input_mode="history")
        with LLMCollector(
            env, policy, num_envs=IN_FLIGHT, steps_per_batch=IN_FLIGHT, total_steps=IN_FLIGHT, seed=seed
        ) as collector:
            turns = sorted(next(collector).unbind(0), key=lambda turn: int(turn["collector", "env_id"]))
        return [turn["tokens", "response"][-1].item() for turn in turns]

    first = seeds(1)
    assert len(set(first)) == IN_FLIGHT
    assert seeds(1) == first != seeds(2)


def test_an_error_of_the_actor_reaches_the_reader(actor: Any, tiny_model: str) -> None:
    policy = vLLMWrapper(Handle(actor), tokenizer=load_tokenizer(tiny_model), input_mode="history")
    with (
        LLMCollector(lambda: env("long " * 300), policy, steps_per_batch=1) as collector,
        pytest.raises(PolicyError, match="OverflowError"),
    ):
        next(collector)
