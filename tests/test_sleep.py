"""Engines that sleep while others train. vLLM on CPU takes the calls and frees no memory; the rest is real."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import PATIENCE, Gate, ScriptedEnv, assert_settled, in_background
from telling_weights import telling, token_of, vllm_policy
from test_lag import Module

from torchrl_llm import CollectorError, LLMCollector
from torchrl_llm.policies.engine_sleep import EngineSleep
from torchrl_llm.policies.hold import Hold
from torchrl_llm.policies.weights_vllm_reload import ReloadTarget
from torchrl_llm.sleep import Sleep


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


# Engines that collectors share


def test_an_engine_sleeps_for_all_collectors_that_share_it_and_each_can_wake_it(engine: Any, original: Any) -> None:
    with (
        LLMCollector(ScriptedEnv(), vllm_policy(engine), steps_per_batch=1) as one,
        LLMCollector(ScriptedEnv(), vllm_policy(engine), steps_per_batch=1) as other,
    ):
        for wakes in (one, other):
            one.sleep()
            for call in (
                lambda: other.update_policy_weights_(original),
                lambda: other.sleep(),
                lambda: next(other),
                lambda: other.start(queue.Queue()),
            ):
                with pytest.raises(CollectorError, match="engines sleep"):
                    in_background(call).result(PATIENCE)
            in_background(wakes.wake_up).result(PATIENCE)
            for collector in (one, other):
                assert len(in_background(lambda: next(collector)).result(PATIENCE)) == 1  # noqa: B023
                with pytest.raises(CollectorError, match="do not sleep"):
                    collector.wake_up()


def test_after_level_2_any_collector_that_shares_the_engine_can_push_its_weights(engine: Any, original: Any) -> None:
    with (
        LLMCollector(ScriptedEnv(), vllm_policy(engine), steps_per_batch=1) as one,
        LLMCollector(ScriptedEnv(), vllm_policy(engine), steps_per_batch=1) as other,
    ):
        one.sleep(level=2)
        one.wake_up()
        for refused in (lambda: other.sleep(), lambda: next(other), lambda: next(one)):
            with pytest.raises(CollectorError, match=r"no weights yet|discards their weights"):
                in_background(refused).result(PATIENCE)
        in_background(lambda: other.update_policy_weights_(telling(original, 1))).result(PATIENCE)
        for collector in (one, other):
            [row] = in_background(lambda: next(collector)).result(PATIENCE)  # noqa: B023
            assert set(row["tokens"].response.tolist()) == {token_of(1)}


@pytest.mark.parametrize("level", [1, 2])
def test_a_collector_that_is_shut_down_leaves_a_sleeping_engine_to_those_that_share_it(
    level: int, engine: Any, original: Any
) -> None:
    one = LLMCollector(ScriptedEnv(), vllm_policy(engine), steps_per_batch=1)
    with LLMCollector(ScriptedEnv(), vllm_policy(engine), steps_per_batch=1) as other:
        target: queue.Queue[Any] = queue.Queue(1)
        other.start(target)
        target.get(timeout=PATIENCE)
        one.sleep(level)
        in_background(lambda: one.shutdown(timeout=PATIENCE)).result(2 * PATIENCE)
        with pytest.raises(CollectorError, match="engines sleep"):
            in_background(lambda: other.update_policy_weights_(original)).result(PATIENCE)
        other.wake_up()
        if level == 2:
            in_background(lambda: other.update_policy_weights_(telling(original, 1))).result(PATIENCE)
        for _ in range(4):
            assert target.get(timeout=PATIENCE) is not None


# Shutdowns meanwhile


def test_a_shutdown_in_the_middle_of_an_update_after_level_2_ends_the_update(engine: Any, original: Any) -> None:
    collector = LLMCollector(ScriptedEnv(), vllm_policy(engine), steps_per_batch=1, max_policy_lag=1)
    collector.sleep(level=2)
    collector.wake_up()
    with collector._weights.changing:  # the update has its holds, and waits before it switches
        updating = in_background(lambda: collector.update_policy_weights_(original))
        with pytest.raises(TimeoutError):
            updating.result(0.5)
        in_background(lambda: collector.shutdown(timeout=PATIENCE)).result(2 * PATIENCE)
    updating.result(PATIENCE)
    with LLMCollector(ScriptedEnv(), vllm_policy(engine), steps_per_batch=1) as other:
        in_background(lambda: other.update_policy_weights_(original)).result(PATIENCE)
        assert len(in_background(lambda: next(other)).result(PATIENCE)) == 1


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
def test_a_shutdown_while_an_engine_falls_asleep_or_wakes_leaves_it_awake_and_its_thread_ended(
    call: str, engine: Any, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = LLMCollector(ScriptedEnv(), vllm_policy(engine), steps_per_batch=1)
    if call == "wake_up":
        collector.sleep()
    thread = collector._pool.runners[0]._engine
    gate, do = Gate(), getattr(ReloadTarget, call)
    monkeypatch.setattr(ReloadTarget, call, lambda self, *args: (gate(), do(self, *args)))
    changing = in_background(getattr(collector, call))
    gate.wait()
    shutdown = in_background(lambda: collector.shutdown(timeout=PATIENCE))
    deadline = time.monotonic() + PATIENCE
    while not thread.asleep._closed:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    gate.open()
    if call == "sleep":
        with pytest.raises(CollectorError, match=r"was shut down while vllm.LLM fell asleep: it is awake again"):
            changing.result(PATIENCE)
    else:
        changing.result(PATIENCE)
    shutdown.result(2 * PATIENCE)
    assert [name for name, _ in calls] == ["sleep", "wake_up"] and collector._weights.asleep.level == 0
    monkeypatch.undo()
    with LLMCollector(ScriptedEnv(), vllm_policy(engine), steps_per_batch=1) as other:
        assert len(in_background(lambda: next(other)).result(PATIENCE)) == 1


# Several engines, of which one fails; fakes, since a real one on CPU does not


class Sleeper:
    """A target and its owner, whose thread rests the moment it is asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner: Any = self
        self.asleep = EngineSleep()
        self.fails: dict[str, bool] = {}
        self.calls: list[Any] = []
        self.holds: list[Hold] = []
        self.threads: list[threading.Thread] = []

    def hold(self, mode: str) -> Hold:
        hold = Hold(self.name)
        self.holds.append(hold)
        self.threads.append(threading.Thread(target=hold.rest, daemon=True))
        self.threads[-1].start()
        return hold

    def sleep(self, level: int) -> None:
        self._call("sleep")

    def wake_up(self) -> None:
        self._call("wake_up")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fails.get(name):
            raise RuntimeError(f"{self.name} cannot {name}")

    def rests(self) -> bool:
        """Whether its thread is kept at rest."""
        return self.asleep.hold is not None and self.threads[-1].is_alive()

    def goes_on(self) -> bool:
        """Whether its threads were let go."""
        for thread in self.threads:
            thread.join(PATIENCE)
        return not any(thread.is_alive() for thread in self.threads)


