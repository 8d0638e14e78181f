"""Weights on real Ray: one call, and every worker makes its next tokens with them."""

from __future__ import annotations

import os
import queue
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import PATIENCE, ScriptedEnv, assert_settled
from tensordict import TensorDict
from test_faults import pid_of, wait_until

from torchrl_llm import LLMCollector, RayCollector, WorkerError
from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.member import Member
from torchrl_llm.ray.patience import Patience
from torchrl_llm.ray.roster import SLEEP, WEIGHTS, Roster
from torchrl_llm.ray.weights import ClusterWeights

pytestmark = pytest.mark.slow


def telling_policy() -> Any:
    """A constructor of a policy that answers with its weight."""

    def make() -> Any:
        from torch import nn

        class Telling(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(1))

            def forward(self, td: Any) -> Any:
                for row in td.unbind(0):
                    row["answer"] = f"w{int(self.weight)}"
                return td

        return Telling()

    return make


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1,), float(value))}


def answers(batch: Any) -> list[tuple[int, str, int]]:
    return [
        (int(row["collector", "worker_id"]), row["answer"], int(row["collector", "policy_version"])) for row in batch
    ]


@pytest.mark.parametrize("form", [dict, TensorDict, lambda named: iter(named.items())], ids=["dict", "td", "iterator"])
def test_all_workers_switch_before_the_call_returns(ray_cluster: Any, form: Any) -> None:
    collector = LLMCollector(
        ScriptedEnv, telling_policy(), steps_per_batch=2, num_workers=2, ordered=True, backend="ray"
    )
    assert isinstance(collector, RayCollector)
    with collector:
        collector.update_policy_weights_(form(weights(5)))
        assert collector.policy_version == 1
        assert collector.call_workers(lambda worker: worker.policy_version) == {0: 1, 1: 1}
        rows = [entry for _ in range(6) for entry in answers(next(collector))]
        assert {row[1:] for row in rows} == {("w5", 1)}
        assert {row[0] for row in rows} == {0, 1}
        collector.update_policy_weights_(weights(7), version=10)
        seen = set()
        while seen != {(0, "w7", 10), (1, "w7", 10)}:
            new = set(answers(next(collector)))
            assert {row[1:] for row in new} <= {("w5", 1), ("w7", 10)}
            seen |= {row for row in new if row[2] == 10}
        stats = collector.stats()
        assert (stats["policy_version"], stats["weight_updates"]) == (10, 2)


def test_weights_that_do_not_fit_change_nothing_anywhere(ray_cluster: Any) -> None:
    with LLMCollector(ScriptedEnv, telling_policy(), steps_per_batch=1, num_workers=2, backend="ray") as collector:
        collector.update_policy_weights_(weights(3))
        with pytest.raises(ValueError, match=r"'weight' has shape \(2,\), the policy's is \(1,\)"):
            collector.update_policy_weights_({"weight": torch.zeros(2)})
        with pytest.raises(ValueError, match="version=1 is not allowed: versions grow"):
            collector.update_policy_weights_(weights(4), version=1)
        assert collector.policy_version == 1
        assert {entry[1:] for _ in range(4) for entry in answers(next(collector))} == {("w3", 1)}


def test_workers_that_have_not_switched_are_named(ray_cluster: Any) -> None:
    with LLMCollector(ScriptedEnv, telling_policy(), steps_per_batch=1, num_workers=2, backend="ray") as collector:
        collector.call_workers(lambda worker: None)
        # One worker has newer weights than the driver knows of, and a policy that fits no longer.
        broken = collector._fleet._members[1].life

        def break_one(worker: Any, life: int) -> None:
            if life == broken:
                from torch import nn

                worker._pool.runners[0].policy.weight = nn.Parameter(torch.zeros(3))

        collector._roster.call_each(break_one, lambda life: (life,))
        with pytest.raises(WorkerError, match=r"adopt failed on 1 of 2 workers: worker 1: ValueError") as caught:
            collector.update_policy_weights_(weights(4))
        assert caught.value.failures.keys() == {1}


def test_a_restarted_and_an_added_worker_begin_with_the_newest_weights(ray_cluster: Any) -> None:
    target: queue.Queue[Any] = queue.Queue(maxsize=4)
    collector = LLMCollector(
        ScriptedEnv, telling_policy(), steps_per_batch=1, num_workers=1, num_cpus=0.5, backend="ray"
    )
    with collector:
        collector.update_policy_weights_(weights(2))
        collector.start(target)
        assert answers(target.get(timeout=PATIENCE)) == [(0, "w2", 1)]
        collector.update_policy_weights_(weights(6))
        os.kill(pid_of(collector, 0), signal.SIGKILL)
        [added] = collector.add_workers(1)
        seen: set[tuple[int, str, int]] = set()
        while not seen.issuperset({(0, "w6", 2), (added, "w6", 2)}):
            new = set(answers(target.get(timeout=PATIENCE)))
            assert {row[1:] for row in new} <= {("w2", 1), ("w6", 2)}
            seen |= new
        wait_until(lambda: collector.stats()["worker_restarts"] == 1)
    assert_settled(collector.stats())


