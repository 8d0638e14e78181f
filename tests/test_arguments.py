"""Arguments: what is allowed, and what the errors say."""

from __future__ import annotations

import functools
import inspect
import queue
from typing import Any

import pytest
import torch
from fakes import Policy, ScriptedEnv, echo
from torchrl.collectors import Collector
from torchrl.collectors.llm import LLMCollector as TorchRLCollector
from torchrl.envs import AsyncEnvPool

from torchrl_llm import LLMCollector, arguments
from torchrl_llm.batches import StepBatcher
from torchrl_llm.plan import make_plan
from torchrl_llm.units import UnitBatcher


@pytest.mark.parametrize("name", arguments.REPLACED)
def test_an_argument_of_torchrl_that_makes_no_sense_here_says_what_to_do_instead(name: str) -> None:
    with pytest.raises(TypeError) as raised:
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, **{name: None})
    assert str(raised.value) == f"LLMCollector has no argument {name!r}: {arguments.REPLACED[name]}"


@pytest.mark.parametrize("torchrls", [Collector, TorchRLCollector])
def test_each_argument_of_torchrls_collectors_is_known_or_answered(torchrls: Any) -> None:
    theirs = {
        name
        for name, parameter in inspect.signature(torchrls.__init__).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and not name.startswith("_")
    }
    ours = set(inspect.signature(LLMCollector.__init__).parameters)
    assert theirs - ours - set(arguments.REPLACED) == {"backend"} & theirs  # which the metaclass takes


@pytest.mark.parametrize("name", ["frames_per_turn", "min_frames"])
def test_there_are_no_frames(name: str) -> None:
    with pytest.raises(TypeError, match=f"has no argument '{name}': frames are called steps here"):
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, **{name: 3})


def test_a_misspelt_argument_is_named() -> None:
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'step_per_batch'"):
        LLMCollector(ScriptedEnv, echo, step_per_batch=1)


# Batch units


def test_exactly_one_unit_is_needed_L17() -> None:
    for units in ({}, {"steps_per_batch": 2, "trajectories_per_batch": 2}):
        with pytest.raises(
            ValueError, match="pass exactly one of steps_per_batch, trajectories_per_batch and groups_per_batch"
        ):
            LLMCollector(ScriptedEnv, echo, **units)
    with pytest.raises(ValueError, match="got none of them"):
        LLMCollector(ScriptedEnv, echo, steps_per_batch=None)


@pytest.mark.parametrize("name", ["steps_per_batch", "trajectories_per_batch", "groups_per_batch"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (1.0, TypeError), ("2", TypeError), (True, TypeError), ([2], TypeError)],
)
def test_a_unit_is_an_int_of_at_least_one_L16(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        LLMCollector(ScriptedEnv, echo, **{name: value})
    assert str(raised.value) == f"{name}={value!r} is not allowed: pass an int of at least 1"


def test_the_unit_chooses_the_batcher() -> None:
    assert make_plan(steps_per_batch=3).batcher() == StepBatcher(3)
    for name in ("trajectories_per_batch", "groups_per_batch"):
        batcher = make_plan(**{name: 3}).batcher()
        assert isinstance(batcher, UnitBatcher) and batcher.size == 3


@pytest.mark.parametrize(
    ("name", "value", "error", "allowed"),
    [
        ("total_steps", 0, ValueError, "-1 for no end, or an int of at least 1"),
        ("total_steps", -2, ValueError, "-1 for no end, or an int of at least 1"),
        ("total_steps", 3.5, TypeError, "-1 for no end, or an int of at least 1"),
        ("total_steps", None, TypeError, "-1 for no end, or an int of at least 1"),
        ("env_threads", -1, ValueError, "an int of at least 0"),
        ("env_threads", True, TypeError, "an int of at least 0"),
        ("num_envs", 0, ValueError, "an int of at least 1"),
        ("num_envs", "4", TypeError, "an int of at least 1"),
        ("on_error", "ignore", ValueError, "'raise' or 'restart'"),
        ("on_error", None, ValueError, "'raise' or 'restart'"),
        ("backend", "mpi", ValueError, "None or 'ray'"),
        ("postproc", 3, TypeError, "a callable batch -> batch, or None"),
    ],
)
def test_each_value_is_checked_and_the_allowed_ones_are_said(
    name: str, value: Any, error: type[Exception], allowed: str
) -> None:
    with pytest.raises(error) as raised:
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, **{name: value})
    assert str(raised.value) == f"{name}={value!r} is not allowed: pass {allowed}"


