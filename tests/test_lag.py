"""max_policy_lag: what is delivered is never older than allowed, whoever is faster, and nothing hangs."""

from __future__ import annotations

import queue
import random
import threading
import time
from typing import Any

import pytest
import torch
from fakes import PATIENCE, ScriptedEnv, assert_conserved, assert_settled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from torch import nn

from torchrl_llm import LLMCollector

UNITS = ("steps_per_batch", "trajectories_per_batch")


class Module(nn.Module):
    """A policy with one weight, which it writes into its answers; it may take its time.

    Args:
        delays: seconds for its calls, over and over.
    """

    def __init__(self, delays: tuple[float, ...] = (0.0,)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self._delays = delays
        self._calls = 0

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        self._calls += 1
        begun_with = int(self.weight)
        time.sleep(self._delays[self._calls % len(self._delays)])
        assert int(self.weight) == begun_with, "the weights changed in the middle of a call"
        for row in td.unbind(0):
            row["answer"] = str(begun_with)
        return td


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.tensor(float(version))}


def length(prompt: str) -> int:
    return 1 + hash(prompt) % 4


def first_versions(batch: Any, unit: str) -> list[int]:
    """The version with which each unit of a batch began, checked against what the policy wrote."""
    rows = batch.unbind(0)
    for row in rows:
        assert int(row["answer"]) == int(row["collector", "policy_version"])
    if unit == "steps_per_batch":
        return [int(row["collector", "policy_version"]) for row in rows]
    return [int(row["collector", "policy_version"]) for row in rows if int(row["collector", "step"]) == 0]


@pytest.mark.parametrize("unit", UNITS)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lag=st.integers(0, 3),
    size=st.integers(1, 5),
    slots=st.integers(1, 8),
    rows=st.sampled_from([(), (3,)]),
    updates=st.lists(st.integers(0, 4), min_size=3, max_size=8),
)
def test_pulled_batches_are_never_older_than_allowed(
    unit: str, lag: int, size: int, slots: int, rows: tuple[int, ...], updates: list[int]
) -> None:
    envs = [ScriptedEnv(length=length, batch_size=rows) for _ in range(slots)]
    with LLMCollector(envs, Module(), max_policy_lag=lag, **{unit: size}) as collector:
        for count in updates:
            batch = next(collector)
            begun = first_versions(batch, unit)
            assert len(begun) == size
            assert min(begun) >= collector.policy_version - lag
            assert_conserved(collector.stats())
            for _ in range(count):
                collector.update_policy_weights_(weights(collector.policy_version + 1))
    assert_settled(collector.stats())


@pytest.mark.parametrize("unit", UNITS)
def test_with_no_lag_at_all_pulled_batches_are_of_the_current_version(unit: str) -> None:
    envs = [ScriptedEnv(length=length) for _ in range(6)]
    with LLMCollector(envs, Module((0.0, 0.003)), max_policy_lag=0, **{unit: 4}) as collector:
        for version in range(1, 20):
            assert set(first_versions(next(collector), unit)) == {version - 1}
            collector.update_policy_weights_(weights(version))
        stats = collector.stats()
    assert stats["stale_trajectories"] == stats["stale_turns"] == 0 or unit == "steps_per_batch"
    assert stats["lag_holds"] > 0


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("lag", [0, 2])
def test_with_one_update_per_batch_nothing_is_thrown_away(unit: str, lag: int) -> None:
    """The bound on launches suffices when units are delivered in the order in which they began."""
    with LLMCollector(
        [ScriptedEnv(length=1) for _ in range(16)], Module(), max_policy_lag=lag, **{unit: 4}
    ) as collector:
        for version in range(1, 30):
            next(collector)
            collector.update_policy_weights_(weights(version))
        stats = collector.stats()
    assert stats["stale_trajectories"] == stats["stale_turns"] == 0


class WatchedQueue:
    """A bounded queue that looks, at the moment of each put, how old the batch is."""

    def __init__(self, maxsize: int, unit: str) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(maxsize)
        self._unit = unit
        self.collector: LLMCollector | None = None
        self.lags: list[int] = []
        self.get = self._queue.get

    def put(self, item: Any, timeout: float | None = None) -> None:
        self._queue.put(item, timeout=timeout)
        if item is not None:
            assert self.collector is not None
            self.lags.append(self.collector.policy_version - min(first_versions(item, self._unit)))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("who", ["a fast trainer", "a slow trainer", "a slow reader"])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_queued_batches_are_never_older_than_allowed(lag: int, who: str, unit: str) -> None:
    target = WatchedQueue(1, unit)
    policy = Module((0.0, 0.002, 0.001))
    envs = [ScriptedEnv(length=length) for _ in range(6)]
    with LLMCollector(envs, policy, max_policy_lag=lag, env_threads=2, **{unit: 3}) as collector:
        target.collector = collector
        collector.start(target)
        stop = threading.Event()

        def train() -> None:
            pauses = random.Random(0)
            while not stop.is_set():
                collector.update_policy_weights_(weights(collector.policy_version + 1))
                stop.wait({"a fast trainer": 0.002, "a slow trainer": 0.05}.get(who, 0.005) * pauses.random())

        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            for _ in range(12):
                target.get(timeout=PATIENCE)
                time.sleep(0.03 if who == "a slow reader" else 0)
                assert_conserved(collector.stats())
        finally:
            stop.set()
            trainer.join()
    assert len(target.lags) >= 12
    assert max(target.lags) <= lag
    assert_settled(collector.stats())


def test_what_is_too_old_is_dropped_counted_and_replaced() -> None:
    with LLMCollector(ScriptedEnv(length=2), Module(), trajectories_per_batch=1, max_policy_lag=0) as collector:
        next(collector)
        target: queue.Queue[Any] = queue.Queue(1)
        collector.start(target)
        first = target.get(timeout=PATIENCE)
        assert first_versions(first, "trajectories_per_batch") == [0]
        deadline = time.monotonic() + PATIENCE
        while not target.full() or (books := collector.stats())["launched"] < 3 or books["turns_pending"] < 2:
            assert time.monotonic() < deadline  # until the third is finished, which finds the queue full
        for version in (1, 2, 3):
            collector.update_policy_weights_(weights(version))
        assert first_versions(target.get(timeout=PATIENCE), "trajectories_per_batch") == [0]  # it was delivered before
        assert first_versions(target.get(timeout=PATIENCE), "trajectories_per_batch") == [3]
        stats = collector.stats()
    assert stats["stale_trajectories"] == stats["recorded_by_reason"]["stale"] >= 1
    assert_settled(collector.stats())


def test_a_reader_who_does_not_update_is_not_held_up() -> None:
    for unit in UNITS:
        envs = [ScriptedEnv(length=length) for _ in range(5)]
        with LLMCollector(envs, Module(), max_policy_lag=0, total_steps=60, **{unit: 3}) as collector:
            turns = sum(len(batch) for batch in collector)
        assert turns >= 60
        assert_settled(collector.stats())


@pytest.mark.parametrize("bad", [-1, 1.5, "2", True])
def test_a_lag_that_is_no_count_is_refused(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"max_policy_lag=.* is not allowed: pass an int of at least 0"):
        LLMCollector(ScriptedEnv, Module(), steps_per_batch=1, max_policy_lag=bad)
