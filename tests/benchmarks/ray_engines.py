"""Fake engines and environments for the benchmarks on Ray, and how these start it.

An engine here answers each request after a latency, drawn from a log-normal distribution as response lengths are, and
costs next to nothing: one actor holds what stands for many machines. What is measured is everything but the engine.
"""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

HERE = Path(__file__).resolve().parent


def settings(num_cpus: int) -> dict[str, Any]:
    """Arguments of ``ray.init``: a Ray of its own, whose workers can import this module, and not vLLM."""
    paths = os.pathsep.join(map(str, [HERE, HERE.parents[1], HERE.parents[1] / "examples"]))
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    return {
        "address": "local",
        "num_cpus": num_cpus,
        "include_dashboard": False,
        "log_to_driver": False,
        "object_store_memory": 500_000_000,
        "runtime_env": {"env_vars": variables, "worker_process_setup_hook": hide_vllm},
    }


def hide_vllm() -> None:
    """Runs first in each worker process: importing vLLM takes half of its start."""
    sys.modules["vllm"] = None  # type: ignore[assignment]


class FakeEnv(EnvBase):
    """Observes a prompt's ids, takes a response's ids and log-probs, and ends after one turn. Costs what it must."""

    batch_locked = True

    def __init__(self, tokens: int) -> None:
        super().__init__(batch_size=())
        self.observation_spec = Composite(prompt=Unbounded(shape=(-1,), dtype=torch.int64))
        self.full_action_spec = Composite(
            response=Unbounded(shape=(-1,), dtype=torch.int64), log_probs=Unbounded(shape=(-1,))
        )
        self.reward_spec = Unbounded(shape=(1,))
        self._prompt = torch.arange(tokens // 4)

    def reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        return TensorDict({"prompt": self._prompt, "done": torch.zeros(1, dtype=torch.bool)})

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        done = torch.ones(1, dtype=torch.bool)
        after = {"prompt": self._prompt, "reward": torch.ones(1), "done": done, "terminated": done.clone()}
        tensordict.set("next", TensorDict(after))
        return tensordict

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        return self.reset()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError

    def _set_seed(self, seed: int | None) -> None:
        pass


def fake_env(tokens: int) -> FakeEnv:
    """The constructor."""
    return FakeEnv(tokens)


class FakeEngine:
    """Answers what waits, each request no sooner than its own latency after it came.

    Args:
        latency: median seconds of a response; 0 answers at once.
        tokens: ids in a response.
        spread: sigma of the log-normal distribution.
    """

    def __init__(self, latency: float, tokens: int, spread: float = 0.5) -> None:
        self._latency = latency
        self._response = torch.arange(tokens)
        self._scores = -torch.rand(tokens)
        generator = torch.Generator().manual_seed(0)
        factors = torch.exp(spread * torch.randn(1024, generator=generator))
        self._factors = itertools.cycle(factors.tolist())

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        rows = td.unbind(0)
        if self._latency:
            # Rows of one call end one after the other in a real engine; here the call ends with the median one.
            waits = heapq.nsmallest(len(rows) // 2 + 1, (self._latency * next(self._factors) for _ in rows))
            time.sleep(waits[-1])
        for row in rows:
            row["response"] = self._response.clone()
            row["log_probs"] = self._scores.clone()
        return td
