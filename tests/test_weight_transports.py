"""Weights by the user's own transport: TorchRL's objects and vLLM's weight transfer, called while the policies rest."""

from __future__ import annotations

import copy
import queue
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fakes import PATIENCE, ScriptedEnv, echo
from telling_weights import load_tiny, telling, token_of
from tensordict import TensorDictBase
from test_lag import Module, weights
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.modules.llm import vLLMWrapper
from torchrl.weight_update.weight_sync_schemes import WeightSyncScheme

from torchrl_llm import CollectorError, LLMCollector, PolicyError, VLLMTransfer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    class Updater(WeightUpdaterBase):
        """Writes into the policy, and counts as TorchRL's updaters do."""

        def __init__(self, policy: Module | None = None, error: Exception | None = None) -> None:
            super().__init__()
            self.policy = policy
            self.error = error
            self.calls: list[Any] = []
            self.register_post_hook(lambda: self.collector.increment_version())

        def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
            self.calls.append(server_weights)
            if self.error is not None:
                raise self.error
            if self.policy is not None:
                self.policy.load_state_dict(server_weights)

        def _get_server_weights(self) -> Any:
            return {"weight": torch.tensor(99.0)}

        def _maybe_map_weights(self, server_weights: Any) -> Any:
            return server_weights

        def all_worker_ids(self) -> list[int]:
            return [0]


def test_a_weight_updater_is_called_once_per_update_and_counted_once() -> None:
    policy = Module()
    updater = Updater(policy)
    with LLMCollector(ScriptedEnv(), policy, steps_per_batch=1, weight_updater=updater) as collector:
        assert updater.collector is collector
        for version in (1, 2, 3):
            collector.update_policy_weights_(weights(version))
            assert collector.policy_version == version == len(updater.calls)
            rows = [next(collector)[0] for _ in range(3)]
            assert [row["answer"] for row in rows[1:]] == [str(version)] * 2
            assert int(rows[-1]["collector", "policy_version"]) == version
        with pytest.raises(ValueError, match="model_id='actor' is not allowed with weight_updater="):
            collector.update_policy_weights_(weights(4), model_id="actor")
        with pytest.raises(CollectorError, match=r"push weights by collector.update_policy_weights_"):
            updater.push_weights(policy_or_weights=weights(4), worker_ids=0)


@pytest.mark.parametrize("lag", [None, 0])
def test_a_callable_without_weights_has_the_version_that_was_sent(lag: int | None) -> None:
    """It may well use what the transport has sent, and its data would be too old for ever under version 0."""
    updater = Updater()
    with LLMCollector(ScriptedEnv(), echo, steps_per_batch=1, weight_updater=updater, max_policy_lag=lag) as collector:
        for version in (1, 2, 3):
            collector.update_policy_weights_(weights(version))
        target: queue.Queue[Any] = queue.Queue()
        collector.start(target)
        rows = [target.get(timeout=PATIENCE)[0] for _ in range(4)]
        assert {int(row["collector", "policy_version"]) for row in rows[1:]} == {3}
        assert collector.policy_version == 3


def test_a_callable_without_weights_rests_while_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, asked, calls = threading.Event(), threading.Event(), []

    def slow(td: TensorDictBase) -> TensorDictBase:
        inside.set()
        assert asked.wait(PATIENCE)
        calls.append("answered")
        return echo(td)

    updater = Updater()
    updater.register_post_hook(lambda: calls.append("sent"))
    with LLMCollector(ScriptedEnv(), slow, steps_per_batch=1, weight_updater=updater) as collector:
        collector.start(queue.Queue())
        assert inside.wait(PATIENCE)
        runner = collector._pool.runners[0]
        hold = runner.hold
        monkeypatch.setattr(runner, "hold", lambda mode: (hold(mode), asked.set())[0])
        collector.update_policy_weights_(weights(1))
        assert calls[:2] == ["answered", "sent"]


