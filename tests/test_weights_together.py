"""Switches of several policies at once: what fails half way, what is gone, and who shares an engine."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
from fakes import PATIENCE, Gate, ScriptedEnv, assert_settled, in_background
from telling_weights import telling, token_of, vllm_policy
from tensordict import TensorDictBase
from test_lag import Module, weights
from torch import nn

from torchrl_llm import CollectorError, LLMCollector, PolicyError
from torchrl_llm.policies.engine import acquire


def test_a_switch_that_fails_half_way_gives_up_what_failed_and_says_who_has_what(
    engine: Any, original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = [vllm_policy(engine, tokens=5), Other(original)]
    envs = [ScriptedEnv() for _ in range(2)]
    with LLMCollector(envs, policies, steps_per_batch=1, route="paired") as collector:
        next(collector)
        rpc = engine.llm_engine.collective_rpc

        def fail(method: Any, *args: Any, **kwargs: Any) -> Any:
            if method == "reload_weights":
                raise RuntimeError("out of memory")
            return rpc(method, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(engine.llm_engine, "collective_rpc", fail)
            with pytest.raises(
                PolicyError, match=r"version 1 failed half way in vllm.LLM \(RuntimeError: out of memory\).*: Other"
            ):
                collector.update_policy_weights_(telling(original, 1))
        with pytest.raises(PolicyError, match="policy 0 failed: RuntimeError: out of memory"):
            for _ in range(20):
                next(collector)
    assert_settled(collector.stats())
    engine.llm_engine.abort_request(list(engine.llm_engine.output_processor.external_req_ids))


class Other(nn.Module):
    """A policy with the same weights as the engine's, which answers without them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        for name, child in type(model)(model.config).named_children():
            self.add_module(name, child)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        for row in td.unbind(0):
            row["answer"] = "-"
        return td


def test_two_collectors_over_one_engine_share_the_version_of_its_weights(engine: Any, original: Any) -> None:
    with (
        LLMCollector(ScriptedEnv(), vllm_policy(engine, tokens=5), steps_per_batch=1) as one,
        LLMCollector(ScriptedEnv(), vllm_policy(engine, tokens=5), steps_per_batch=1) as other,
    ):
        one.update_policy_weights_(telling(original, 1))
        assert one.policy_version == other.policy_version == 1
        [row] = next(other)
        assert set(row["tokens"].response.tolist()) == {token_of(1)}
        assert int(row["collector", "policy_version"]) == 1
        other.update_policy_weights_(telling(original, 2))
        assert one.policy_version == other.policy_version == 2


def test_what_is_handed_over_does_not_age_by_an_update_of_a_collector_that_shares_the_engine(
    engine: Any, original: Any
) -> None:
    gate = Gate()
    seen: list[tuple[int, int]] = []

    class Watched(queue.Queue[Any]):
        """Holds the third batch in its ``put``, and notes the version that a batch has and the collector's."""

        def put(self, item: Any, *args: Any, **kwargs: Any) -> None:
            if item is not None:
                if len(seen) == 2:
                    gate()
                seen.append((int(item[0]["collector", "policy_version"]), aged.policy_version))
            super().put(item, *args, **kwargs)

    with (
        LLMCollector(ScriptedEnv(), vllm_policy(engine, tokens=5), steps_per_batch=1) as updated,
        LLMCollector(ScriptedEnv(), vllm_policy(engine, tokens=5), steps_per_batch=1, max_policy_lag=0) as aged,
    ):
        target = Watched()
        aged.start(target)
        gate.wait()
        updating = in_background(lambda: updated.update_policy_weights_(telling(original, 1)))
        with pytest.raises(TimeoutError):
            updating.result(0.5)
        gate.open()
        updating.result(PATIENCE)
        while (target.get(timeout=PATIENCE))["collector", "policy_version"] != 1:
            pass
    assert all(version == current for version, current in seen), seen


