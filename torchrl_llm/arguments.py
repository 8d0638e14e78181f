"""The collector's arguments: checked by name and value before anything is built.

Pure functions, called by the constructor. Every error names the argument, the value passed and what is allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torchrl.envs import AsyncEnvPool, EnvBase

from torchrl_llm.batches import Batcher, StepBatcher, TrajectoryBatcher
from torchrl_llm.policies.options import DEFAULT_OPTIONS, RunnerOptions

# Arguments of TorchRL's collectors that make no sense here, and what to do instead.
REPLACED = {
    "create_env_fn": "pass the constructors as the first argument, env=",
    "create_env_kwargs": "bind them in the constructor: functools.partial(make_env, **kwargs)",
    "policy_factory": "pass the constructor, or a list of them, as policy=",
    "frames_per_batch": "use steps_per_batch=",
    "total_frames": "use total_steps=",
    "dialog_turns_per_batch": "use steps_per_batch=",
    "total_dialog_turns": "use total_steps=",
    "yield_completed_trajectories": "use trajectories_per_batch=",
    "yield_only_last_steps": "use trajectories_per_batch= and keep the last turn of each in postproc=",
    "trajs_per_batch": "use trajectories_per_batch=",
    "traj_format": "batches are never padded; torchrl_llm.split_trajectories(batch) gives the trajectories",
    "flatten_data": "batches are always one-dimensional",
    "async_envs": "pass a list of constructors, or num_envs=; slots are always asynchronous",
    "device": "an engine and an environment choose their own device in their constructors",
    "storing_device": "move a batch with postproc=lambda batch: batch.to(device)",
    "env_device": "an environment chooses its device in its constructor",
    "policy_device": "a policy chooses its device in its constructor",
    "init_random_frames": "a language model has no random actions; leave it out",
    "init_random_steps": "a language model has no random actions; leave it out",
    "max_frames_per_traj": "append torchrl.envs.StepCounter(max_steps=...) to the environment",
    "max_steps_per_traj": "append torchrl.envs.StepCounter(max_steps=...) to the environment",
    "reset_at_each_iter": "trajectories go on from batch to batch; use trajectories_per_batch= for whole ones",
    "reset_when_done": "an environment is always reset when it is done",
    "split_trajs": "use trajectories_per_batch=, or torchrl_llm.split_trajectories(batch)",
    "exploration_type": "set the sampling parameters of the policy",
    "interruptor": "no batch waits for its slowest member; leave it out",
    "use_buffers": "turns have no fixed size, so there is no buffer to reuse; leave it out",
    "return_same_td": "every batch is a new one; leave it out",
    "extend_buffer": "a buffer is always extended by whole batches; leave it out",
    "local_init_rb": "pass the buffer as replay_buffer=",
    "trust_policy": "any callable policy is taken as it is; leave it out",
    "compile_policy": "compile the model before you wrap it",
    "cudagraph_policy": "the engine captures its own graphs; leave it out",
    "no_cuda_sync": "nothing is moved between devices; leave it out",
    "set_truncated": "a trajectory is never cut at a batch's end; leave it out",
    "track_policy_version": "every turn has ('collector', 'policy_version'); leave it out",
    "track_traj_ids": "every turn has ('collector', 'traj_ids'); leave it out",
    "trajs_per_write": "use trajectories_per_batch=; a batch is written at once",
    "num_collectors": "pass lists as env= and policy=, or num_envs=; one collector serves them all",
    "sync": "slots are always asynchronous; leave it out",
    "pre_collect_hook": "turns are collected all the time, not batch by batch; use collector.pause() to act at rest",
    "post_collect_hook": "use postproc=, or set collector.post_collect_hook",
    "auto_register_policy_transforms": "append the transforms to the environment",
    "compact_obs": "every turn has its observation and the next one; leave it out",
    "weight_recv_schemes": "weights come with a later release; leave it out",
    "backend_options": "backend='ray' comes with a later release; leave it out",
    "worker_idx": "leave it out; turns have ('collector', 'env_id') and ('collector', 'policy_id')",
    "verbose": "use logging.getLogger('torchrl_llm') and collector.stats()",
}
LATER = ("groups_per_batch", "seed")


def reject_unknown(arguments: Mapping[str, Any]) -> None:
    """Refuses keyword arguments that the collector does not have.

    Raises:
        TypeError: naming the argument, and what to do instead.
    """
    for name in arguments:
        hint = REPLACED.get(name)
        if hint is None and "frames" in name:
            hint = "frames are called steps here"
        if hint is not None:
            raise TypeError(f"LLMCollector has no argument {name!r}: {hint}")
        raise TypeError(f"LLMCollector got an unexpected keyword argument {name!r}")


def check_int(name: str, value: Any, allowed: str, *, minimum: int, or_: int | None = None) -> int:
    """``value`` if it is an int of at least ``minimum``, or exactly ``or_``.

    Raises:
        TypeError: if it is no int.
        ValueError: if it is out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not allowed: pass {allowed}")
    if value < minimum and value != or_:
        raise ValueError(f"{name}={value!r} is not allowed: pass {allowed}")
    return value


