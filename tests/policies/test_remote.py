"""The runner for engines that live elsewhere, on Ray actors: scripted ones for timing and faults, and real vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_settings import ENGINE_SETTINGS
from fakes import ScriptedEnv, assert_conserved, ids
from models import load_tokenizer
from telling_weights import check_answer, load_tiny, perturbed, telling, token_of
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


def updatable_engine_class() -> Any:
    class Engine:
        """Says its weight ``w`` twice, once at the beginning of a call and once at its end, which ``go_on`` allows."""

        def __init__(self) -> None:
            import asyncio

            self.open = asyncio.Event()
            self.begin_anew()

        def begin_anew(self) -> None:
            self.weight = 0
            self.calls = 0
            self.open.set()

        async def generate(self, prompts: list[Any], sampling_params: Any = None) -> list[Any]:
            from vllm.outputs import CompletionOutput, RequestOutput

            self.calls += 1
            first = self.weight
            await self.open.wait()
            done = CompletionOutput(0, "", [100 + first, 100 + self.weight], 0.0, None, finish_reason="length")
            return [RequestOutput("r", None, prompts[0]["prompt_token_ids"], None, [done], finished=True)]

        async def update_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            [(_, tensor)] = weights
            if int(tensor) == 13:
                raise RuntimeError("an unlucky weight")
            self.weight = int(tensor)

        async def get_model_metadata(self) -> dict[str, Any]:
            return {"w": (torch.int64, torch.Size([]))}

        async def stop(self) -> None:
            self.open.clear()

        async def go_on(self) -> None:
            self.open.set()

        async def calls_so_far(self) -> int:
            return self.calls

        async def die(self) -> None:
            import os

            os._exit(1)

    return Engine


class Handle:
    """What torchrl's wrapper takes for a Ray actor: it looks for ``generate`` and ``remote``."""

    remote = None

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actor, name)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def actor(cluster: None) -> Any:
    actor = ray.remote(engine_class()).options(max_concurrency=IN_FLIGHT, num_cpus=0).remote()
    ray.get(actor.__ray_ready__.remote())
    return actor


@pytest.fixture(scope="module")
def shared_updatable(cluster: None) -> Any:
    return start_updatable()


@pytest.fixture(scope="module")
def another_updatable(cluster: None) -> Any:
    """For the last two tests: one takes the place of the other, and dies, too."""
    return start_updatable()


@pytest.fixture
def updatable(shared_updatable: Any) -> Any:
    """An actor that takes weights, with its first ones."""
    ray.get(shared_updatable.begin_anew.remote())
    return shared_updatable


def start_updatable() -> Any:
    actor = ray.remote(updatable_engine_class()).options(num_cpus=0).remote()
    ray.get(actor.__ray_ready__.remote())
    return actor


def policy_of(actor: Any, tiny_model: str, **generate: Any) -> Any:
    return vLLMWrapper(
        Handle(actor),
        tokenizer=load_tokenizer(tiny_model),
        input_mode="text",
        generate_kwargs=generate,
        return_log_probs=bool(generate),
    )


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


def test_an_actor_without_a_way_to_give_it_weights_is_told(actor: Any, tiny_model: str) -> None:
    policy = vLLMWrapper(Handle(actor), tokenizer=load_tokenizer(tiny_model), input_mode="history")
    with (
        LLMCollector(env, policy, steps_per_batch=1) as collector,
        pytest.raises(TypeError, match="has no way to take weights"),
    ):
        collector.update_policy_weights_({"w": torch.tensor(1)})


def in_flight(actor: Any, calls: int) -> None:
    """Waits until an actor has been given so many calls."""
    while ray.get(actor.calls_so_far.remote()) < calls:
        pass


def responses(batch: Any) -> list[list[int]]:
    return [row["tokens"].response.tolist() for row in batch.unbind(0)]


def update_while_in_flight(collector: LLMCollector, actor: Any, change: Callable[[], None], waits: bool) -> Any:
    """Carries out an update while two calls are in flight, and then lets them end; returns the batch of the two."""
    ray.get(actor.stop.remote())
    batches: list[Any] = []
    reader = threading.Thread(target=lambda: batches.append(next(collector)))
    reader.start()
    in_flight(actor, 2)
    updater = threading.Thread(target=change)
    updater.start()
    if waits:
        updater.join(0.2)
        assert updater.is_alive()
    else:
        updater.join()
    ray.get(actor.go_on.remote())
    updater.join()
    reader.join()
    return batches[0]


@pytest.mark.parametrize(
    ("mode", "said", "begin", "end", "discarded"),
    [
        ("continue", [100, 105], 0, 1, 0),
        ("wait", [100, 100], 0, 0, 0),
        ("restart", [105, 105], 1, 1, 0),
    ],
)
def test_an_update_of_an_actor_with_calls_in_flight(
    mode: str, said: list[int], begin: int, end: int, discarded: int, updatable: Any, tiny_model: str
) -> None:
    policy = policy_of(updatable, tiny_model)
    with LLMCollector([ScriptedEnv(), ScriptedEnv()], policy, steps_per_batch=2, update_mode=mode) as collector:
        batch = update_while_in_flight(
            collector,
            updatable,
            lambda: collector.update_policy_weights_({"w": torch.tensor(5)}),
            waits=mode == "wait",
        )
        assert responses(batch) == [said] * 2
        assert ids(batch.unbind(0), "policy_version") == [begin] * 2
        assert ids(batch.unbind(0), "policy_version_end") == [end] * 2
        assert responses(next(collector)) == [[105, 105]] * 2
        assert collector.stats()["tokens_discarded"] == discarded