def test_two_policies_over_one_engine_are_switched_once(
    engine: Any, original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    rpc = engine.llm_engine.collective_rpc
    policies = [vllm_policy(engine, tokens=5), vllm_policy(engine, tokens=6)]
    with LLMCollector([ScriptedEnv(), ScriptedEnv()], policies, steps_per_batch=1) as collector:
        monkeypatch.setattr(
            engine.llm_engine, "collective_rpc", lambda method, *a, **k: (calls.append(method), rpc(method, *a, **k))[1]
        )
        collector.update_policy_weights_(telling(original, 1))
        monkeypatch.undo()
    assert calls == ["reload_weights"]


def test_an_engines_thread_cannot_update_and_one_that_is_given_back_holds_nothing(vllm_llm: Any) -> None:
    thread = acquire(vllm_llm)
    caught: list[BaseException] = []

    def from_inside() -> None:
        try:
            thread.hold("continue")
        except RuntimeError as error:
            caught.append(error)

    hold = thread.hold("wait")
    hold.wait()
    hold.run(from_inside)
    hold.release()
    assert "cannot wait for itself" in str(caught[0])
    assert thread.release(time.monotonic() + PATIENCE) == []
    with pytest.raises(RuntimeError, match="was given back"):
        thread.hold("continue").wait()


def test_a_policys_own_call_cannot_update_its_weights() -> None:
    holder: list[LLMCollector] = []

    class Selfish(Module):
        def forward(self, td: TensorDictBase) -> TensorDictBase:
            holder[0].update_policy_weights_(weights(1))
            return td

    with LLMCollector(ScriptedEnv(), Selfish(), steps_per_batch=1) as collector:
        holder.append(collector)
        with pytest.raises(PolicyError, match="cannot update its own weights from its call"):
            next(collector)
        holder.clear()


def test_a_collector_can_be_shut_down_while_an_update_waits() -> None:
    gate = Gate()

    class Slow(Module):
        def forward(self, td: TensorDictBase) -> TensorDictBase:
            gate()
            return super().forward(td)

    collector = LLMCollector(ScriptedEnv(), Slow(), steps_per_batch=1)
    reader = threading.Thread(target=lambda: _read(collector))
    reader.start()
    gate.wait()
    done = threading.Event()
    updater = threading.Thread(target=lambda: (_update(collector), done.set()))
    updater.start()
    [runner] = collector._weights._pool.runners
    deadline = time.monotonic() + PATIENCE
    while not runner._holds:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with pytest.warns(RuntimeWarning, match="could not be interrupted"):
        collector.shutdown(timeout=0.1)
    gate.open()
    updater.join(PATIENCE)
    reader.join(PATIENCE)
    assert done.is_set()
    with pytest.raises(CollectorError, match="was shut down"):
        collector.update_policy_weights_(weights(1))


def _read(collector: LLMCollector) -> None:
    with pytest.raises(CollectorError):
        next(collector)


def _update(collector: LLMCollector) -> None:
    collector.update_policy_weights_(weights(1))


def _await_holds(collector: LLMCollector) -> None:
    [runner] = collector._weights._pool.runners
    deadline = time.monotonic() + PATIENCE
    while not runner._holds:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_a_policys_call_cannot_update_weights_while_another_thread_does(whose: str) -> None:
    """It would wait for the other update, and that one for the end of the call."""
    gate, holder = Gate(), []

    class Selfish(Module):
        def forward(self, td: TensorDictBase) -> TensorDictBase:
            gate()
            holder[0].update_policy_weights_(weights(5))
            return super().forward(td)

    with (
        LLMCollector(ScriptedEnv(), Selfish(), steps_per_batch=1) as collector,
        LLMCollector(ScriptedEnv(), Module(), steps_per_batch=1) as other,
    ):
        holder.append(collector if whose == "its own" else other)
        reading = in_background(lambda: next(collector))
        gate.wait()
        updating = in_background(lambda: collector.update_policy_weights_(weights(1)))
        _await_holds(collector)
        gate.open()
        updating.result(PATIENCE)
        with pytest.raises(PolicyError, match="cannot update its own weights from its call, nor those of others"):
            reading.result(PATIENCE)
        in_background(lambda: other.update_policy_weights_(weights(7))).result(PATIENCE)
        assert other.policy_version == 1
        holder.clear()


def test_a_shutdown_ends_an_update_that_waits_for_a_policy_that_never_returns() -> None:
    gate = Gate()

    class Stuck(Module):
        def forward(self, td: TensorDictBase) -> TensorDictBase:
            gate()
            return super().forward(td)

    collector = LLMCollector(ScriptedEnv(), Stuck(), steps_per_batch=1)
    reading = in_background(lambda: next(collector))
    gate.wait()
    updating = in_background(lambda: collector.update_policy_weights_(weights(1)))
    _await_holds(collector)
    with pytest.warns(RuntimeWarning, match="could not be interrupted"):
        collector.shutdown(timeout=0.1)
    updating.result(PATIENCE)  # the call is still under way
    with LLMCollector(ScriptedEnv(), Module(), steps_per_batch=1) as other:
        in_background(lambda: other.update_policy_weights_(weights(1))).result(PATIENCE)
    gate.open()
    with pytest.raises(CollectorError):
        reading.result(PATIENCE)


def test_two_collectors_of_one_module_share_its_version() -> None:
    module = Module()
    with LLMCollector(ScriptedEnv(), module, steps_per_batch=1) as one:
        one.update_policy_weights_(weights(1))
        with LLMCollector(ScriptedEnv(), module, steps_per_batch=1, max_policy_lag=0) as other:
            assert other.policy_version == 1
            for version, collector in ((2, one), (3, other), (4, one)):
                collector.update_policy_weights_(weights(version))
                assert one.policy_version == other.policy_version == version
                for reader in (one, other):
                    rows = [next(reader)[0] for _ in range(3)][1:]
                    assert [(row["answer"], int(row["collector", "policy_version"])) for row in rows] == [
                        (str(version), version)
                    ] * 2
            with pytest.raises(ValueError, match="version=4 is not allowed: versions grow"):
                other.update_policy_weights_(weights(4), version=4)
        one.update_policy_weights_(weights(5))  # the other one is closed
        assert one.policy_version == 5
    with LLMCollector(ScriptedEnv(), module, steps_per_batch=1) as later:
        assert later.policy_version == 0


def test_a_module_is_not_changed_in_the_middle_of_another_collectors_call() -> None:
    """The module itself looks."""
    module = Module((0.002, 0.0))
    targets: list[queue.Queue[Any]] = [queue.Queue(), queue.Queue()]
    with (
        LLMCollector(ScriptedEnv(), module, steps_per_batch=1) as one,
        LLMCollector(ScriptedEnv(), module, steps_per_batch=1) as other,
    ):
        one.start(targets[0])
        other.start(targets[1])
        for version in range(1, 40):
            one.update_policy_weights_(weights(version))
            for target in targets:
                [row] = target.get(timeout=PATIENCE)
                assert row["answer"] == str(int(row["collector", "policy_version"]))
