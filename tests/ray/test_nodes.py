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

from torchrl_llm import LLMCollector

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


def read_until(target: Any, rows: list[Any], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 3 * PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        rows.extend(target.get(timeout=PATIENCE).unbind(0))
