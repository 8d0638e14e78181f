"""What a batch is on a cluster: what the workers make of it, and what the driver. Pure.

Groups that are kept on one worker come complete from there. Groups that are spread come as single trajectories, and the
driver puts them together. Either way the driver cuts the reader's batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_llm.batches import Batcher
from torchrl_llm.plan import UNITS, BatchPlan, check_whole, make_plan
from torchrl_llm.seeds import derive

_ABOUT_BATCHES = (*UNITS, "order", "window", "group_filter", "oversample", "keep_surplus")


@dataclass(frozen=True)
class ClusterPlan:
    """What a batch is on a cluster.

    Attributes:
        plan: what the driver's batches are.
        arguments: the workers' keyword arguments.
        groups: whether batches are made of groups.
        spread: whether a group's members come from any worker.
        shared: whether prompts come from one source for all workers.
    """

    plan: BatchPlan
    arguments: Mapping[str, Any]
    groups: bool
    spread: bool
    shared: bool

    def batcher(self) -> Batcher:
        """What cuts the reader's batches, of turns in the order in which they arrive."""
        return self.plan.batcher()

    @property
    def seed(self) -> int | None:
        """The constructor's seed."""
        return self.arguments.get("seed")

    def arguments_for(self, life: int) -> dict[str, Any]:
        """The keyword arguments of one process of a worker."""
        arguments = dict(self.arguments)
        if arguments.get("seed") is not None:
            arguments["seed"] = self.seed_for(arguments["seed"], life)
        return arguments

    def seed_for(self, seed: int, life: int) -> int:
        """A process's seed: that of all where prompts are shared, so that a prompt has the same answers anywhere."""
        return seed if self.shared else derive(seed, life)

    def check_state(self, prompts: Mapping[str, Any] | None) -> None:
        """Refuses the state of a source whose groups cannot be delivered whole any more; see :func:`check_whole`."""
        if self.groups and prompts is not None:
            check_whole(prompts)


def make_cluster_plan(arguments: Mapping[str, Any], shared: bool, group_affinity: Any) -> ClusterPlan:
    """The plan for a collector's arguments.

    Args:
        arguments: the collector's keyword arguments.
        shared: whether the environments are bound to a prompt source.
        group_affinity: whether a group is kept on one worker.

    Raises:
        TypeError: if ``group_affinity`` is no bool.
        ValueError: for groups without a source, and for what groups that are spread cannot have.

    Examples:
        >>> plan = make_cluster_plan({"groups_per_batch": 4}, shared=True, group_affinity=False)
        >>> plan.plan.size, plan.arguments
        (4, {'trajectories_per_batch': 1, 'order': 'completion'})
    """
    about = {name: arguments[name] for name in _ABOUT_BATCHES if name in arguments}
    plan = make_plan(**about)
    if not isinstance(group_affinity, bool):
        raise TypeError(f"group_affinity={group_affinity!r} is not allowed: pass True or False")
    if plan.groups and not shared:
        raise ValueError(
            f"groups_per_batch={plan.size} is not allowed here: environments that are not bound to a PromptSource have "
            "no groups: pass source.env(make_env) as env="
        )
    spread = plan.groups and not group_affinity
    workers = dict(arguments)
    if spread:
        for name, allowed in (("oversample", None), ("order", None), ("window", None)):
            if arguments.get(name) is not allowed:
                raise ValueError(
                    f"{name}={arguments[name]!r} is not allowed with group_affinity=False: groups that are spread over "
                    "workers are delivered as they are complete"
                )
        workers = {name: value for name, value in arguments.items() if name not in _ABOUT_BATCHES}
        workers |= {"trajectories_per_batch": 1, "order": "completion"}
    driver = dataclasses.replace(
        plan, order="completion", window=None, oversample=None, keep_surplus=True,
        group_filter=plan.group_filter if spread else None,
    )  # fmt: skip
    return ClusterPlan(driver, workers, plan.groups, spread, shared)