def test_a_transport_that_fails_ends_the_collection_and_names_what_is_given_up() -> None:
    updater = Updater(error=RuntimeError("no network"))
    with LLMCollector(ScriptedEnv(), Module(), steps_per_batch=1, weight_updater=updater) as collector:
        next(collector)
        with pytest.raises(PolicyError, match=r"failed half way in Module \(RuntimeError: no network\).*weights: none"):
            collector.update_policy_weights_(weights(1))
        assert collector.policy_version == 0
        with pytest.raises(PolicyError, match="no network"):
            for _ in range(3):
                next(collector)


class Scheme(WeightSyncScheme):
    """Records how it is called."""

    def __init__(self, policy: Module) -> None:
        super().__init__()
        self.policy = policy
        self.calls: list[Any] = []

    def _init_on_sender_impl(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        self.calls.append(("init", model_id, type(context).__name__))

    def _init_on_receiver_impl(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError

    def _setup_connection_and_weights_on_sender_impl(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("connect",))

    def create_transport(self, **kwargs: Any) -> Any:
        raise AssertionError

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        self.calls.append(("send", worker_ids))
        self.policy.load_state_dict(weights)


def test_weight_sync_schemes_are_called_as_torchrls_collectors_call_them() -> None:
    policy = Module()
    scheme = Scheme(policy)
    with LLMCollector(ScriptedEnv(), policy, steps_per_batch=1, weight_sync_schemes={"policy": scheme}) as collector:
        assert scheme.calls == [("init", "policy", "LLMCollector"), ("connect",)]
        collector.update_policy_weights_(weights(1))
        collector.update_policy_weights_(weights_dict={"policy": weights(2)}, worker_ids=[0])
        assert scheme.calls[2:] == [("send", None), ("send", [0])]
        assert collector.policy_version == 2
        assert next(collector)[0]["answer"] == "2"
        with pytest.raises(KeyError, match=r"no weight_sync_schemes for \['critic'\]"):
            collector.update_policy_weights_(weights(3), model_id="critic")
        with pytest.raises(ValueError, match="weights_dict= is not allowed together"):
            collector.update_policy_weights_(weights(3), weights_dict={"policy": weights(3)})


@pytest.mark.parametrize(
    "arguments",
    [{"weight_updater": 3}, {"weight_updater": dict}, {"weight_sync_schemes": [1]}, {"weight_sync_schemes": {}}],
)
def test_what_is_no_transport_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(arguments))):
        LLMCollector(ScriptedEnv, Module(), steps_per_batch=1, **arguments)


def test_only_one_transport_is_taken_and_others_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="were both passed"):
        LLMCollector(
            ScriptedEnv, Module(), steps_per_batch=1, weight_updater=Updater(), weight_sync_schemes={"policy": 1}
        )
    with (
        LLMCollector(ScriptedEnv(), Module(), steps_per_batch=1) as collector,
        pytest.raises(TypeError, match="no weight_updater="),
    ):
        collector.update_policy_weights_(weights(1), worker_ids=[0])


# vLLM's weight transfer, on a real engine, with a transport through this process's memory


class Trainer:
    """vLLM's trainer side, as its NCCL and IPC ones are made: it drives the engines by the client."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.state: dict[str, torch.Tensor] = {}
        client.init_weight_transfer_engine({"secret": 1})

    def send_weights(self) -> None:
        MEMORY.clear()
        MEMORY.update(self.state)
        self.client.start_weight_update()
        self.client.update_weights({"names": list(self.state)})
        self.client.finish_weight_update()


MEMORY: dict[str, torch.Tensor] = {}


@pytest.fixture(scope="session")
def transfer_engine(tiny_model: str) -> Iterator[Any]:
    from engine_settings import ENGINE_SETTINGS
    from vllm import LLM
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    @dataclass
    class Init(WeightTransferInitInfo):
        secret: int = 0

    @dataclass
    class Update(WeightTransferUpdateInfo):
        names: Any = None

    class ByMemory(WeightTransferEngine):
        init_info_cls = Init
        update_info_cls = Update

        def init_transfer_engine(self, init_info: Init) -> None:
            assert init_info.secret == 1

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Update) -> None:
            self.model.load_weights([(name, MEMORY[name]) for name in update_info.names])

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    name = "torchrl_llm-test-memory"
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, ByMemory)
    llm = LLM(tiny_model, weight_transfer_config=WeightTransferConfig(backend=name), **ENGINE_SETTINGS)
    yield llm
    llm.llm_engine.engine_core.shutdown()


class Engine:
    """Records what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def collective_rpc(self, method: str, **arguments: Any) -> None:
        self.calls.append(method)


