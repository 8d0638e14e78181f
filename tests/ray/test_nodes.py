"""A cluster of several nodes on this machine, one of which leaves."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

import cluster_settings
import fakes
import pytest
from fakes import PATIENCE, ScriptedEnv, assert_conserved, assert_settled, echo
from test_faults import wait_until
from test_groups import Answered
from test_groups import echo as prompt_echo

from torchrl_llm import LLMCollector, PromptSource

pytestmark = pytest.mark.slow


def test_a_node_that_leaves_takes_its_workers_and_the_others_go_on() -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        leaving = cluster.add_node(num_cpus=1, resources={"second": 1})
        options = cluster_settings.settings(None)
        ray.init(address=cluster.address, **options)
        collector = LLMCollector(
            [lambda: ScriptedEnv(fakes.numbered("a")), lambda: ScriptedEnv(fakes.numbered("b"))],
            echo, steps_per_batch=2, backend="ray", resources=[{}, {"second": 1}], max_restarts=1,
        )  # fmt: skip
        with collector:
            collector.start(target := queue.Queue(maxsize=2))
            rows: list[Any] = []
            read_until(target, rows, lambda: set(fakes.ids(rows, "worker_id")) == {0, 1})
            cluster.remove_node(leaving)
            read_until(target, rows, lambda: collector.stats()["worker_restarts"] == 1)
            assert collector.stats()["workers"][1]["state"] == "starting", "there is no place for it now"
            count = len(rows)
            read_until(target, rows, lambda: len(rows) >= count + 10)
            assert set(fakes.ids(rows[-4:], "worker_id")) == {0}
            assert_conserved(collector.stats())
            cluster.add_node(num_cpus=1, resources={"second": 1})
            read_until(target, rows, lambda: collector.stats()["workers"][1]["state"] == "collecting")
        assert_settled(collector.stats())
        assert len(set(fakes.ids(rows, "traj_ids"))) == len(rows)
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_batches_that_are_lost_with_a_node_on_their_way_to_a_ray_queue_are_made_again() -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        leaving = cluster.add_node(num_cpus=1, resources={"second": 1})
        ray.init(address=cluster.address, **cluster_settings.settings(None))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        target = Queue(maxsize=1, actor_options={"num_cpus": 0, "scheduling_strategy": here})
        # So large that a batch stays on the node where it was made until the queue fetches it.
        source = PromptSource([{"text": f"{index} " + "x" * 300_000} for index in range(20)], epochs=1)
        collector = LLMCollector(
            source.env(lambda: Answered(1)), prompt_echo, num_workers=2, num_cpus=0.5, steps_per_batch=1,
            resources=[{}, {"second": 1}], prefetch=4, backend="ray",
        )  # fmt: skip
        texts: list[str] = []
        with collector:
            collector.start(target)
            # The queue is full; the driver waits for room with one batch, and each worker's next has arrived.
            wait_until(target.full)
            wait_until(lambda: min(s["turns_finished"] for s in collector.call_workers("stats").values()) >= 3)
            wait_until(lambda: all(member.taking.done() for member in collector._fleet._members.values()))
            cluster.remove_node(leaving)
            cluster.add_node(num_cpus=1, resources={"second": 1})
            while (item := target.get(timeout=3 * PATIENCE)) is not None:
                texts += [row["text"].split()[0] for row in item.unbind(0)]
            collector.join(PATIENCE)
        stats = collector.stats()
        assert_settled(stats)
        assert sorted(texts, key=int) == [str(index) for index in range(20)], "each prompt once"
        assert stats["turns_lost_with_workers"] >= 1
    finally:
        ray.shutdown()
        cluster.shutdown()


def read_until(target: Any, rows: list[Any], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 3 * PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        rows.extend(target.get(timeout=PATIENCE).unbind(0))
