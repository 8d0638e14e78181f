"""What a policy that is rebuilt gets: the newest weights under their version, never refused ones, by whatever way."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fakes import PATIENCE, ScriptedEnv, assert_settled
from tensordict import TensorDictBase
from test_lag import Module, weights
from test_weight_transports import Updater

from torchrl_llm import LLMCollector, PolicyError
from torchrl_llm.kept_weights import KeptWeights
from torchrl_llm.policies.weights_module import ModuleTarget


class Weak:
    """Builds modules; the newest one raises when it is told to, once, and is rebuilt."""

    def __init__(self) -> None:
        self.fails = threading.Event()
        self.built: list[Module] = []

    def __call__(self) -> Module:
        fails = self.fails

        class Failing(Module):
            def forward(self, td: TensorDictBase) -> TensorDictBase:
                if fails.is_set():
                    fails.clear()
                    raise RuntimeError("boom")
                return super().forward(td)

        self.built.append(Failing())
        return self.built[-1]


def collector_of(make_policy: Any, **options: Any) -> LLMCollector:
    return LLMCollector(ScriptedEnv, make_policy, num_envs=1, steps_per_batch=1, on_error="restart", **options)


def read(collector: LLMCollector, count: int) -> list[tuple[str, int]]:
    """The answers of the next rows, each with its version; fails instead of reading for ever."""
    found: list[tuple[str, int]] = []
    failures: list[BaseException] = []

    def go() -> None:
        try:
            while len(found) < count:
                [row] = next(collector)
                found.append((row["answer"], int(row["collector", "policy_version"])))
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=go, daemon=True)
    reader.start()
    reader.join(PATIENCE)
    if reader.is_alive():
        collector.shutdown(timeout=PATIENCE)
        reader.join(PATIENCE)
        pytest.fail(f"the reader waits for ever, after {found}")
    if failures:
        raise failures[0]
    return found


def test_weights_whose_switch_failed_are_not_those_of_the_rebuilt_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    make_policy = Weak()
    stage = ModuleTarget.stage

    def stage_what_fails(self: ModuleTarget, given: Any) -> Any:
        stage(self, given)
        return lambda version: 1 / 0

    with collector_of(make_policy) as collector:
        collector.update_policy_weights_(weights(3))
        monkeypatch.setattr(ModuleTarget, "stage", stage_what_fails)
        with pytest.raises(PolicyError, match="the switch to version 2 failed half way in Failing"):
            collector.update_policy_weights_(weights(7))
        monkeypatch.setattr(ModuleTarget, "stage", stage)
        assert read(collector, 4) == [("3", 1)] * 4
        assert len(make_policy.built) == 2
        assert collector.policy_version == 1
    assert_settled(collector.stats())


def test_weights_that_one_of_two_policies_took_are_those_of_the_other_when_it_is_rebuilt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_policies = [Weak(), Weak()]
    stage = ModuleTarget.stage

    def stage_one(self: ModuleTarget, given: Any) -> Any:
        switch = stage(self, given)
        return switch if self._module is make_policies[0].built[0] else lambda version: 1 / 0

    with LLMCollector(
        [ScriptedEnv, ScriptedEnv], make_policies, steps_per_batch=1, on_error="restart", route="sticky"
    ) as collector:
        monkeypatch.setattr(ModuleTarget, "stage", stage_one)
        with pytest.raises(PolicyError, match="failed half way"):
            collector.update_policy_weights_(weights(7))
        monkeypatch.setattr(ModuleTarget, "stage", stage)
        assert set(read(collector, 8)[-4:]) == {("7", 1)}
        assert [len(maker.built) for maker in make_policies] == [1, 2]
        assert collector.policy_version == 1


def test_weights_for_which_no_policy_came_to_rest_are_not_those_of_the_rebuilt_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_policy = Weak()
    with collector_of(make_policy) as collector:
        collector.update_policy_weights_(weights(3))

        def refuse(self: ModuleTarget, mode: str) -> Any:
            raise RuntimeError("not now")

        with monkeypatch.context() as patch:
            patch.setattr(ModuleTarget, "hold", refuse)
            with pytest.raises(RuntimeError, match="not now"):
                collector.update_policy_weights_(weights(7))
        make_policy.fails.set()
        assert read(collector, 3) == [("3", 1)] * 3
        assert len(make_policy.built) == 2


def test_a_restored_version_outlives_a_rebuild() -> None:
    """Nobody has pushed weights since: the policy has its constructor's, under the version of the saved state."""
    with collector_of(Weak()) as first:
        for version in (1, 2, 3):
            first.update_policy_weights_(weights(version))
        state = first.state_dict()
    make_policy = Weak()
    with collector_of(make_policy, max_policy_lag=0) as collector:
        collector.load_state_dict(state)
        assert read(collector, 1) == [("0", 3)]
        make_policy.fails.set()
        assert read(collector, 3) == [("0", 3)] * 3
        assert len(make_policy.built) == 2
        assert collector.policy_version == 3
        collector.update_policy_weights_(weights(4))
        assert collector.policy_version == 4
        assert read(collector, 2)[-1] == ("4", 4)


class UpdaterOfTheNewest(Updater):
    """Writes into the policy that was built last."""

    def __init__(self, maker: Weak) -> None:
        super().__init__()
        self._maker = maker

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
        super()._sync_weights_with_worker(worker_id=worker_id, server_weights=server_weights)
        self._maker.built[-1].load_state_dict(dict(server_weights))


def test_a_transport_is_called_again_for_a_policy_that_is_rebuilt() -> None:
    make_policy = Weak()
    updater = UpdaterOfTheNewest(make_policy)
    with collector_of(make_policy, weight_updater=updater, max_policy_lag=0) as collector:
        make_policy.fails.set()
        assert read(collector, 1) == [("0", 0)]  # rebuilt before anything was sent
        assert updater.calls == []
        for version in (1, 2, 3):
            collector.update_policy_weights_(weights(version))
        make_policy.fails.set()
        assert read(collector, 3) == [("3", 3)] * 3
        assert [float(call["weight"]) for call in updater.calls] == [1.0, 2.0, 3.0, 3.0]
        assert collector.policy_version == 3
        assert collector.stats()["weight_updates"] == 3
        assert collector.stats()["policy_restarts"] == 2
    assert_settled(collector.stats())


@pytest.mark.parametrize("fault", ["iterator", "transport"])
def test_a_policy_that_cannot_have_the_newest_weights_again_ends_the_collection(fault: str) -> None:
    make_policy = Weak()
    updater = UpdaterOfTheNewest(make_policy)
    with collector_of(make_policy, weight_updater=updater) as collector:
        collector.update_policy_weights_(iter(weights(1).items()) if fault == "iterator" else weights(1))
        assert read(collector, 1) == [("1", 1)]
        make_policy.fails.set()
        updater.error = RuntimeError("no network")
        message = {"iterator": "as an iterator, which the collector's transport has used up", "transport": "no network"}
        with pytest.raises(PolicyError, match=f"policy 0 cannot be rebuilt: PolicyError: .*{message[fault]}"):
            read(collector, 3)
        assert len(updater.calls) == (1 if fault == "iterator" else 2)


def test_what_was_sent_for_each_model_is_kept() -> None:
    kept = KeptWeights()
    for source, arguments in [(1, {"model_id": "a"}), (2, {"model_id": "b"}), (3, {"model_id": "a"}), (4, {})]:
        kept = kept.sent_by(source, arguments)
    assert kept.to_send_again() == [(2, {"model_id": "b"}), (3, {"model_id": "a"}), (4, {})]
