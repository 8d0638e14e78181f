"""The arguments that only make sense with Ray: checked by name and value before any actor is started.

Pure functions, called by the constructor. Every error names the argument, the value passed and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
from torch import nn

from torchrl_llm.arguments import Source, check_int, env_sources, policy_options, policy_sources
from torchrl_llm.ray.dealing import default_workers

Demand = dict[str, float]


@dataclass(frozen=True)
class RayArguments:
    """What was passed for Ray, checked.

    Attributes:
        num_workers: workers to begin with.
        demands: resources of each of them, in Ray's names.
    """

    num_workers: int
    demands: list[Demand]

    def demand(self, worker: int) -> Demand:
        """The resources of a worker; one that is added later has those of its number modulo the first count."""
        return self.demands[worker % len(self.demands)]


def check_ray_arguments(
    env: Any,
    policy: Any,
    *,
    num_workers: Any,
    num_cpus: Any,
    num_gpus: Any,
    resources: Any,
    ray_init_config: Any,
    placement: Any,
    prefetch: Any,
    max_restarts: Any,
    worker_timeout: Any,
    ordered: Any,
) -> RayArguments:
    """Checks all of them.

    Raises:
        TypeError: for one of the wrong type.
        ValueError: for one that is out of range.
    """
    if num_workers is None:
        num_workers = default_workers(env, policy)
    check_int("num_workers", num_workers, "an int of at least 1, or None", minimum=1)
    check_int("prefetch", prefetch, "an int of at least 1", minimum=1)
    check_int("max_restarts", max_restarts, "an int of at least 0", minimum=0)
    if not isinstance(ordered, bool):
        raise TypeError(f"ordered={ordered!r} is not allowed: pass True or False")
    if worker_timeout is not None:
        _check_amount("worker_timeout", worker_timeout, "seconds, more than 0, or None", above=True)
    if ray_init_config is not None and not isinstance(ray_init_config, Mapping):
        raise TypeError(f"ray_init_config={ray_init_config!r} is not allowed: pass a dict of ray.init's arguments")
    if placement not in (None, "spread", "pack") and not hasattr(placement, "bundle_specs"):
        kind = ValueError if isinstance(placement, str) else TypeError
        raise kind(f"placement={placement!r} is not allowed: pass None, 'spread', 'pack' or a Ray placement group")
    return RayArguments(num_workers, _demands(num_workers, num_cpus, num_gpus, resources))


def _demands(workers: int, num_cpus: Any, num_gpus: Any, resources: Any) -> list[Demand]:
    cpus = _per_worker("num_cpus", num_cpus, workers, "a number of at least 0, or a list of them")
    gpus = _per_worker("num_gpus", num_gpus, workers, "a number of at least 0, or a list of them")
    others = _per_worker("resources", resources, workers, "a dict of Ray's resources, or a list of them")
    demands = []
    for cpu, gpu, other in zip(cpus, gpus, others, strict=True):
        if not isinstance(other, Mapping):
            raise TypeError(
                f"resources={resources!r} is not allowed: pass a dict of Ray's resources, or a list of them"
            )
        for taken, instead in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
            if taken in other:
                raise ValueError(f"resources={resources!r} is not allowed: pass {taken} as {instead}=")
        for name, amount in other.items():
            _check_amount(f"resources[{name!r}]", amount, "a number of at least 0")
        _check_amount("num_cpus", cpu, "a number of at least 0, or a list of them")
        _check_amount("num_gpus", gpu, "a number of at least 0, or a list of them")
        demand = {"CPU": cpu, "GPU": gpu, **other}
        demands.append({name: amount for name, amount in demand.items() if amount})
    return demands


def _per_worker(name: str, value: Any, workers: int, allowed: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * workers
    if len(value) != workers:
        raise ValueError(f"{name}={value!r} is not allowed: pass {allowed}, as long as there are workers ({workers})")
    return list(value)


def _check_amount(name: str, value: Any, allowed: str, above: bool = False) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not allowed: pass {allowed}")
    if value < 0 or (above and value == 0):
        raise ValueError(f"{name}={value!r} is not allowed: pass {allowed}")


# What can travel


def check_sendable(env: Any, policy: Any, num_envs: int | None, others: Mapping[str, Any]) -> None:
    """Refuses what a worker cannot be given.

    Raises:
        TypeError: for an environment instance, and for anything that cannot be pickled; it says what to pass instead.
    """
    for name, (constructor, instance) in _named("env", env, env_sources(env, num_envs)):
        if instance is not None:
            raise TypeError(
                f"{name} is an instance of {type(instance).__name__}: with backend='ray' pass its constructor, a "
                "function without arguments that each worker calls for itself"
            )
        _check_picklable(name, constructor, "what it needs is to be made or opened inside the constructor")
    plain, _ = policy_options(policy)
    for name, (constructor, instance) in _named("policy", plain, policy_sources(plain)):
        if constructor is not None:
            _check_picklable(name, constructor, "what it needs is to be made or opened inside the constructor")
        else:
            kind = "module" if isinstance(instance, nn.Module) else "policy"
            hint = f"pass a constructor of the {kind}, a function without arguments that each worker calls for itself"
            _check_picklable(name, instance, hint)
    for name, value in others.items():
        _check_picklable(name, value, "pass one that can be pickled")


def _named(name: str, argument: Any, sources: list[Source]) -> list[tuple[str, Source]]:
    if isinstance(argument, (list, tuple)):
        return [(f"{name}[{index}]", source) for index, source in enumerate(sources)]
    return [(name, sources[0])]


def _check_picklable(name: str, value: Any, hint: str) -> None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{name}={value!r} cannot be sent to a worker ({type(error).__name__}: {error}): {hint}"
        ) from error


def dry_run(collector_class: Callable[..., Any], policy: Any, env: Any, arguments: Mapping[str, Any]) -> None:
    """Lets the local collector check its own arguments, without building anything.

    A collector checks all of its arguments before it calls the first constructor; here that is one which stops it.

    Raises:
        TypeError: what the local collector raises.
        ValueError: likewise.
    """
    if isinstance(env, (list, tuple)):
        stopping: Any = [_stop if callable(item) else item for item in env]
    else:
        stopping = _stop if callable(env) else env
    try:
        collector_class(stopping, policy, **arguments)
    except Exception as error:
        if isinstance(error.__cause__, _Checked):
            return
        raise


class _Checked(Exception):
    """All arguments have been checked."""


def _stop() -> Any:
    raise _Checked
