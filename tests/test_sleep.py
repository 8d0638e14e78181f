"""Engines that sleep while others train. vLLM on CPU takes the calls and frees no memory; the rest is real."""

from __future__ import annotations

import queue
from typing import Any

import pytest
from fakes import PATIENCE, ScriptedEnv, assert_settled
from telling_weights import telling, token_of, vllm_policy
from test_lag import Module

from torchrl_llm import CollectorError, LLMCollector


def envs(count: int) -> list[ScriptedEnv]:
    return [ScriptedEnv() for _ in range(count)]


@pytest.fixture
def calls(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine is asked, besides doing it."""
    made: list[Any] = []
    sleep, wake_up = engine.sleep, engine.wake_up
    monkeypatch.setattr(engine, "sleep", lambda **kw: (made.append(("sleep", kw)), sleep(**kw)))
    monkeypatch.setattr(engine, "wake_up", lambda **kw: (made.append(("wake_up", kw)), wake_up(**kw)))
    return made


def test_requests_wait_while_the_engine_sleeps_and_go_on_afterwards(
    engine: Any,
    original: Any,
    calls: list[Any],
) -> None:
    with LLMCollector(envs(3), vllm_policy(engine, tokens=40), steps_per_batch=1) as collector:
        target: queue.Queue[Any] = queue.Queue()
        collector.start(target)
        target.get(timeout=PATIENCE)
        collector.sleep()
        assert calls == [("sleep", {"level": 1, "mode": "keep"})]
        finished = collector.stats()["turns_finished"]
        with pytest.raises(queue.Empty):
            while True:
                target.get(timeout=0.5)
        # At most what the engine had answered before: one request per slot.
        assert collector.stats()["turns"] == collector.stats()["turns_finished"] <= finished + 3
        for again in (lambda: collector.sleep(), lambda: collector.update_policy_weights_(original)):
            with pytest.raises(CollectorError, match="sleep"):
                again()
        collector.wake_up()
        assert calls[1:] == [("wake_up", {})]
        assert len(target.get(timeout=PATIENCE)[0]["tokens"].response) == 40
        with pytest.raises(CollectorError, match="do not sleep"):
            collector.wake_up()
    assert_settled(collector.stats())


def test_after_level_2_weights_must_be_pushed_first(
    engine: Any,
    original: Any,
    calls: list[Any],
) -> None:
    with LLMCollector(envs(3), vllm_policy(engine, tokens=20), steps_per_batch=1) as collector:
        next(collector)
        collector.sleep(level=2)
        with pytest.raises(CollectorError, match="engines sleep: call wake_up"):
            next(collector)
        collector.wake_up()
        for read in (lambda: next(collector), lambda: collector.start(queue.Queue())):
            with pytest.raises(CollectorError, match=r"call update_policy_weights_\(\) before"):
                read()
        collector.update_policy_weights_(telling(original, 1))
        rows = [next(collector)[0] for _ in range(8)][-3:]  # earlier ones were finished before it slept
        assert all(set(row["tokens"].response.tolist()) == {token_of(1)} for row in rows)
        assert all(int(row["collector", "policy_version"]) == 1 for row in rows)
        assert calls[0] == ("sleep", {"level": 2, "mode": "keep"})
    assert_settled(collector.stats())


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("awake", [False, True])
def test_a_collector_whose_engines_sleep_can_be_shut_down(
    level: int,
    awake: bool,
    engine: Any,
) -> None:
    collector = LLMCollector(envs(3), vllm_policy(engine), steps_per_batch=1)
    next(collector)
    collector.sleep(level)
    if awake:
        collector.wake_up()
    collector.shutdown(timeout=PATIENCE)
    assert_settled(collector.stats())
    engine.wake_up()


def test_what_cannot_sleep_says_so(engine: Any) -> None:
    with (
        LLMCollector(ScriptedEnv(), Module(), steps_per_batch=1) as collector,
        pytest.raises(ValueError, match=r"no policy of the collector is a vllm.LLM"),
    ):
        collector.sleep()
    with pytest.raises(CollectorError, match="was shut down"):
        collector.sleep()
    with (
        LLMCollector(ScriptedEnv(), vllm_policy(engine), steps_per_batch=1) as collector,
        pytest.raises(ValueError, match="level=3 is not allowed"),
    ):
        collector.sleep(3)