def test_an_update_goes_on_without_a_worker_that_is_gone_which_begins_with_the_newest_weights(
    ray_cluster: Any, tmp_path: Path
) -> None:
    def make_env() -> ScriptedEnv:
        # The second process of a worker waits to be built.
        mark = tmp_path / f"built {os.getpid()}"
        if len(list(tmp_path.glob("built *"))) >= 2:
            (tmp_path / "waits").touch()
            while not (tmp_path / "go").exists():
                time.sleep(0.01)
        mark.touch()
        return ScriptedEnv()

    with LLMCollector(make_env, telling_policy(), steps_per_batch=1, num_workers=2, backend="ray") as collector:
        next(collector)
        os.kill(pid_of(collector, 1), signal.SIGKILL)
        collector.update_policy_weights_(weights(1))  # nobody has noticed yet
        while not (tmp_path / "waits").exists():
            next(collector)
        collector.update_policy_weights_(weights(2))  # it is being built
        with pytest.raises(ValueError, match="'weight' has shape"):
            collector.update_policy_weights_({"weight": torch.zeros(2)})
        (tmp_path / "go").touch()
        rows: list[tuple[int, str, int]] = []
        while not any(worker == 1 and version == 2 for worker, _, version in rows):
            rows += answers(next(collector))
        assert {row[1:] for row in rows if row[0] == 1} <= {("w0", 0), ("w2", 2)}, "never with those in between"
        assert collector.stats()["worker_restarts"] == 1


def test_a_saved_version_is_that_of_all_workers_afterwards(ray_cluster: Any) -> None:
    def build() -> LLMCollector:
        return LLMCollector(
            ScriptedEnv, telling_policy(), steps_per_batch=1, num_workers=2, max_policy_lag=1, backend="ray"
        )

    with build() as first:
        first.update_policy_weights_(weights(3), version=7)
        assert answers(next(first))[0][1:] == ("w3", 7)
        state = first.state_dict()
    with build() as second:
        second.load_state_dict(state)
        assert second.policy_version == 7
        assert answers(next(second))[0][1:] == ("w0", 7), "which weights these are is the caller's to say"
        second.update_policy_weights_(weights(4))
        assert second.policy_version == 8
        assert second.call_workers(lambda worker: worker.policy_version) == {0: 8, 1: 8}


def test_a_worker_that_dies_after_a_state_was_loaded_has_the_pushed_weights_again(
    ray_cluster: Any,
) -> None:
    with LLMCollector(ScriptedEnv, telling_policy(), steps_per_batch=1, backend="ray") as collector:
        state = collector.state_dict() | {"policy_version": 7}
        collector.update_policy_weights_(weights(1), version=7)
        collector.load_state_dict(state)
        assert answers(next(collector)) == [(0, "w1", 7)]
        os.kill(pid_of(collector, 0), signal.SIGKILL)
        rows = []
        deadline = time.monotonic() + PATIENCE
        while collector.stats()["worker_restarts"] == 0 or len(rows) < 4:
            assert time.monotonic() < deadline, "it was not restarted"
            rows += answers(next(collector))
        rows += answers(next(collector))  # the ones before may have been on their way
        assert set(rows) == {(0, "w1", 7)}


class Newcomer:
    """What a worker's collector is asked by standing orders."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.weights: Any = None
        self._weights = self

    def update_policy_weights_(self, weights: Any, version: int, **others: Any) -> None:
        self.weights, self.policy_version = others["marked"], version

    def count_from(self, version: int) -> None:
        self.policy_version = max(self.policy_version, version)


def idle_roster() -> Roster:
    """One without workers, which waits for nobody."""
    books = ClusterBooks()
    return Roster(books, Patience(books, None, give_up=lambda member, why: None))


def orders_of(roster: Roster) -> list[Any]:
    """The standing orders that a newcomer gets, in their order."""
    member = Member(worker=0, life=0, actor=None, post=lambda event: None)
    orders = []
    while (order := roster.next_order_for(member)) is not None:
        member.orders.add(order.number)
        orders.append(order)
    return orders


@pytest.mark.parametrize("moves", ["load", "push load", "load push", "push load push", "load push load", "push push"])
def test_a_newcomer_has_the_last_pushed_weights_under_the_clusters_version(moves: str) -> None:
    roster = idle_roster()
    cluster = ClusterWeights(roster, lambda: None)
    pushed, version = None, 0
    for number, move in enumerate(moves.split()):
        version += 5
        if move == "push":
            pushed = number
            cluster.update(None, version, others={"marked": number})
        else:
            cluster.restore(version)
    worker: Any = Newcomer()
    for order in orders_of(roster):
        order.method(worker, *order.arguments_for(0))
    assert (worker.weights, worker.policy_version) == (pushed, version)
    assert cluster.version == version


def test_a_state_with_an_older_version_than_the_weights_does_not_count_back() -> None:
    cluster = ClusterWeights(roster := idle_roster(), lambda: None)
    cluster.update(None, 7, others={"marked": "new"})
    cluster.restore(3)
    worker: Any = Newcomer()
    for order in orders_of(roster):
        order.method(worker, *order.arguments_for(0))
    assert (worker.weights, worker.policy_version, cluster.version) == ("new", 7, 7)


def test_a_newcomer_gets_the_weights_before_it_falls_asleep_whatever_came_first_before() -> None:
    roster = idle_roster()
    cluster = ClusterWeights(roster, lambda: None)
    roster.order(SLEEP, "sleep", lambda life: ())
    roster.order(SLEEP, "wake_up", lambda life: ())
    cluster.update(None, 1)
    roster.order(SLEEP, "sleep again", lambda life: ())
    assert [order.method for order in orders_of(roster)] == [roster._standing[WEIGHTS].method, "sleep again"]