# Environments


def test_an_env_argument_becomes_a_list_of_sources() -> None:
    env = ScriptedEnv()
    make = functools.partial(ScriptedEnv, length=2)
    assert arguments.env_sources(env, None) == [(None, env)]
    assert arguments.env_sources(env, 1) == [(None, env)]
    assert arguments.env_sources(ScriptedEnv, None) == [(ScriptedEnv, None)]
    assert arguments.env_sources(make, 3) == [(make, None)] * 3
    assert arguments.env_sources([make, env], None) == [(make, None), (None, env)]
    assert arguments.env_sources((make, make), 2) == [(make, None)] * 2


@pytest.mark.parametrize(
    ("env", "num_envs", "error", "message"),
    [
        (3, None, TypeError, r"env=3 is not allowed: pass a constructor \(\) -> EnvBase"),
        (None, None, TypeError, "env=None is not allowed"),
        ([], None, ValueError, r"env=\[\] is not allowed"),
        ([ScriptedEnv, "env"], None, TypeError, r"env\[1\]='env' is not allowed"),
        ([ScriptedEnv], 2, ValueError, "num_envs=2 is not allowed with a list of 1 environments"),
        (ScriptedEnv(), 2, ValueError, "num_envs=2 is not allowed with an environment instance"),
        ([ScriptedEnv()] * 2, None, ValueError, "the same environment instance twice"),
    ],
)
def test_what_is_no_env_is_refused(env: Any, num_envs: int | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLMCollector(env, echo, num_envs=num_envs, steps_per_batch=1)


def test_an_async_pool_is_refused_with_a_hint() -> None:
    pool = AsyncEnvPool([ScriptedEnv, ScriptedEnv], backend="threading")
    with pytest.raises(TypeError, match="env is an AsyncEnvPool: pass its list of constructors"):
        LLMCollector(pool, echo, steps_per_batch=1)
    pool.close()


# Policies


class Callable:
    def __call__(self, td: Any) -> Any:
        return echo(td)


def no_argument() -> Any:
    return echo


def optional_argument(name: str = "tiny") -> Any:
    return echo


@pytest.mark.parametrize(
    ("policy", "is_constructor"),
    [
        (echo, False),
        (Policy(), False),
        (Callable(), False),
        (Callable, True),
        (no_argument, True),
        (optional_argument, True),
        (functools.partial(optional_argument, name="big"), True),
        (functools.partial(echo), False),
        (lambda: echo, True),
        (lambda td: td, False),
        (torch.nn.Linear(1, 1), False),
        (torch.nn.Identity, True),
    ],
)
def test_a_policy_is_told_from_its_constructor_by_its_arguments(policy: Any, is_constructor: bool) -> None:
    expected = (policy, None) if is_constructor else (None, policy)
    assert arguments.policy_sources(policy) == [expected]
    assert arguments.policy_sources([policy]) == [expected]


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (3, TypeError, r"policy=3 is not allowed: pass a constructor \(\) -> policy"),
        (None, TypeError, "policy=None is not allowed"),
        ([], ValueError, r"policy=\[\] is not allowed"),
        ([echo, "gpt"], TypeError, r"policy\[1\]='gpt' is not allowed"),
        ([echo, echo], ValueError, "the same policy instance twice; pass it once, it serves all environments"),
    ],
)
def test_what_is_no_policy_is_refused(policy: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLMCollector(ScriptedEnv, policy, steps_per_batch=1)


def test_the_same_constructor_may_be_passed_twice() -> None:
    assert len(arguments.policy_sources([no_argument, no_argument])) == 2


def test_a_restart_needs_constructors_of_environments() -> None:
    with pytest.raises(TypeError, match="on_error='restart' rebuilds environments: pass constructors as env="):
        LLMCollector(ScriptedEnv(), echo, steps_per_batch=1, on_error="restart")


# Targets


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        ({"queue": 3}, TypeError, r"queue=3 has no put\(item, timeout=\) method"),
        ({"replay_buffer": 3}, TypeError, r"replay_buffer=3 has no extend\(\) method"),
    ],
)
def test_what_cannot_be_written_to_is_refused(targets: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, **targets)


def test_a_buffer_and_a_queue_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="replay_buffer and queue were both passed"):
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, queue=queue.Queue(), replay_buffer=[])
