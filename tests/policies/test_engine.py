"""The thread of a vLLM engine: each request answered once, whatever becomes of the engine."""

from __future__ import annotations

import gc
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from engine_settings import make_multiprocess_llm
from fakes import PATIENCE, ScriptedEnv, assert_settled, numbered
from tensordict import TensorDictBase
from torchrl.modules.llm import vLLMWrapper
from vllm.v1.engine.exceptions import EngineDeadError

from torchrl_llm import CollectorError, LLMCollector, PolicyError
from torchrl_llm.policies.engine import EngineThread, Request, acquire


class Output:
    """The part of a ``RequestOutput`` that the thread looks at."""

    def __init__(self, request_id: str, finished: bool = True) -> None:
        self.request_id = request_id
        self.finished = finished


class Engine:
    """An ``llm_engine`` whose steps the test makes: each ends when the test says what comes of it."""

    def __init__(self) -> None:
        self.outcomes: queue.SimpleQueue[list[Output] | Exception] = queue.SimpleQueue()
        self.stepping = threading.Semaphore(0)
        self.added: list[tuple[str, Any, Any]] = []
        self.aborted: list[str] = []
        self.threads: set[int] = set()
        self.inside = 0
        self.most_inside = 0
        self.refuse: Exception | None = None
        self.abort_fails: Exception | None = None

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.threads.add(threading.get_ident())
        if self.refuse is not None:
            raise self.refuse
        self.added.append((request_id, prompt, params))

    def abort_request(self, request_ids: list[str]) -> None:
        if self.abort_fails is not None:
            raise self.abort_fails
        self.aborted += request_ids

    def step(self) -> list[Output]:
        self.threads.add(threading.get_ident())
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.stepping.release()
        outcome = self.outcomes.get(timeout=PATIENCE)
        self.inside -= 1
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def await_step(self) -> None:
        assert self.stepping.acquire(timeout=PATIENCE), "the engine was not stepped"


class Model:
    """What the thread knows of a ``vllm.LLM``."""

    def __init__(self) -> None:
        self.llm_engine = Engine()


