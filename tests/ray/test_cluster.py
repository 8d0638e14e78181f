"""What a cluster can hold: told before anybody waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from torchrl_llm.ray.cluster import check_demand


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the nodes of the cluster: their resources, and those of nodes that have left."""

    def become(*nodes: dict[str, float], left: tuple[dict[str, float], ...] = ()) -> None:
        total: dict[str, float] = {}
        for node in nodes:
            for name, amount in node.items():
                total[name] = total.get(name, 0) + amount
        known = [{"Alive": True, "Resources": node} for node in nodes]
        known += [{"Alive": False, "Resources": node} for node in left]
        monkeypatch.setattr(ray, "nodes", lambda: known)
        monkeypatch.setattr(ray, "cluster_resources", lambda: total)

    return become


@pytest.mark.parametrize(
    "demands",
    [
        [{}],
        [{"CPU": 1}, {"CPU": 1, "GPU": 2}, {"CPU": 0.5}],
        [{"CPU": 2, "x": 1}, {"CPU": 1, "GPU": 0.25}],
    ],
)
def test_workers_that_fit_are_let_through(cluster: Any, demands: list[dict[str, float]]) -> None:
    cluster({"CPU": 1, "GPU": 2.0}, {"CPU": 2.0, "x": 1.0})
    check_demand(demands)


def test_a_worker_that_no_node_can_hold_is_refused_although_all_nodes_together_could(cluster: Any) -> None:
    cluster({"CPU": 1.0, "node:a": 1.0}, {"CPU": 1.0, "x": 3.0}, left=({"CPU": 8.0},))
    with pytest.raises(ValueError) as caught:
        check_demand([{"CPU": 1}, {"CPU": 2}])
    assert str(caught.value).startswith("num_workers=2 need {'CPU': 3} in all, and the cluster has {'CPU': 2.0}")
    with pytest.raises(ValueError) as caught:
        check_demand([{}, {"CPU": 2}])
    assert str(caught.value) == (
        "worker 1 needs {'CPU': 2}, and no node of the cluster has that; the most that one has: {'CPU': 1.0}: ask for "
        "less with num_cpus=, num_gpus=, resources=, or add a node that can hold it"
    )
    # Each is to be had, but not in one place.
    cluster({"CPU": 4.0}, {"CPU": 1.0, "GPU": 1.0})
    with pytest.raises(ValueError, match=r"worker 0 needs \{'CPU': 2, 'GPU': 1\}, and no node of the cluster has that"):
        check_demand([{"CPU": 2, "GPU": 1}])
