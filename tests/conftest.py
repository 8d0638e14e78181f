from __future__ import annotations

import os

# vLLM, transformers and torch read these when they are imported, so they come before everything else.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# vLLM's log-prob sampler is a torch.compile function: 15 s of C++ compilation at its first use, for no gain.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import models
import psutil
import pytest
import telling_weights
from engine_settings import ENGINE_SETTINGS
from tensordict import set_list_to_stack

set_list_to_stack(True).set()

# Threads and processes that libraries keep for the life of the process, whoever first needs them.
GLOBAL_THREADS = ("tqdm_monitor", "pydevd.")
GLOBAL_PROCESSES = ("resource_tracker", "compile_worker", "ray::IDLE")
LEFTOVER_WAIT_S = 5.0
_PASSED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the tiny random model, made anew so that no stale cache is tested."""
    return models.tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(tiny_model: str) -> Any:
    return models.load_tokenizer(tiny_model)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The folder of SmolLM2-135M-Instruct; the first use on a machine downloads and converts it."""
    return models.find_model()


@pytest.fixture(scope="session")
def vllm_llm(tiny_model: str) -> Iterator[Any]:
    """One in-process engine over the tiny model for the whole session: leave it without requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        llm = LLM(tiny_model, **ENGINE_SETTINGS)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Lets `nothing_left_behind` see whether the test itself passed."""
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture(scope="session")
def original(tiny_model: str) -> Any:
    """The tiny model itself; leave it as it is."""
    return telling_weights.load_tiny(tiny_model)


@pytest.fixture
def engine(vllm_llm: Any, original: Any) -> Iterator[Any]:
    """The session's engine, for tests that change its weights: it has its first ones again afterwards."""
    yield vllm_llm
    assert not vllm_llm.llm_engine.has_unfinished_requests()
    weights = list(original.state_dict().items())
    vllm_llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    assert vllm_llm.reset_prefix_cache()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread or a child process behind.

    Session fixtures are set up before this one, so what they keep running is not the test's.
    """
    threads, processes = set(_threads()), set(_processes())
    yield
    if not request.node.stash.get(_PASSED, False):
        return  # its traceback keeps objects alive, and it has an error of its own to show
    deadline = time.monotonic() + LEFTOVER_WAIT_S
    collected = False
    while True:
        left = [f"thread {t.name!r}" for t in _threads() if t not in threads]
        left += [f"process {_describe(p)}" for p in _processes() if p not in processes]
        if not left:
            return
        if not collected:
            gc.collect()  # an engine that sits in a reference cycle ends when it is collected
            collected = True
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    pytest.fail(f"left behind after {LEFTOVER_WAIT_S:g} s: " + ", ".join(left), pytrace=False)


def _threads() -> list[threading.Thread]:
    # A _DummyThread is a thread that C++ code started and that once ran Python, such as autograd's.
    return [
        t
        for t in threading.enumerate()
        if not isinstance(t, threading._DummyThread) and not t.name.startswith(GLOBAL_THREADS)
    ]


def _processes() -> list[psutil.Process]:
    """Living descendants of this process, less the ones that libraries keep."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            # Ray's own helpers come and go as it likes; an actor or a running task is named ray::Something.
            by_ray = any(parent.name() == "raylet" for parent in process.parents())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if any(name in command for name in GLOBAL_PROCESSES) or (by_ray and not command.startswith("ray::")):
            continue
        found.append(process)
    return found


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:80]!r}"
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return f"{process.pid} (ended just now)"