class Answers:
    """Callbacks, and what they were called with."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[str, Any, Exception | None]] = queue.SimpleQueue()
        self.threads: set[int] = set()

    def of(self, name: str) -> Any:
        def callback(output: Any, error: Exception | None) -> None:
            self.threads.add(threading.get_ident())
            self._calls.put((name, output, error))

        return callback

    def next(self) -> tuple[str, Any, Exception | None]:
        return self._calls.get(timeout=PATIENCE)

    def none_left(self) -> bool:
        return self._calls.empty()


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def thread(model: Model) -> Iterator[EngineThread]:
    held = acquire(model)
    yield held
    model.llm_engine.outcomes.put(RuntimeError("the test is over"))  # for a step that is still under way
    assert held.release(time.monotonic() + PATIENCE) == []


def add(thread: EngineThread, answers: Answers, name: str) -> str:
    request_id = thread.new_id()
    thread.add(Request(request_id, f"prompt {name}", f"params {name}", answers.of(name)))
    return request_id


def test_each_request_is_answered_once_by_its_own_callback_in_one_thread(model: Model, thread: EngineThread) -> None:
    engine, answers = model.llm_engine, Answers()
    first, second = add(thread, answers, "first"), add(thread, answers, "second")
    engine.await_step()
    engine.outcomes.put([Output("somebody else's"), Output(first, finished=False)])
    engine.await_step()
    engine.outcomes.put([Output(second)])
    name, output, error = answers.next()
    assert (name, output.request_id, error) == ("second", second, None)
    engine.await_step()
    engine.outcomes.put([Output(first), Output(second)])
    assert answers.next()[0] == "first"
    assert answers.none_left()
    assert engine.added[0] == (first, "prompt first", "params first")
    assert engine.threads == answers.threads and threading.get_ident() not in engine.threads


def test_an_engine_without_requests_is_not_stepped(model: Model, thread: EngineThread) -> None:
    engine, answers = model.llm_engine, Answers()
    request = add(thread, answers, "only")
    engine.await_step()
    engine.outcomes.put([Output(request)])
    answers.next()
    add(thread, answers, "next")
    engine.await_step()
    assert not engine.stepping.acquire(blocking=False)


def test_a_request_enters_the_engine_while_others_are_running(model: Model, thread: EngineThread) -> None:
    engine, answers = model.llm_engine, Answers()
    add(thread, answers, "long")
    engine.await_step()
    short = add(thread, answers, "short")
    engine.outcomes.put([])
    engine.await_step()
    engine.outcomes.put([Output(short)])
    assert answers.next()[0] == "short"


def test_a_refused_request_gets_its_error_and_the_others_their_answers(model: Model, thread: EngineThread) -> None:
    engine, answers = model.llm_engine, Answers()
    good = add(thread, answers, "good")
    engine.await_step()
    engine.refuse = ValueError("no such token")
    add(thread, answers, "bad")
    engine.outcomes.put([])
    assert answers.next() == ("bad", None, engine.refuse)
    engine.await_step()
    engine.outcomes.put([Output(good)])
    assert answers.next()[0] == "good"
    assert thread.dead is None


def test_an_aborted_request_is_taken_out_of_the_engine_and_not_answered(model: Model, thread: EngineThread) -> None:
    engine, answers = model.llm_engine, Answers()
    gone, stays = add(thread, answers, "gone"), add(thread, answers, "stays")
    engine.await_step()
    thread.abort([gone, "unknown"])
    engine.outcomes.put([])
    engine.await_step()
    assert engine.aborted == [gone]
    engine.outcomes.put([Output(gone), Output(stays)])
    assert answers.next()[0] == "stays"
    assert answers.none_left()


def test_a_step_that_raises_answers_all_that_is_in_flight_and_all_that_comes(
    model: Model, thread: EngineThread
) -> None:
    engine, answers = model.llm_engine, Answers()
    request, _ = add(thread, answers, "first"), add(thread, answers, "second")
    engine.await_step()
    death = EngineDeadError()
    engine.outcomes.put(death)
    assert [answers.next() for _ in range(2)] == [("first", None, death), ("second", None, death)]
    assert thread.dead is death
    add(thread, answers, "third")
    assert answers.next() == ("third", None, death)
    thread.abort([request])
    add(thread, answers, "fourth")
    assert answers.next() == ("fourth", None, death)
    assert not engine.aborted and len(engine.added) == 2, "a dead engine is left alone"


def test_an_engine_that_is_dead_when_a_request_comes_is_known_to_be_dead(model: Model, thread: EngineThread) -> None:
    answers = Answers()
    model.llm_engine.refuse = EngineDeadError()
    add(thread, answers, "first")
    assert answers.next() == ("first", None, model.llm_engine.refuse)
    assert thread.dead is model.llm_engine.refuse


def test_an_engine_that_cannot_abort_is_dead(model: Model, thread: EngineThread) -> None:
    engine, answers = model.llm_engine, Answers()
    gone, _ = add(thread, answers, "gone"), add(thread, answers, "stays")
    engine.await_step()
    engine.abort_fails = EngineDeadError()
    thread.abort([gone])
    engine.outcomes.put([])
    assert answers.next() == ("stays", None, engine.abort_fails)
    assert thread.dead is engine.abort_fails


def test_holders_of_one_engine_share_its_thread_until_the_last_is_gone(model: Model) -> None:
    threads = set(threading.enumerate())
    first, second = acquire(model), acquire(model)
    assert first is second
    assert len(set(threading.enumerate()) - threads) == 1
    assert first.release(time.monotonic() + PATIENCE) == []
    answers = Answers()
    request = add(second, answers, "after the first holder left")
    model.llm_engine.await_step()
    model.llm_engine.outcomes.put([Output(request)])
    answers.next()
    assert second.release(time.monotonic() + PATIENCE) == []
    assert set(threading.enumerate()) <= threads


def test_an_engine_that_died_or_was_released_gets_a_new_thread(model: Model) -> None:
    first, answers = acquire(model), Answers()
    add(first, answers, "only")
    model.llm_engine.outcomes.put(EngineDeadError())
    answers.next()
    second = acquire(model)
    assert second is not first and second.dead is None
    assert first.release(time.monotonic() + PATIENCE) == second.release(time.monotonic() + PATIENCE) == []
    third = acquire(model)
    assert third is not second
    assert third.release(time.monotonic() + PATIENCE) == []


def test_a_thread_in_a_step_that_does_not_end_is_named(model: Model) -> None:
    held, answers = acquire(model), Answers()
    request = add(held, answers, "long")
    model.llm_engine.await_step()
    held.abort([request])
    assert held.release(time.monotonic() + 0.05) == [f"torchrl_llm-engine-{id(model):x}"]
    model.llm_engine.outcomes.put([])  # now it ends: the fixture that looks for threads would say if not


def test_an_engine_that_is_given_back_in_a_step_without_end_keeps_nobody_waiting_for_its_rest(model: Model) -> None:
    engine, answers = model.llm_engine, Answers()
    held = acquire(model)
    request = add(held, answers, "long")
    engine.await_step()
    holds = [held.hold("continue"), held.hold("wait")]
    held.abort([request])
    assert held.release(time.monotonic() + 0.05) == [f"torchrl_llm-engine-{id(model):x}"]
    for hold in (*holds, held.hold("continue")):
        with pytest.raises(RuntimeError, match="given back"):
            hold._reached.result(PATIENCE)
    engine.outcomes.put([])  # now the step ends, and the thread must rest for nobody: the fixture would see it


@pytest.mark.parametrize("asleep", [True, False])
def test_an_engine_at_rest_for_its_sleep_refuses_further_holds_and_answers_all_if_it_is_given_up(
    asleep: bool, model: Model, thread: EngineThread
) -> None:
    """Whether it sleeps, or is awake and waits for weights."""
    answers, hold, error = Answers(), thread.hold("continue"), RuntimeError("out of memory")
    hold.wait()
    assert thread.asleep.fell_asleep(2, hold)
    if not asleep:
        thread.asleep.awake()
    with pytest.raises(CollectorError, match="engine sleeps, or has no weights"):
        thread.hold("continue")
    add(thread, answers, "waits")
    assert answers.none_left()
    hold.run(lambda: thread.fail(error))
    assert answers.next() == ("waits", None, error)
    with pytest.raises(RuntimeError, match="out of memory"):
        thread.hold("continue")._reached.result(PATIENCE)


def test_two_threads_are_never_in_one_engine(model: Model) -> None:
    """One that was released in the middle of a step, and one that was acquired right then."""
    engine, answers = model.llm_engine, Answers()
    old = acquire(model)
    long = add(old, answers, "long")
    engine.await_step()
    old.abort([long])
    assert old.release(time.monotonic()) != [], "it is in its step"
    new = acquire(model)
    request = add(new, answers, "new")
    assert not engine.stepping.acquire(timeout=0.2), "the new one waits for the old one's last step"
    engine.outcomes.put([])
    engine.await_step()
    engine.outcomes.put([Output(request)])
    assert answers.next()[0] == "new"
    assert engine.most_inside == 1
    assert new.release(time.monotonic() + PATIENCE) == []


def test_nothing_keeps_a_model_that_its_holders_have_given_back() -> None:
    model = Model()
    dead = weakref.ref(model)
    held = acquire(model)
    assert held.release(time.monotonic() + PATIENCE) == []
    del held, model
    gc.collect()
    assert dead() is None


# Engines in processes of their own


def engine_processes() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "VLLM::" in " ".join(child.cmdline())
    ]


@pytest.fixture(scope="module")
def mp_llm(tiny_model: str) -> Iterator[Any]:
    """An engine in a process of its own. The last test that uses it kills it."""
    llm = make_multiprocess_llm(tiny_model)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def text_policy(llm: Any, max_tokens: int, **options: Any) -> vLLMWrapper:
    return vLLMWrapper(
        llm,
        input_mode="text",
        generate_kwargs={"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **options},
    )


def texts_of(rows: list[TensorDictBase]) -> list[tuple[str, str, list[int], list[float]]]:
    return sorted(
        (row["text"].prompt, row["text"].response, row["tokens"].response.tolist(), row["log_probs"].response.tolist())
        for row in rows
    )


def test_an_engine_in_its_own_process_gives_what_one_in_this_process_gives_and_stays(
    mp_llm: Any, vllm_llm: Any
) -> None:
    outputs = []
    for llm in (mp_llm, vllm_llm):
        envs = [ScriptedEnv(numbered(f"{index} is a number, and ")) for index in range(3)]
        with LLMCollector(envs, text_policy(llm, 16), trajectories_per_batch=9, total_steps=9) as collector:
            outputs.append(texts_of(next(collector).unbind(0)))
        assert_settled(collector.stats())
        assert llm.llm_engine.get_num_unfinished_requests() == 0
        assert llm.generate(["hello"], use_tqdm=False)[0].outputs[0].token_ids, "the user's engine goes on"
    ours, theirs = outputs
    for (prompt, text, ids, scores), (*same, other_scores) in zip(ours, theirs, strict=True):
        assert [prompt, text, ids] == same
        assert scores == pytest.approx(other_scores, abs=1e-4)


def test_a_shutdown_takes_requests_out_of_an_engine_in_its_own_process(mp_llm: Any) -> None:
    with LLMCollector(
        [ScriptedEnv(), ScriptedEnv()],
        [text_policy(mp_llm, 480), text_policy(mp_llm, 4)],
        steps_per_batch=1,
        route="paired",
    ) as collector:
        assert next(collector)["collector", "env_id"].tolist() == [1]
        assert mp_llm.llm_engine.get_num_unfinished_requests() == 1
    assert mp_llm.llm_engine.get_num_unfinished_requests() == 0
    assert mp_llm.generate(["hello"], use_tqdm=False)[0].outputs[0].token_ids


def test_an_engine_process_that_is_killed_gives_an_error_and_no_hang(mp_llm: Any) -> None:
    """Killed while a long response is under way, at the moment when a short one has come."""

    def kill(texts: list[str]) -> None:
        if texts == ["q3#0"]:
            for process in engine_processes():
                os.kill(process.pid, signal.SIGKILL)

    target: queue.Queue[Any] = queue.Queue()
    with LLMCollector(
        [ScriptedEnv(on_step=kill), ScriptedEnv()],
        [text_policy(mp_llm, 4), text_policy(mp_llm, 480)],
        steps_per_batch=1,
        route="paired",
    ) as collector:
        collector.start(target)
        turns = list(iter(lambda: target.get(timeout=PATIENCE), None))
        with pytest.raises(PolicyError, match=r"EngineDeadError.*\(slot \d, trajectory \d+, turn 0\)") as failure:
            collector.join(PATIENCE)
        with pytest.raises(PolicyError):
            next(collector)
    assert isinstance(failure.value.__cause__, EngineDeadError)
    assert sum(int(turn["collector", "env_id"]) == 0 for turn in turns) == 4, "what was finished is delivered"
    assert_settled(collector.stats())
    assert not engine_processes()


def test_an_engine_of_ours_that_is_killed_is_built_anew_and_gone_in_the_end(tiny_model: str) -> None:
    built: list[weakref.ref[Any]] = []

    def make_policy() -> vLLMWrapper:
        llm = make_multiprocess_llm(tiny_model)
        built.append(weakref.ref(llm))
        return text_policy(llm, 8)

    def kill(texts: list[str]) -> None:
        if texts == ["q1#0"]:
            for process in engine_processes():
                os.kill(process.pid, signal.SIGKILL)

    def make_env() -> ScriptedEnv:
        return ScriptedEnv(on_step=kill)

    with LLMCollector(make_env, make_policy, steps_per_batch=1, total_steps=4, on_error="restart") as collector:
        texts = [batch["text"].prompt for batch in collector]
        stats = collector.stats()
    assert [text for (text,) in texts] == ["q0#0", "q1#0", "q3#0", "q4#0"]
    assert len(built) == 2
    assert stats["policy_restarts"] == 1 and stats["recorded_by_reason"] == {"failed": 1}
    assert_settled(stats)
    assert all(llm() is None for llm in built)
    assert not engine_processes()