@pytest.fixture
def sleepers() -> Iterator[list[Sleeper]]:
    made = [Sleeper("first"), Sleeper("second")]
    yield made
    for sleeper in made:
        sleeper.asleep.close()
        assert sleeper.goes_on()


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_cannot_sleep_leaves_none_asleep(level: int, sleepers: list[Sleeper]) -> None:
    first, second = sleepers
    second.fails["sleep"] = True
    sleep = Sleep(lambda: sleepers)  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match="second cannot sleep"):
        sleep.sleep(level)
    assert first.calls == ["sleep", "wake_up"] and second.calls == ["sleep"]
    assert sleep.level == 0 and second.goes_on()
    if level == 1:
        assert first.goes_on()
        sleep.check_ready()
        return
    assert first.rests()
    with pytest.raises(CollectorError, match="discards their weights"):
        sleep.check_ready()
    sleep.check_can_update()
    sleep.pushed()
    sleep.check_ready()
    assert first.goes_on()


def test_an_engine_that_does_not_wake_after_that_sleeps_on_and_can_be_woken(
    sleepers: list[Sleeper], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = sleepers
    second.fails["sleep"] = first.fails["wake_up"] = True
    sleep = Sleep(lambda: sleepers)  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match="second cannot sleep"):
        sleep.sleep(1)
    assert "first sleeps on, and did not wake: RuntimeError: first cannot wake_up" in caplog.text
    assert sleep.level == 1 and first.rests()
    first.fails.clear()
    sleep.wake_up()
    assert sleep.level == 0 and first.goes_on()
    assert second.calls == ["sleep"], "only what sleeps is woken"


def test_an_engine_that_does_not_come_to_rest_leaves_the_others_awake(sleepers: list[Sleeper]) -> None:
    first, second = sleepers

    def refuse(mode: str) -> Hold:
        raise RuntimeError("no rest")

    second.hold = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no rest"):
        Sleep(lambda: sleepers).sleep(1)  # type: ignore[arg-type, return-value]
    assert first.calls == [] and first.goes_on()


def test_an_engine_that_was_given_back_is_not_woken(sleepers: list[Sleeper]) -> None:
    sleep = Sleep(lambda: sleepers)  # type: ignore[arg-type, return-value]
    sleep.sleep(1)
    sleepers[0].asleep.close()
    with pytest.raises(CollectorError, match="was shut down before first was woken: it sleeps on"):
        in_background(sleep.wake_up).result(PATIENCE)


def test_a_finished_collector_has_nothing_that_could_sleep(engine: Any) -> None:
    with LLMCollector(ScriptedEnv(), vllm_policy(engine), steps_per_batch=1, total_steps=1) as collector:
        assert len(list(collector)) == 1
        with pytest.raises(CollectorError, match="has come to its end"):
            collector.sleep()