def test_vllms_trainer_side_is_made_anew_when_an_engine_is_rebuilt() -> None:
    trainers: list[Trainer] = []
    ended: list[Trainer] = []

    class Ending(Trainer):
        def shutdown(self) -> None:
            ended.append(self)

    def make_trainer(client: Any) -> Trainer:
        trainers.append(Ending(client))
        return trainers[-1]

    once = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
    transfer, first, kept = VLLMTransfer(make_trainer), Engine(), Engine()
    for _ in range(2):
        transfer.engines = [first, kept]
        transfer.send(None, {})
    assert first.calls == kept.calls == [*once, *once[1:]]
    assert len(trainers) == 1
    transfer.engines = []
    dead, last = weakref.ref(first), Engine()
    del first
    assert dead() is None  # nobody keeps the engine that was replaced
    with pytest.raises(RuntimeError, match="is gone"):
        trainers[0].client.start_weight_update()
    transfer.engines = [last, kept]
    transfer.send(None, {})
    assert last.calls == once
    assert kept.calls == [*once, *once[1:], *once]
    assert (len(trainers), ended) == (2, [trainers[0]])


def test_vllms_transfer_reaches_a_policy_that_is_rebuilt(transfer_engine: Any, tiny_model: str) -> None:
    """Two vllm.LLM objects, with the same engine behind them."""
    original = load_tiny(tiny_model)
    made: list[Any] = []

    def make_policy() -> Any:
        made.append(copy.copy(transfer_engine))
        generate = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
        return vLLMWrapper(made[-1], input_mode="text", generate_kwargs=generate)

    clients: list[Any] = []

    def make_trainer(client: Any) -> Trainer:
        clients.append(client)
        trainer = Trainer(client)
        trainer.state = telling(original, 5)
        return trainer

    with LLMCollector(
        ScriptedEnv,
        make_policy,
        num_envs=1,
        steps_per_batch=1,
        weight_updater=VLLMTransfer(make_trainer),
        on_error="restart",
    ) as collector:
        collector.update_policy_weights_()
        next(collector)
        runner = collector._pool.runners[0]
        runner._engine._command(lambda: runner._engine.fail(RuntimeError("died")))
        rows = [next(collector)[0] for _ in range(4)]
        assert len(made) == len(clients) == 2
        assert clients[1]._engines == [made[1]]
        for row in rows[-2:]:
            assert set(row["tokens"].response.tolist()) == {token_of(5)}
            assert int(row["collector", "policy_version"]) == 1


def test_vllms_weight_transfer_runs_while_the_engine_rests(transfer_engine: Any, tiny_model: str) -> None:
    original = load_tiny(tiny_model)
    trainers: list[Trainer] = []

    def make_trainer(client: Any) -> Trainer:
        trainers.append(Trainer(client))
        trainers[0].state = telling(original, 1)
        return trainers[0]

    generate = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    policy = vLLMWrapper(transfer_engine, input_mode="text", generate_kwargs=generate)
    envs = [ScriptedEnv() for _ in range(3)]
    with LLMCollector(
        envs, policy, steps_per_batch=1, weight_updater=VLLMTransfer(make_trainer), track_token_versions=True
    ) as collector:
        collector.update_policy_weights_()
        for version in range(2, 8):
            trainers[0].state = telling(original, version)
            collector.update_policy_weights_()
            assert collector.policy_version == version
            for _ in range(3):
                [row] = next(collector)
                versions = row["collector", "token_versions"].tolist()
                assert row["tokens"].response.tolist() == [token_of(v) for v in versions]
        assert len(trainers) == 1
        with pytest.raises(ValueError, match="has its own source"):
            collector.update_policy_weights_(original)
