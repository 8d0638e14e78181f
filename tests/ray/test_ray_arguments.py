"""Ray's arguments: what is allowed, and what the errors say. Nothing is started here."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
from fakes import Policy, ScriptedEnv, echo, repeating_chat_env

from torchrl_llm import LLMCollector, RayCollector, arguments
from torchrl_llm.ray.arguments import check_ray_arguments, dry_run

AMOUNT = "a number of at least 0, or a list of them"


@pytest.mark.parametrize("name", arguments.RAY_ONLY)
def test_an_argument_of_ray_without_ray_says_so(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}= only makes sense with Ray: pass backend='ray' too, or leave it out"):
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, **{name: 1})


def test_each_argument_of_the_ray_collector_is_known_to_the_local_one() -> None:
    import inspect

    theirs = set(inspect.signature(RayCollector.__init__).parameters) - {"arguments", "collector_class"}
    ours = set(inspect.signature(LLMCollector.__init__).parameters)
    assert theirs - ours == set(arguments.RAY_ONLY)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("num_workers", 0, ValueError, "num_workers=0 is not allowed: pass an int of at least 1, or None"),
        ("num_workers", 2.0, TypeError, "num_workers=2.0 is not allowed: pass an int of at least 1, or None"),
        ("prefetch", 0, ValueError, "prefetch=0 is not allowed: pass an int of at least 1"),
        ("max_restarts", -1, ValueError, "max_restarts=-1 is not allowed: pass an int of at least 0"),
        ("num_cpus", -1, ValueError, f"num_cpus=-1 is not allowed: pass {AMOUNT}"),
        ("num_cpus", "2", TypeError, f"num_cpus='2' is not allowed: pass {AMOUNT}"),
        ("num_gpus", [1], ValueError, f"num_gpus=[1] is not allowed: pass {AMOUNT}, as long as there are workers (2)"),
        ("resources", 3, TypeError, "resources=3 is not allowed: pass a dict of Ray's resources, or a list of them"),
        ("resources", {"GPU": 1}, ValueError, "resources={'GPU': 1} is not allowed: pass GPU as num_gpus="),
        ("resources", {"x": -1}, ValueError, "resources['x']=-1 is not allowed: pass a number of at least 0"),
        ("placement", "near", ValueError, "placement='near' is not allowed: pass None, 'spread', 'pack' or a"),
        ("placement", 3, TypeError, "placement=3 is not allowed: pass None, 'spread', 'pack' or a"),
        ("worker_timeout", 0, ValueError, "worker_timeout=0 is not allowed: pass seconds, more than 0, or None"),
        ("ordered", 1, TypeError, "ordered=1 is not allowed: pass True or False"),
        ("ray_init_config", 3, TypeError, "ray_init_config=3 is not allowed: pass a dict of ray.init's arguments"),
        # Those of the local collector, in its own words.
        ("steps_per_batch", 0, ValueError, "steps_per_batch=0 is not allowed: pass an int of at least 1"),
        ("total_steps", 0, ValueError, "total_steps=0 is not allowed: pass -1 for no end, or an int of at least 1"),
        ("route", "random", ValueError, "route='random' is not allowed"),
        ("queue", [], TypeError, "queue=[] has no put(item, timeout=) method"),
        ("postproc", 3, TypeError, "postproc=3 is not allowed"),
        ("on_error", "ignore", ValueError, "on_error='ignore' is not allowed"),
        ("frames_per_batch", 3, TypeError, "LLMCollector has no argument 'frames_per_batch': use steps_per_batch="),
        ("sync_iter", False, TypeError, "LLMCollector has no argument 'sync_iter': workers go on while you use a"),
        ("remote_config", None, TypeError, "LLMCollector has no argument 'remote_config': pass num_cpus=, num_gpus="),
        ("step_per_batch", 3, TypeError, "LLMCollector got an unexpected keyword argument 'step_per_batch'"),
    ],
)
def test_each_value_is_checked_before_anything_is_started_L43(
    name: str, value: Any, error: type[Exception], message: str, no_ray: None
) -> None:
    given = {"steps_per_batch": 1, "num_workers": 2, name: value}
    with pytest.raises(error) as raised:
        LLMCollector(ScriptedEnv, echo, backend="ray", **given)
    assert str(raised.value).startswith(message)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray must not be started."""
    import ray

    def init(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", init)


def test_an_environment_instance_is_refused_and_the_error_says_what_to_pass_L50(no_ray: None) -> None:
    env = repeating_chat_env(["q"])
    for given, name in ((env, "env"), ([ScriptedEnv, env], r"env\[1\]")):
        with pytest.raises(TypeError, match=f"^{name} is an instance of TransformedEnv: with backend='ray' pass"):
            LLMCollector(given, echo, steps_per_batch=1, backend="ray")


def test_what_cannot_be_pickled_is_named_with_what_to_pass_instead_L50(no_ray: None) -> None:
    lock = threading.Lock()
    loader = (row for row in [{"query": ["q"]}])
    with pytest.raises(TypeError, match=r"^env\[1\]=.* cannot be sent to a worker \(TypeError: cannot pickle '_thread"):
        LLMCollector([ScriptedEnv, lambda: (lock, ScriptedEnv())[1]], echo, steps_per_batch=1, backend="ray")
    with pytest.raises(TypeError, match=r"cannot pickle 'generator' object.*inside the constructor"):
        LLMCollector(lambda: ScriptedEnv(loader), echo, steps_per_batch=1, backend="ray")
    with pytest.raises(TypeError, match=r"^policy=Policy.* cannot be sent .*pass a constructor of the policy"):
        LLMCollector(ScriptedEnv, Policy(lambda call, texts: lock), steps_per_batch=1, backend="ray")
    with pytest.raises(TypeError, match=r"^route=.* cannot be sent to a worker.*pass one that can be pickled"):
        LLMCollector(ScriptedEnv, echo, route=lambda env, loads: bool(lock), steps_per_batch=1, backend="ray")


def test_workers_default_to_the_longer_list_and_their_demands_to_a_cpu_each() -> None:
    def checked(env: Any, policy: Any, **given: Any) -> Any:
        defaults = {
            "num_workers": None, "num_cpus": 1, "num_gpus": 0, "resources": {}, "ray_init_config": None,
            "placement": None, "prefetch": 1, "max_restarts": 3, "worker_timeout": None, "ordered": False,
        }  # fmt: skip
        return check_ray_arguments(env, policy, **{**defaults, **given})

    assert checked("e", "p").num_workers == 1
    assert checked(["e"] * 2, ["p"] * 3).demands == [{"CPU": 1}] * 3
    wanted = checked("e", "p", num_workers=2, num_cpus=0, num_gpus=[1, 0.5], resources=[{"x": 2}, {}])
    assert wanted.demands == [{"GPU": 1, "x": 2}, {"GPU": 0.5}]
    assert wanted.demand(3) == {"GPU": 0.5}


def test_a_dry_run_builds_nothing_and_passes_other_errors_on() -> None:
    built = []

    def build() -> Any:
        built.append(1)

    dry_run(LLMCollector, build, [build, build], {"steps_per_batch": 1})
    dry_run(LLMCollector, echo, ScriptedEnv, {"trajectories_per_batch": 1, "num_envs": 3})
    assert built == []
    with pytest.raises(ValueError, match="pass exactly one of"):
        dry_run(LLMCollector, echo, build, {})


def test_without_ray_the_error_says_how_to_get_it() -> None:
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'ray' else find(name, *a)\n"
        "sys.modules['ray'] = None; sys.modules['vllm'] = None\n"
        "from torchrl_llm import LLMCollector\n"
        "try: LLMCollector(print, print, steps_per_batch=1, backend='ray')\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith(
        "backend='ray' needs Ray: pip install 'torchrl_llm[ray]', or pip install ray"
    ), done.stdout + done.stderr
