"""``max_policy_lag`` over a cluster, on real Ray: what is delivered is fresh, and what was too old is made again."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from typing import Any

import pytest
from fakes import PATIENCE, ScriptedEnv, assert_conserved, assert_settled
from test_faults import pid_of, wait_until
from test_groups import Answered, prompts
from test_ray_prompts import members
from test_ray_weights import telling_policy, weights

from torchrl_llm import LLMCollector, PromptSource

pytestmark = pytest.mark.slow


def assert_fresh(batch: Any, current: int, allowed: int) -> None:
    """No trajectory began more than ``allowed`` versions before; answers tell the version that made them."""
    for row in batch.unbind(0):
        version = int(row["collector", "policy_version"])
        assert row["answer"] == f"w{version}"
        if int(row["collector", "step"]) == 0:
            assert current - version <= allowed


def run_ahead(collector: Any, turns: int) -> None:
    """Waits until each worker has finished so many turns beyond what the driver has read."""
    wait_until(lambda: all(s["turns_finished"] >= turns for s in collector.call_workers("stats").values()))


@pytest.mark.parametrize(
    ("unit", "affinity"), [("trajectories_per_batch", True), ("groups_per_batch", True), ("groups_per_batch", False)]
)
def test_nothing_too_old_is_delivered_and_every_member_comes_once(ray_cluster: Any, unit: str, affinity: bool) -> None:
    source = PromptSource(prompts(6), repeats=2, epochs=1)
    collector = LLMCollector(
        source.env(lambda: Answered(1, length=lambda prompt: 1 + int(prompt[1:]) % 2)), telling_policy(), num_envs=2,
        num_workers=2, max_policy_lag=1, group_affinity=affinity, backend="ray", **{unit: 2},
    )  # fmt: skip
    with collector:
        rows = list(next(collector).unbind(0))
        # Both run ahead with weights that are soon too old.
        run_ahead(collector, 2)
        for version in (1, 2):
            collector.update_policy_weights_(weights(version))
        for batch in collector:
            current = collector.policy_version
            assert_fresh(batch, current, allowed=1)
            rows += batch.unbind(0)
            assert_conserved(collector.stats())
            collector.update_policy_weights_(weights(current + 1))
        stats = collector.stats()
    assert members(rows) == {(f"q{group}", group, index): 1 for group in range(6) for index in range(2)}
    assert stats["recorded_by_reason"]["stale"] >= 1
    assert stats["stale_trajectories"] == stats["recorded_by_reason"]["stale"]
    assert stats["delivered"] == 12
    assert_settled(collector.stats())


def test_dry_workers_go_on_in_the_same_process_when_stale_prompts_come_back(ray_cluster: Any) -> None:
    source = PromptSource(prompts(4), epochs=1)
    collector = LLMCollector(
        source.env(Answered), telling_policy(), num_workers=2, trajectories_per_batch=1, prefetch=4, max_policy_lag=0,
        backend="ray",
    )  # fmt: skip
    with collector:
        processes = [pid_of(collector, worker) for worker in (0, 1)]
        rows = list(next(collector).unbind(0))
        wait_until(lambda: sum(s["turns_finished"] for s in collector.call_workers("stats").values()) == 4)
        collector.update_policy_weights_(weights(1))
        for batch in collector:
            assert_fresh(batch, current=1, allowed=0)
            rows += batch.unbind(0)
            assert [pid_of(collector, worker) for worker in (0, 1)] == processes
        stats = collector.stats()
    assert members(rows) == {(f"q{group}", group, 0): 1 for group in range(4)}
    assert stats["recorded_by_reason"] == {"stale": 3}
    assert stats["worker_restarts"] == 0


def test_turns_are_fresh_too_while_another_thread_updates(ray_cluster: Any) -> None:
    collector = LLMCollector(
        ScriptedEnv, telling_policy(), num_workers=2, steps_per_batch=2, max_policy_lag=2, backend="ray"
    )
    target: queue.Queue[Any] = queue.Queue(maxsize=1)
    updated = threading.Event()

    def update() -> None:
        for version in range(1, 31):
            collector.update_policy_weights_(weights(version))
        updated.set()

    with collector:
        collector.start(target)
        trainer = threading.Thread(target=update)
        trainer.start()
        seen = Counter[int]()
        while not updated.is_set() or seen[30] < 4:
            # What is delivered now may lie in the queue for one more update or so: its own version is looked at below.
            batch = target.get(timeout=PATIENCE)
            for row in batch.unbind(0):
                assert row["answer"] == f"w{int(row['collector', 'policy_version'])}"
                seen[int(row["collector", "policy_version"])] += 1
        trainer.join(PATIENCE)
        # From now on nobody updates: what is older than allowed was dropped.
        assert all(v >= 28 for v in seen if v in range(28, 31))
        for _ in range(6):
            assert_fresh(target.get(timeout=PATIENCE), current=30, allowed=2)
    assert_settled(collector.stats())


def test_with_no_lag_allowed_each_batch_is_of_the_newest_version(ray_cluster: Any) -> None:
    with LLMCollector(
        ScriptedEnv, telling_policy(), num_envs=2, steps_per_batch=2, max_policy_lag=0, backend="ray"
    ) as collector:
        for version in range(5):
            if version:
                collector.update_policy_weights_(weights(version))
            batch = next(collector)
            assert [row["answer"] for row in batch.unbind(0)] == [f"w{version}"] * 2
        assert_conserved(collector.stats())
