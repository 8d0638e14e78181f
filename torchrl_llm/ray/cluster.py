"""Ray itself: who started it, where workers run, and what they may use.

Owns, for the process, the count of collectors that use a Ray which this package started: the last one shuts it down. A
Ray that was there before is left running. Each :class:`Placement` belongs to one collector.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from torchrl_llm.ray.worker import THREADS, Worker

logger = logging.getLogger("torchrl_llm")

_lock = threading.Lock()
_users = 0
_ours = False


def connect(ray_init_config: Mapping[str, Any] | None) -> None:
    """Makes sure that Ray runs; every call is to be followed by one of :func:`disconnect`."""
    global _users, _ours
    with _lock:
        if not ray.is_initialized():
            ray.init(**{"include_dashboard": False, "log_to_driver": True, **(ray_init_config or {})})
            _ours, _users = True, 0
        elif ray_init_config is not None and not _ours:
            logger.warning("ray_init_config is ignored: Ray runs already in this process")
        _users += 1


def disconnect() -> None:
    """Shuts Ray down, if it was started here and nobody else uses it."""
    global _users, _ours
    with _lock:
        _users -= 1
        if _users == 0 and _ours:
            _ours = False
            if ray.is_initialized():
                ray.shutdown()


def check_demand(demands: Sequence[Mapping[str, float]]) -> None:
    """Refuses workers that the cluster could never hold: together, or one of them on any of its nodes.

    Raises:
        ValueError: naming what they need and what there is.
    """
    needed: dict[str, float] = {}
    for demand in demands:
        for name, amount in demand.items():
            needed[name] = needed.get(name, 0) + amount
    there = ray.cluster_resources()
    short = {name: amount for name, amount in needed.items() if amount > there.get(name, 0)}
    if short:
        has = {name: there.get(name, 0) for name in short}
        raise ValueError(
            f"num_workers={len(demands)} need {short} in all, and the cluster has {has}: ask for fewer workers, or for "
            "less each with num_cpus=, num_gpus=, resources="
        )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for worker, demand in enumerate(demands):
        if not any(all(node.get(name, 0) >= amount for name, amount in demand.items()) for node in nodes):
            most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in demand}
            raise ValueError(
                f"worker {worker} needs {dict(demand)}, and no node of the cluster has that; the most that one has: "
                f"{most}: ask for less with num_cpus=, num_gpus=, resources=, or add a node that can hold it"
            )


class Placement:
    """Where a collector's workers run.

    Args:
        placement: ``None``, ``"spread"``, ``"pack"`` or a placement group.
        demands: resources of each of the first workers.

    Raises:
        ValueError: if the cluster has not what they need.
    """

    def __init__(self, placement: Any, demands: Sequence[Mapping[str, float]]) -> None:
        self._strategy: Any = "SPREAD" if placement == "spread" else "DEFAULT"
        self._group: PlacementGroup | None = None
        self._ours = placement == "pack"
        self._bundles = len(demands)
        if isinstance(placement, PlacementGroup):
            self._group = placement
            return
        check_demand(demands)
        if self._ours:
            # A worker that needs nothing still needs a place.
            bundles = [dict(demand) if any(demand.values()) else {"CPU": 0.001} for demand in demands]
            self._group = placement_group(bundles, strategy="PACK")

    def launch(self, order_ref: Any, worker: int, demand: Mapping[str, float]) -> Any:
        """Starts an actor with a reference to its order; returns its handle at once."""
        strategy = self._strategy
        if self._group is not None and (not self._ours or worker < self._bundles):
            index = worker if self._ours else -1
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        custom = {key: value for key, value in demand.items() if key not in ("CPU", "GPU", "memory")}
        actor_class = ray.remote(concurrency_groups=THREADS)(Worker)
        return actor_class.options(
            num_cpus=demand.get("CPU", 0),
            num_gpus=demand.get("GPU", 0),
            resources=custom or None,
            memory=demand.get("memory"),
            scheduling_strategy=strategy,
            max_restarts=0,
            max_task_retries=0,
        ).remote([order_ref])

    def remove(self) -> None:
        """Gives back a placement group that was made here."""
        if self._ours and self._group is not None:
            remove_placement_group(self._group)
            self._group = None