def test_token_versions_are_refused_where_they_cannot_be_told(updatable: Any, tiny_model: str) -> None:
    policy = policy_of(updatable, tiny_model)
    with LLMCollector(ScriptedEnv(), policy, steps_per_batch=1, track_token_versions=True) as collector:
        with pytest.raises(ValueError, match="pass update_mode='wait' or 'restart'"):
            collector.update_policy_weights_({"w": torch.tensor(5)})
        assert collector.policy_version == 0
        collector.update_policy_weights_({"w": torch.tensor(6)}, update_mode="wait")
        next(collector)
        [row] = next(collector)
        assert row["tokens"].response.tolist() == [106, 106]
        assert row["collector", "token_versions"].tolist() == [1, 1]


def test_weights_that_do_not_fit_the_actors_metadata_change_nothing(updatable: Any, tiny_model: str) -> None:
    with LLMCollector(ScriptedEnv(), policy_of(updatable, tiny_model), steps_per_batch=1) as collector:
        with pytest.raises(ValueError, match=r"'w' has shape \(2,\)"):
            collector.update_policy_weights_({"w": torch.zeros(2, dtype=torch.int64)})
        assert responses(next(collector)) == [[100, 100]]
        assert collector.policy_version == 0


def test_an_actor_whose_update_fails_is_given_up(updatable: Any, tiny_model: str) -> None:
    with LLMCollector(ScriptedEnv(), policy_of(updatable, tiny_model), steps_per_batch=1) as collector:
        next(collector)
        with pytest.raises(PolicyError, match="an unlucky weight"):
            collector.update_policy_weights_({"w": torch.tensor(13)})
        with pytest.raises(PolicyError, match="an unlucky weight"):
            while True:
                next(collector)


def test_a_vllm_llm_in_an_actor_is_updated_through_collective_rpc(cluster: None, tiny_model: str) -> None:
    from vllm import LLM

    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    llm = (
        ray.remote(LLM).options(num_cpus=0, runtime_env={"env_vars": environment}).remote(tiny_model, **ENGINE_SETTINGS)
    )
    original, tokenizer = load_tiny(tiny_model), load_tokenizer(tiny_model)
    policy = policy_of(llm, tiny_model, temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = ["What is the capital of France?", "a river"]
    envs = [ScriptedEnv(prompts * 100) for _ in range(3)]
    with LLMCollector(envs, policy, steps_per_batch=3, track_token_versions=True, update_mode="wait") as collector:
        for row in next(collector).unbind(0):
            check_answer(row, original, tokenizer)
        with pytest.raises(ValueError, match=r"'model\.norm\.weight' is missing"):
            collector.update_policy_weights_(
                (name, w) for name, w in original.state_dict().items() if name != "model.norm.weight"
            )
        new = perturbed(original, 4)
        collector.update_policy_weights_(new)
        fresh = []
        while len(fresh) < 6:
            fresh += [row for row in next(collector).unbind(0) if row["collector", "policy_version"] == 1]
        for row in fresh:
            check_answer(row, new, tokenizer)
        for version in range(2, 8):
            collector.update_policy_weights_(telling(original, version), update_mode=("wait", "restart")[version % 2])
            for row in next(collector).unbind(0):
                if row["collector", "policy_version"] > 1:
                    versions = row["collector", "token_versions"].tolist()
                    assert row["tokens"].response.tolist() == [token_of(v) for v in versions]
        assert collector.policy_version == 7
    ray.kill(llm)


def test_an_actor_that_dies_is_built_anew_with_the_newest_weights(
    updatable: Any, another_updatable: Any, tiny_model: str
) -> None:
    actors = iter([updatable, another_updatable])
    with LLMCollector(
        ScriptedEnv, lambda: policy_of(next(actors), tiny_model), num_envs=3, steps_per_batch=3, on_error="restart"
    ) as collector:
        next(collector)
        collector.update_policy_weights_({"w": torch.tensor(7)})
        updatable.die.remote()
        while collector.stats()["policy_restarts"] == 0:
            next(collector)
        for _ in range(3):
            next(collector)
        assert responses(next(collector)) == [[107, 107]] * 3
        assert_conserved(collector.stats())
        assert ray.get(another_updatable.calls_so_far.remote()) >= 3


def test_the_death_of_the_actor_reaches_the_reader(another_updatable: Any, tiny_model: str) -> None:
    ray.get([another_updatable.begin_anew.remote(), another_updatable.stop.remote()])
    with LLMCollector(ScriptedEnv(), policy_of(another_updatable, tiny_model), steps_per_batch=1) as collector:
        dies = threading.Thread(target=lambda: (in_flight(another_updatable, 1), another_updatable.die.remote()))
        dies.start()
        with pytest.raises(PolicyError, match="ActorDiedError"):
            next(collector)
        dies.join()
        assert_conserved(collector.stats())
