"""From the collector's checked arguments to its parts: slots, policies, the bridges between them, and the rollout.

Called once, by the constructor's thread. Environments are built before policies, since engines are the expensive part;
whatever was built is closed again if a later one fails.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import Any

from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_llm.announcing import announce_version
from torchrl_llm.arguments import Source
from torchrl_llm.bridge import make_bridge
from torchrl_llm.budget import Budget
from torchrl_llm.control import Control
from torchrl_llm.deadlines import Limits
from torchrl_llm.envs import Slot
from torchrl_llm.errors import CollectorError, EnvError, PolicyError
from torchrl_llm.lag import make_lag
from torchrl_llm.launches import Launches
from torchrl_llm.ledger import Ledger
from torchrl_llm.plan import BatchPlan
from torchrl_llm.policies.options import RunnerOptions
from torchrl_llm.policies.pool import PolicyPool, check_wrapper
from torchrl_llm.rollout import Rollout
from torchrl_llm.routing import Route, reachable
from torchrl_llm.weights import PolicyWeights

# How long what was built gets to end again, when the rest could not be built.
CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class Parts:
    """What a collector is made of."""

    ledger: Ledger
    control: Control
    pool: PolicyPool
    weights: PolicyWeights
    launches: Launches
    rollout: Rollout


def assemble(
    *,
    envs: list[Source],
    policies: list[Source],
    options: list[RunnerOptions],
    plan: BatchPlan,
    total_steps: int,
    env_threads: int,
    limits: Limits,
    route: str | Route,
    router: Route,
    restart: bool,
    max_policy_lag: int | None,
    update_mode: str,
    track_token_versions: bool,
    transport: Any,
    seed: int | None,
) -> Parts:
    """Builds all parts of a collector from arguments that were checked.

    Raises:
        EnvError: if an environment's constructor fails, or gives no environment.
        PolicyError: if a policy's constructor fails, or gives nothing callable.
        ValueError: for environments and policies that do not fit together, or into the plan.
    """
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    control, ledger = Control(wake=lambda: events.put(None)), Ledger()
    slots = build_slots(envs, bound=plan.groups)
    pool = build_policies(policies, options, slots, route)
    try:
        pool.track_token_versions(track_token_versions)
        batcher = plan.batcher()
        weights = PolicyWeights(
            pool, update_mode, keep=restart, on_update=lambda version: announce_version(version, slots, events.put)
        )
        weights.transport = transport
        lag = make_lag(max_policy_lag, batcher, lambda: weights.version)
        budget = Budget(total_steps, batcher.whole_trajectories)
        launches = Launches(slots, pool, router, budget, ledger, batcher, plan, lag)
        if seed is not None:
            launches.set_seed(seed)
        rollout = Rollout(
            slots=slots,
            pool=pool,
            launches=launches,
            batcher=batcher,
            ledger=ledger,
            restart=restart,
            env_threads=env_threads,
            limits=limits,
            events=events,
            control=control,
            lag=lag,
        )
    except BaseException:
        pool.close(time.monotonic() + CLOSE_SECONDS)
        for slot in slots:
            slot.close()
        raise
    return Parts(ledger, control, pool, weights, launches, rollout)


def build_slots(sources: list[Source], bound: bool = False) -> list[Slot]:
    """One slot per source.

    Args:
        sources: constructors or instances.
        bound: whether each must take its prompts from a prompt source.

    Raises:
        EnvError: if a constructor fails, or gives no environment.
        ValueError: if an environment that must be bound is not.
    """
    slots: list[Slot] = []
    try:
        for env_id, (constructor, instance) in enumerate(sources):
            env = instance if constructor is None else _construct(constructor, EnvError, slot=env_id)
            slots.append(Slot(env_id, env, constructor))
            if bound and slots[-1].source is None:
                raise ValueError(
                    f"groups_per_batch needs prompts in groups, and env {env_id} has its prompts from elsewhere: bind "
                    "its constructor by PromptSource(data, repeats=n).env(make_env)"
                )
    except BaseException:
        for slot in slots:
            slot.close()
        raise
    return slots


def build_policies(
    sources: list[Source], options: list[RunnerOptions], slots: list[Slot], route: str | Route
) -> PolicyPool:
    """The policies, and the slots' bridges to those that they may meet.

    Raises:
        PolicyError: if a constructor fails, or gives nothing callable.
        ValueError: if an environment and a policy have no keys in common, or a policy makes several samples.
    """
    try:
        policies = [
            instance if constructor is None else _construct(constructor, PolicyError)
            for constructor, instance in sources
        ]
        for index, policy in enumerate(policies):
            if not callable(policy):
                raise PolicyError(f"the constructor of policy {index} returned {type(policy).__name__}, not a callable")
            if isinstance(policy, LLMWrapperBase):
                check_wrapper(policy)
        for slot in slots:
            ids = reachable(route, slot.env_id, len(policies))
            slot.bridges = {policy_id: make_bridge(slot.env, policies[policy_id]) for policy_id in ids}
        return PolicyPool(policies, [constructor for constructor, _ in sources], options)
    except BaseException:
        for slot in slots:
            slot.close()
        raise


def _construct(constructor: Any, kind: type[CollectorError], slot: int | None = None) -> Any:
    name = getattr(constructor, "__qualname__", repr(constructor))
    try:
        return constructor()
    except Exception as error:
        raise kind(f"the constructor {name} failed: {type(error).__name__}: {error}", slot=slot) from error