def make_batcher(steps_per_batch: Any, trajectories_per_batch: Any) -> Batcher:
    """The batcher for the unit that was chosen.

    Raises:
        ValueError: if not exactly one unit is given, or it is less than 1.
        TypeError: if it is no int.
    """
    units = {"steps_per_batch": steps_per_batch, "trajectories_per_batch": trajectories_per_batch}
    given = {name: value for name, value in units.items() if value is not None}
    if len(given) != 1:
        passed = ", ".join(f"{name}={value!r}" for name, value in given.items()) or "none of them"
        raise ValueError(
            f"pass exactly one of steps_per_batch and trajectories_per_batch, an int of at least 1; got {passed}"
        )
    [(name, value)] = given.items()
    size = check_int(name, value, "an int of at least 1", minimum=1)
    return StepBatcher(size) if name == "steps_per_batch" else TrajectoryBatcher(size)


Source = tuple[Callable[[], Any] | None, Any]


def env_sources(env: Any, num_envs: int | None) -> list[Source]:
    """The collector's ``env`` argument as a list of (constructor, instance), one of each pair ``None``.

    Raises:
        TypeError: for what is neither an environment nor a constructor.
        ValueError: for an empty list, the same instance twice, or a ``num_envs`` that contradicts the list.
    """
    if num_envs is not None:
        check_int("num_envs", num_envs, "an int of at least 1", minimum=1)
    if isinstance(env, (list, tuple)):
        if not env:
            raise ValueError(f"env={env!r} is not allowed: pass a constructor, an environment, or a list of them")
        if num_envs is not None and num_envs != len(env):
            raise ValueError(f"num_envs={num_envs} is not allowed with a list of {len(env)} environments: leave it out")
        sources = [_env_source(item, f"env[{index}]") for index, item in enumerate(env)]
    else:
        source = _env_source(env, "env")
        if source[1] is not None and (num_envs or 1) > 1:
            raise ValueError(
                f"num_envs={num_envs} is not allowed with an environment instance: pass its constructor as env="
            )
        sources = [source] * (num_envs or 1)
    instances = [id(instance) for _, instance in sources if instance is not None]
    if len(set(instances)) < len(instances):
        raise ValueError("env has the same environment instance twice; each slot needs one of its own")
    return sources


def _env_source(env: Any, name: str) -> Source:
    if isinstance(env, AsyncEnvPool):
        raise TypeError(f"{name} is an AsyncEnvPool: pass its list of constructors; slots are always asynchronous")
    if isinstance(env, EnvBase):
        return None, env
    if callable(env):
        return env, None
    raise TypeError(f"{name}={env!r} is not allowed: pass a constructor () -> EnvBase, an EnvBase, or a list of them")


def policy_options(policy: Any) -> tuple[Any, list[RunnerOptions]]:
    """Separates policies from their runner options: the ``policy`` argument without them, and one per policy."""
    if isinstance(policy, (list, tuple)):
        options = [item if isinstance(item, RunnerOptions) else DEFAULT_OPTIONS for item in policy]
        return [item.policy if isinstance(item, RunnerOptions) else item for item in policy], options
    if isinstance(policy, RunnerOptions):
        return policy.policy, [policy]
    return policy, [DEFAULT_OPTIONS]


def policy_sources(policy: Any) -> list[Source]:
    """The collector's ``policy`` argument as a list of (constructor, instance), one of each pair ``None``.

    A module is a policy; any other callable is one if it needs an argument, else a constructor.

    Raises:
        TypeError: for what is neither.
        ValueError: for an empty list, or the same instance twice.
    """
    if isinstance(policy, (list, tuple)):
        if not policy:
            raise ValueError(f"policy={policy!r} is not allowed: pass a constructor, a policy, or a list of them")
        sources = [_policy_source(item, f"policy[{index}]") for index, item in enumerate(policy)]
    else:
        sources = [_policy_source(policy, "policy")]
    instances = [id(instance) for _, instance in sources if instance is not None]
    if len(set(instances)) < len(instances):
        raise ValueError("policy has the same policy instance twice; pass it once, it serves all environments")
    return sources


def _policy_source(policy: Any, name: str) -> Source:
    if isinstance(policy, nn.Module):
        return None, policy
    if not callable(policy):
        raise TypeError(
            f"{name}={policy!r} is not allowed: pass a constructor () -> policy, a policy, or a list of them"
        )
    if isinstance(policy, type):
        return policy, None
    try:
        inspect.signature(policy).bind()
    except TypeError:
        return None, policy
    except ValueError:
        return policy, None
    return policy, None


def check_restartable(on_error: Any, envs: list[Source]) -> bool:
    """Whether failures are met by a restart.

    Raises:
        ValueError: if ``on_error`` is neither ``"raise"`` nor ``"restart"``.
        TypeError: if an environment that would have to be rebuilt was passed as an instance.
    """
    if on_error not in ("raise", "restart"):
        raise ValueError(f"on_error={on_error!r} is not allowed: pass 'raise' or 'restart'")
    if on_error == "restart" and any(instance is not None for _, instance in envs):
        raise TypeError("on_error='restart' rebuilds environments: pass constructors as env=, not instances")
    return bool(on_error == "restart")
