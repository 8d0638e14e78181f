"""How a collection ends: finished, failed or closed, in each of the four ways to read."""

from __future__ import annotations

import gc
import itertools
import multiprocessing.resource_sharer
import queue
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from fakes import WAYS, Gate, Policy, ScriptedEnv, assert_conserved, assert_settled, echo, read_to_the_end
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

from torchrl_llm import CollectorError, EnvError, LLMCollector, PolicyError, PromptsExhausted

THREE = ["q0#0", "q1#0", "q2#0"]


def fourth(fault: Callable[[TensorDictBase], Any]) -> Callable[[TensorDictBase], Any]:
    """``echo``, and from its fourth call on ``fault``."""
    calls = []

    def policy(td: TensorDictBase) -> Any:
        calls.append(td)
        return echo(td) if len(calls) <= 3 else fault(td)

    return policy


@dataclass
class Fault:
    """Something that ends a collection after three turns, and the error that it gives, if any."""

    make_env: Callable[[], ScriptedEnv] = ScriptedEnv
    make_policy: Callable[[], Any] = lambda: Policy()
    total_steps: int = -1
    error: type[CollectorError] | None = None
    message: str = ""
    cause: type[BaseException] | None = None
    where: tuple[int | None, int | None, int | None] = (0, 3, 0)


FAULTS = {
    "all steps delivered": Fault(total_steps=3),
    "data run out": Fault(lambda: ScriptedEnv(["q0", "q1", "q2"])),
    "env raises in step": Fault(
        lambda: ScriptedEnv(on_step=fakes.raise_at(3, ValueError("boom"))),
        error=EnvError,
        message="env.step failed: ValueError: boom (slot 0, trajectory 3, turn 0)",
        cause=ValueError,
    ),
    "env raises in reset": Fault(
        lambda: ScriptedEnv(on_reset=fakes.raise_at(3, OSError("gone"))),
        error=EnvError,
        message="env.reset failed: OSError: gone (slot 0)",
        cause=OSError,
        where=(0, None, None),
    ),
    "env says in step that data have run out": Fault(
        lambda: ScriptedEnv(on_step=fakes.raise_at(3, PromptsExhausted())),
        error=EnvError,
        message="only reset may say that the data have run out",
        cause=RuntimeError,
    ),
    "policy raises": Fault(
        make_policy=lambda: Policy(fakes.raise_at(3, ValueError("boom"))),
        error=PolicyError,
        message="policy 0 failed: ValueError: boom (slot 0, trajectory 3, turn 0)",
        cause=ValueError,
    ),
    "policy exits": Fault(
        make_policy=lambda: Policy(fakes.raise_at(3, SystemExit(3))),
        error=PolicyError,
        message="policy 0 failed: SystemExit: 3 (slot 0, trajectory 3, turn 0)",
        cause=SystemExit,
    ),
    "policy returns the wrong batch size": Fault(
        make_policy=lambda: fourth(lambda td: td[:0]),
        error=PolicyError,
        message="the policy returned batch_size=(0,) for rows of batch_size=(1,); the two must be equal",
        cause=ValueError,
    ),
    "policy returns no TensorDict": Fault(
        make_policy=lambda: fourth(lambda td: "an answer"),
        error=PolicyError,
        message="the policy returned str; it must return a TensorDict",
        cause=TypeError,
    ),
    "policy lacks its out-keys": Fault(
        make_policy=lambda: fourth(lambda td: td),
        error=PolicyError,
        message="the environment needs ['answer'] of the policy, which wrote",
        cause=ValueError,
    ),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> Fault:
    return FAULTS[request.param]


def make(fault: Fault, **kwargs: Any) -> LLMCollector:
    arguments = {"steps_per_batch": 2, "total_steps": fault.total_steps, **kwargs}
    # What is built in a worker has to be built there.
    policy = fault.make_policy() if kwargs.get("backend") is None else fault.make_policy
    return LLMCollector(fault.make_env, policy, **arguments)


# On Ray each needs an actor of its own, which takes seconds: each fault in one way, and some in each way.
ON_RAY = sorted(
    {*zip(FAULTS, itertools.cycle(WAYS), strict=False)}
    | {*itertools.product(["all steps delivered", "env raises in step"], WAYS)}
)


def both(*local: Any, ray: list[tuple[Any, ...]]) -> list[Any]:
    """The combinations of ``local`` in this process, and those of ``ray`` on Ray: (backend, ...)."""
    here = [(None, *combination) for combination in itertools.product(*local)]
    return here + [pytest.param("ray", *combination, marks=pytest.mark.slow) for combination in ray]


@pytest.mark.parametrize(
    ("backend", "fault", "way", "env_threads"),
    both(FAULTS, WAYS, [0, 2], ray=[(*case, 0) for case in ON_RAY]),
    indirect=["backend", "fault"],
)
def test_what_was_finished_is_delivered_before_the_end(
    backend: str | None, way: str, fault: Fault, env_threads: int
) -> None:
    collector = make(fault, env_threads=env_threads, backend=backend)
    outcome = read_to_the_end(collector, way)
    assert outcome.texts == THREE
    if way != "buffer":
        assert [len(batch) for batch in outcome.batches] == [2, 1]
    if fault.error is None:
        assert outcome.error is None
    else:
        error = outcome.error
        assert type(error) is fault.error
        assert fault.message in str(error)
        assert type(error.__cause__) is fault.cause
        assert fault.cause is ValueError or error.__cause__.__traceback__ is not None or backend == "ray"
        assert (error.slot, error.trajectory, error.turn) == fault.where
    stats = collector.stats()
    assert_settled(stats)
    assert stats["turns"] == stats["delivered"] == 3
    assert stats["errors"] == (fault.error is not None)


@pytest.mark.parametrize(
    ("backend", "fault", "way"),
    both(FAULTS, WAYS, ray=[("env raises in step", "queue"), ("policy exits", "loop"), ("data run out", "buffer")]),
    indirect=["backend", "fault"],
)
def test_each_later_call_gives_the_same_end(backend: str | None, way: str, fault: Fault) -> None:
    collector = make(fault, backend=backend)
    error = read_to_the_end(collector, way).error
    for _ in range(2):
        if error is None:
            with pytest.raises(StopIteration):
                next(collector)
            assert list(collector) == []
            assert collector.next() is None
            with pytest.raises(CollectorError, match="delivered all its steps"):
                collector.start(queue.Queue())
        else:
            calls = [
                lambda: next(collector),
                collector.next,
                lambda: list(collector),
                lambda: collector.start(queue.Queue()),
            ]
            if way in ("buffer", "queue"):
                calls.append(collector.join)
            for call in calls:
                with pytest.raises(CollectorError) as again:
                    call()
                assert again.value is error
        assert not collector.is_running()
        if error is not None:
            collector.shutdown()
    collector.shutdown()
    if error is None:
        with pytest.raises(CollectorError, match="was shut down"):
            next(collector)


def test_the_traceback_of_a_repeated_error_does_not_grow() -> None:
    collector = make(FAULTS["env raises in step"])
    error = read_to_the_end(collector, "loop").error

    def depth() -> int:
        with pytest.raises(EnvError):
            next(collector)
        frames, traceback = 0, error.__traceback__
        while traceback is not None:
            frames, traceback = frames + 1, traceback.tb_next
        return frames

    assert depth() == depth() == depth()


def test_a_failed_collector_never_answers_like_a_finished_one_L13() -> None:
    collector = LLMCollector(
        lambda: ScriptedEnv(on_step=fakes.raise_at(0, ValueError("boom"))), echo, steps_per_batch=1
    )
    for _ in range(3):
        with pytest.raises(EnvError, match="boom") as raised:
            collector.next()
        assert isinstance(raised.value.__cause__, ValueError)
    assert_settled(collector.stats())


def test_an_error_in_the_middle_of_a_batch_loses_no_finished_turn_L36(way: str) -> None:
    def make_env() -> ScriptedEnv:
        return ScriptedEnv(on_step=fakes.raise_at(2, RuntimeError("step 3")))

    collector = LLMCollector(make_env, echo, steps_per_batch=4, total_steps=4)
    outcome = read_to_the_end(collector, way)
    assert outcome.texts == ["q0#0", "q1#0"]
    assert isinstance(outcome.error, EnvError)
    assert str(outcome.error.__cause__) == "step 3"
    stats = collector.stats()
    assert_settled(stats)
    assert stats["recorded_by_reason"] == {"failed": 1}


def test_only_complete_trajectories_are_delivered_before_an_error() -> None:
    def make_env() -> ScriptedEnv:
        return ScriptedEnv(length=2, on_step=fakes.raise_at(3, RuntimeError("in the second turn")))

    collector = LLMCollector(make_env, echo, trajectories_per_batch=2)
    outcome = read_to_the_end(collector, "loop")
    assert outcome.texts == ["q0#0", "q0#1"]
    assert (outcome.error.trajectory, outcome.error.turn) == (1, 1)
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["turns_finished"], stats["turns"], stats["turns_dropped"]) == (3, 2, 1)


def test_a_policy_error_in_the_started_thread_reaches_whoever_calls_L03() -> None:
    error = ValueError("third call")
    collector = LLMCollector(ScriptedEnv, Policy(fakes.raise_at(2, error)), steps_per_batch=1)
    buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=1)
    collector.start(buffer)
    for call in (collector.join, collector.next, lambda: collector.start(buffer), collector.join):
        if call == collector.next:
            assert not collector.is_running()
        with pytest.raises(PolicyError, match="third call") as raised:
            call()
        assert raised.value.__cause__ is error
        assert error.__traceback__ is not None
    assert fakes.texts(buffer[:].unbind(0)) == ["q0#0", "q1#0"]


def test_a_queue_ends_when_its_policy_fails_L04() -> None:
    collector = LLMCollector(ScriptedEnv, Policy(fakes.raise_at(1, ValueError("second"))), steps_per_batch=1)
    target: queue.Queue[Any] = queue.Queue()
    collector.start(target)
    items = [target.get(timeout=fakes.PATIENCE) for _ in range(2)]
    assert items[0]["text"] == ["q0#0"]
    assert items[1] is None
    with pytest.raises(PolicyError, match="second"):
        collector.join()
    assert target.empty()


def test_a_queue_has_one_end_marker_L05() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=6)
    target: queue.Queue[Any] = queue.Queue()
    collector.start(target)
    assert [batch["text"] for batch in iter(target.get, None)] == [[f"q{i}#0"] for i in range(6)]
    collector.shutdown()
    assert target.empty()


# Back-pressure


def watch_full(target: queue.Queue[Any]) -> threading.Event:
    """Is set when a ``put`` found no room; the queue stays a plain ``queue.Queue``."""
    full, put = threading.Event(), target.put

    def watched(*args: Any, **kwargs: Any) -> None:
        try:
            put(*args, **kwargs)
        except queue.Full:
            full.set()
            raise

    target.put = watched  # type: ignore[method-assign]
    return full


def test_a_full_queue_blocks_the_producer_L01() -> None:
    policy = Policy()
    collector = LLMCollector(ScriptedEnv, policy, steps_per_batch=1, total_steps=8)
    target: queue.Queue[Any] = queue.Queue(maxsize=2)
    full = watch_full(target)
    collector.start(target)
    for _ in range(2):  # it goes on waiting
        assert full.wait(fakes.PATIENCE)
        full.clear()
    assert collector.is_running()
    assert len(policy.calls) == 3
    stats = collector.stats()
    assert_conserved(stats)
    assert (stats["turns"], stats["turns_pending"]) == (2, 1)
    assert [batch["text"] for batch in iter(target.get, None)] == [[f"q{i}#0"] for i in range(8)]
    assert collector.join(fakes.PATIENCE)
    assert collector.stats()["turns_dropped"] == 0


def test_a_full_queue_does_not_hold_up_shutdown() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1)
    target: queue.Queue[Any] = queue.Queue(maxsize=1)
    full = watch_full(target)
    collector.start(target)
    assert full.wait(fakes.PATIENCE)
    collector.shutdown()
    assert not collector.is_running()
    items = [target.get_nowait() for _ in range(2)]
    assert items[0]["text"] == ["q0#0"]
    assert items[1] is None
    assert target.empty()
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["turns"], stats["turns_dropped"]) == (1, 1)
    assert stats["recorded_by_reason"] == {"shutdown": 1}


def test_what_a_full_queue_did_not_take_is_taken_at_shutdown_if_there_is_room() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1)
    target: queue.Queue[Any] = queue.Queue(maxsize=1)
    full = watch_full(target)
    with collector.pause():
        collector.start(target)
    assert full.wait(fakes.PATIENCE)
    reader_got: list[Any] = []
    reader = threading.Thread(target=lambda: reader_got.extend(iter(target.get, None)))
    with collector.pause():  # at rest, with a batch that had no room
        reader.start()
        collector.shutdown()
    reader.join(fakes.PATIENCE)
    finished = collector.stats()["turns_finished"]
    assert [batch["text"] for batch in reader_got] == [[f"q{i}#0"] for i in range(finished)]
    assert_settled(collector.stats())


@pytest.fixture
def process_queue() -> Iterator[Callable[[int], Any]]:
    queues = []

    def make_queue(maxsize: int) -> Any:
        queues.append(multiprocessing.get_context("spawn").Queue(maxsize))
        return queues[-1]

    yield make_queue
    for made in queues:
        made.close()
        made.cancel_join_thread()
        if made._thread is not None:
            made._thread.join(fakes.PATIENCE)
    multiprocessing.resource_sharer.stop()


def test_a_full_process_queue_does_not_hold_up_shutdown(
    process_queue: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    target = process_queue(1)
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1)
    collector.start(target)
    while collector.stats()["turns_finished"] < 2:
        assert collector.is_running()
        time.sleep(0.01)
    began = time.monotonic()
    collector.shutdown()
    assert time.monotonic() - began < 10
    assert not collector.is_running()
    assert "the None that marks the end could not be put" in caplog.text
    assert target.get(timeout=fakes.PATIENCE)["text"] == ["q0#0"]
    assert_settled(collector.stats())


def test_the_end_waits_for_room_in_a_process_queue(process_queue: Callable[[int], Any]) -> None:
    target = process_queue(1)
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=1)
    collector.start(target)
    while not collector.stats()["turns"]:
        time.sleep(0.01)
    assert not collector.join(0.3), "it ended without a None"
    assert target.get(timeout=fakes.PATIENCE)["text"] == ["q0#0"]
    assert target.get(timeout=fakes.PATIENCE) is None
    assert collector.join(fakes.PATIENCE)


def test_shutdown_ends_a_wait_for_room_for_the_end(process_queue: Callable[[int], Any]) -> None:
    target = process_queue(1)
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=1)
    collector.start(target)
    while not collector.stats()["turns"]:
        time.sleep(0.01)
    collector.shutdown()
    assert not collector.is_running()


# Shutdown


@pytest.mark.parametrize("way", ["loop", "pull"])
def test_shutdown_between_two_reads(way: str) -> None:
    collector = LLMCollector(ScriptedEnv, echo, num_envs=3, steps_per_batch=1)
    next(iter(collector) if way == "loop" else collector)
    collector.shutdown()
    for call in (lambda: next(collector), collector.next, lambda: collector.start(queue.Queue())):
        with pytest.raises(CollectorError, match="the collector was shut down"):
            call()
    stats = collector.stats()
    assert_settled(stats)
    assert stats["turns"] == 1
    assert set(stats["recorded_by_reason"]) == {"shutdown"}


def test_shutdown_while_another_thread_reads() -> None:
    gate = Gate()
    collector = LLMCollector(ScriptedEnv, Policy(lambda call, texts: gate() if call == 2 else None), steps_per_batch=5)
    failed: list[BaseException] = []

    def read() -> None:
        try:
            next(collector)
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    gate.wait()
    with pytest.warns(RuntimeWarning, match="could not be interrupted"):
        collector.shutdown(timeout=0.1)
    reader.join(fakes.PATIENCE)
    assert [type(error) for error in failed] == [CollectorError]
    assert "shut down while it was being read" in str(failed[0])
    assert_settled(collector.stats())
    gate.open()


@pytest.mark.parametrize("way", ["buffer", "queue"])
@pytest.mark.parametrize("env_threads", [0, 1])
def test_shutdown_while_started_delivers_what_was_finished_L39(way: str, env_threads: int) -> None:
    gate = Gate()
    collector = LLMCollector(
        ScriptedEnv,
        Policy(lambda call, texts: gate() if call == 3 else None),
        steps_per_batch=5,
        env_threads=env_threads,
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=1)
    target: queue.Queue[Any] = queue.Queue()
    collector.start(buffer if way == "buffer" else target)
    gate.wait()
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match="torchrl_llm-policy could not be interrupted"):
        collector.shutdown(timeout=0.5)
    assert time.monotonic() - began < 5
    assert not collector.is_running()
    if way == "buffer":
        rows = buffer[:].unbind(0)
    else:
        rows = target.get_nowait().unbind(0)
        assert target.get_nowait() is None
        assert target.empty()
    assert fakes.texts(rows) == THREE
    stats = collector.stats()
    assert_settled(stats)
    assert stats["recorded_by_reason"] == {"shutdown": 1}
    gate.open()
    assert collector.join(), "a shutdown is no error"


def test_shutdown_is_idempotent_and_final_L42() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1)
    next(collector)
    collector.shutdown()
    collector.shutdown()
    collector.async_shutdown()
    for call in (lambda: next(collector), lambda: list(collector), lambda: collector.start(queue.Queue())):
        with pytest.raises(CollectorError, match="was shut down"):
            call()
    assert_settled(collector.stats())


def test_a_collector_that_was_never_read_shuts_down() -> None:
    closed: list[str] = []

    def make_env() -> ScriptedEnv:
        return ScriptedEnv(on_close=lambda: closed.append("built"))

    with LLMCollector(make_env, echo, num_envs=2, steps_per_batch=1, env_threads=2) as collector:
        pass
    collector.shutdown()
    assert closed == ["built", "built"]
    assert collector.stats()["launched"] == 0


@pytest.mark.parametrize("env_threads", [0, 1])
def test_a_hung_env_step_holds_up_shutdown_no_longer_than_its_timeout_L38(env_threads: int) -> None:
    gate = Gate()
    collector = LLMCollector(lambda: ScriptedEnv(on_step=gate), echo, steps_per_batch=1, env_threads=env_threads)
    target: queue.Queue[Any] = queue.Queue()
    collector.start(target)
    gate.wait()
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match="could not be interrupted"):
        collector.shutdown(timeout=0.3)
    assert 0.2 < time.monotonic() - began < 5
    assert_conserved(collector.stats())
    for call in (lambda: next(collector), lambda: collector.start(target)):
        with pytest.raises(CollectorError, match="was shut down"):
            call()
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector.shutdown()  # nothing new to wait for
    assert time.monotonic() - began < 5
    gate.open()
    items = list(iter(lambda: target.get(timeout=fakes.PATIENCE), None))
    assert fakes.texts(row for batch in items for row in batch.unbind(0)) in ([], ["q0#0"])
    assert collector.join(fakes.PATIENCE)
    assert target.empty()
    assert_settled(collector.stats())


def test_an_env_that_hung_at_shutdown_is_closed_when_its_step_returns() -> None:
    gate, closed = Gate(), threading.Event()
    collector = LLMCollector(
        [lambda: ScriptedEnv(on_step=gate, on_close=closed.set), lambda: ScriptedEnv()],
        echo,
        steps_per_batch=1000,
        total_steps=1000,
        env_threads=2,
    )
    collector.start(queue.Queue())
    gate.wait()
    with pytest.warns(RuntimeWarning, match="torchrl_llm-env-"):
        collector.shutdown(timeout=0.1)
    assert not closed.is_set()
    gate.open()
    assert closed.wait(fakes.PATIENCE)


def test_a_shutdown_that_waits_in_vain_names_only_what_is_busy() -> None:
    gate = Gate()
    collector = LLMCollector(
        [lambda: ScriptedEnv(on_step=gate), *[lambda: ScriptedEnv()] * 3],
        [lambda: Policy(), lambda: Policy()],
        steps_per_batch=1,
        env_threads=4,
    )
    while not gate.reached.is_set():
        next(collector)
    with pytest.warns(RuntimeWarning) as caught:
        collector.shutdown(timeout=0.0)
    assert len(caught) == 1
    assert str(caught[0].message).count("torchrl_llm-") == 1
    gate.open()


def test_a_shutdown_from_a_postproc_ends_the_collection() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, postproc=lambda batch: stop(batch))

    def stop(batch: TensorDictBase) -> TensorDictBase:
        collector.shutdown()
        return batch

    assert next(collector)["text"] == ["q0#0"]
    assert_settled(collector.stats())
    with pytest.raises(CollectorError, match="was shut down"):
        next(collector)


def test_a_shutdown_from_a_postproc_ends_a_started_collection() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, postproc=lambda batch: stop(batch))

    def stop(batch: TensorDictBase) -> TensorDictBase:
        collector.shutdown()
        return batch

    target: queue.Queue[Any] = queue.Queue()
    collector.start(target)
    assert collector.join(fakes.PATIENCE)
    assert target.get_nowait()["text"] == ["q0#0"]
    assert target.get_nowait() is None
    assert_settled(collector.stats())


def test_a_shutdown_while_a_batch_is_being_handed_over_leaves_no_thread() -> None:
    gate = Gate()

    def postproc(batch: TensorDictBase) -> TensorDictBase:
        gate()
        return batch

    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, postproc=postproc)
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.append(next(collector)))
    reader.start()
    gate.wait()
    closer = threading.Thread(target=collector.shutdown)
    closer.start()
    while not collector._control.stopping:
        time.sleep(0.001)
    gate.open()
    reader.join(fakes.PATIENCE)
    closer.join(fakes.PATIENCE)
    assert [batch["text"] for batch in got] == [["q0#0"]]
    assert not [t for t in threading.enumerate() if t.name == "torchrl_llm-policy"]
    assert_settled(collector.stats())


@pytest.mark.parametrize("maxsize", [0, 1, 3])
@pytest.mark.parametrize("env_threads", [0, 2])
def test_a_shutdown_at_any_moment_ends_a_started_collection_in_order(maxsize: int, env_threads: int) -> None:
    for taken in range(12):
        collector = LLMCollector(
            lambda: ScriptedEnv(length=2), echo, steps_per_batch=1 + taken % 3, env_threads=env_threads
        )
        target: queue.Queue[Any] = queue.Queue(maxsize)
        collector.start(target)
        items = [target.get(timeout=fakes.PATIENCE) for _ in range(taken)]
        reader = threading.Thread(target=lambda items=items, q=target: items.extend(iter(q.get, None)))
        if taken % 2:
            reader.start()
        collector.shutdown()
        assert not collector.is_running()
        if not taken % 2:
            reader.start()
        reader.join(fakes.PATIENCE)
        assert target.empty()
        stats = collector.stats()
        assert_settled(stats)
        rows = [row for batch in items for row in batch.unbind(0)]
        assert fakes.texts(rows) == [f"q{i // 2}#{i % 2}" for i in range(len(rows))]
        assert len(rows) == stats["turns"]


def read_until_it_raises(collector: LLMCollector, errors: list[CollectorError]) -> None:
    try:
        for _ in collector:
            pass
    except CollectorError as error:
        errors.append(error)


@pytest.mark.parametrize("env_threads", [0, 2])
def test_a_shutdown_at_any_moment_ends_a_read_collection(env_threads: int) -> None:
    for turns in range(0, 60, 4):
        collector = LLMCollector(
            lambda: ScriptedEnv(length=2), echo, num_envs=2, steps_per_batch=1, env_threads=env_threads
        )
        errors: list[CollectorError] = []
        reader = threading.Thread(target=read_until_it_raises, args=(collector, errors))
        reader.start()
        while collector.stats()["turns"] < turns:
            pass
        collector.shutdown()
        reader.join(fakes.PATIENCE)
        assert [("shut down" in str(error)) for error in errors] == [True]
        stats = collector.stats()
        assert_settled(stats)
        assert stats["turns"] >= turns
        assert not [t for t in threading.enumerate() if t.name.startswith("torchrl_llm")]


@pytest.mark.parametrize("reads", [0, 1])
def test_a_loop_that_writes_to_a_queue_ends_it_at_shutdown(reads: int) -> None:
    target: queue.Queue[Any] = queue.Queue()
    with LLMCollector(ScriptedEnv, echo, num_envs=3, steps_per_batch=2, queue=target) as collector:
        for _ in range(reads):
            assert next(collector) is None
    assert_settled(collector.stats())
    items = [target.get_nowait() for _ in range(target.qsize())]
    assert items.pop() is None
    assert None not in items
    turns = sum(len(batch) for batch in items)
    assert turns == collector.stats()["turns"] == collector.stats()["turns_finished"]
    assert turns >= 2 * reads


def test_a_loop_that_writes_to_a_buffer_writes_what_was_finished_at_shutdown() -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=1)
    with LLMCollector(ScriptedEnv, echo, num_envs=3, steps_per_batch=2, replay_buffer=buffer) as collector:
        assert next(collector) is None
    stats = collector.stats()
    assert_settled(stats)
    assert len(buffer) == stats["turns"] == stats["turns_finished"]


# What fails while it ends


def test_a_postproc_that_fails_ends_the_collection_with_its_error(way: str) -> None:
    error = ZeroDivisionError("no advantage")

    def postproc(batch: TensorDictBase) -> TensorDictBase:
        if "q2#0" in batch["text"]:
            raise error
        return batch

    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, postproc=postproc)
    outcome = read_to_the_end(collector, way)
    assert outcome.texts == ["q0#0", "q1#0"]
    assert "postproc failed: ZeroDivisionError: no advantage" in str(outcome.error)
    assert outcome.error.__cause__ is error
    with pytest.raises(CollectorError) as again:
        next(collector)
    assert again.value is outcome.error
    stats = collector.stats()
    assert_settled(stats)
    assert stats["recorded_by_reason"]["postproc_failed"] == 1


def test_a_postproc_that_fails_at_shutdown_still_lets_it_end() -> None:
    gate = Gate()

    def postproc(batch: TensorDictBase) -> TensorDictBase:
        raise ZeroDivisionError("only at the end")

    collector = LLMCollector(
        lambda: ScriptedEnv(on_step=lambda texts: gate() if texts == ["q2#0"] else None),
        echo,
        steps_per_batch=5,
        postproc=postproc,
    )
    target: queue.Queue[Any] = queue.Queue()
    collector.start(target)
    gate.wait()
    closer = threading.Thread(target=collector.shutdown)
    closer.start()
    while not collector._control.stopping:
        time.sleep(0.001)
    gate.open()
    closer.join(fakes.PATIENCE)
    assert target.get(timeout=fakes.PATIENCE) is None
    assert_settled(collector.stats())
    with pytest.raises(CollectorError, match="only at the end"):
        collector.join(fakes.PATIENCE)


def test_an_env_that_fails_to_close_does_not_hide_the_end(way: str) -> None:
    closed: list[str] = []

    def make_bad() -> ScriptedEnv:
        return ScriptedEnv(on_close=fakes.raise_once_at(0, OSError("cannot close")))

    def make_good() -> ScriptedEnv:
        return ScriptedEnv(on_close=lambda: closed.append("good"))

    collector = LLMCollector([make_bad, make_good], echo, steps_per_batch=1, total_steps=4)
    with pytest.warns(RuntimeWarning, match="env 0 could not be closed: OSError: cannot close"):
        outcome = read_to_the_end(collector, way)
    assert outcome.error is None
    assert len(outcome.rows) == 4
    assert closed == ["good"]
    assert_settled(collector.stats())


def test_an_interrupt_in_the_reader_is_the_readers_own() -> None:
    collector = LLMCollector(
        lambda: ScriptedEnv(on_step=fakes.raise_at(1, KeyboardInterrupt())), echo, steps_per_batch=1
    )
    assert next(collector)["text"] == ["q0#0"]
    with pytest.raises(KeyboardInterrupt):
        next(collector)
    for _ in range(2):
        with pytest.raises(CollectorError, match="broken off by KeyboardInterrupt"):
            next(collector)
    assert_settled(collector.stats())


def test_an_exit_on_an_env_thread_is_an_env_error(way: str) -> None:
    collector = LLMCollector(
        lambda: ScriptedEnv(on_step=fakes.raise_at(1, SystemExit(5))), echo, steps_per_batch=1, env_threads=1
    )
    outcome = read_to_the_end(collector, way)
    assert outcome.texts == ["q0#0"]
    assert isinstance(outcome.error, EnvError)
    assert isinstance(outcome.error.__cause__, SystemExit)


def test_a_queue_that_fails_ends_the_collection() -> None:
    class Broken:
        def put(self, item: Any, timeout: float | None = None) -> None:
            raise ConnectionError("the other side is gone")

    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1)
    collector.start(Broken())
    with pytest.raises(CollectorError, match="the queue does not take the batch: ConnectionError"):
        collector.join(fakes.PATIENCE)
    assert_settled(collector.stats())


def test_a_queue_that_does_not_take_the_end_is_an_error() -> None:
    class NoEnd:
        def put(self, item: Any, timeout: float | None = None) -> None:
            if item is None:
                raise ConnectionError("the other side is gone")

    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=2)
    collector.start(NoEnd())
    with pytest.raises(CollectorError, match=r"the queue does not take the None.*ConnectionError"):
        collector.join(fakes.PATIENCE)
    stats = collector.stats()
    assert_settled(stats)
    assert stats["turns"] == 2


def test_a_buffer_that_does_not_take_turns_says_which_storage_to_use() -> None:
    buffer = ReplayBuffer(batch_size=1)
    buffer.extend = fakes.raise_at(0, RuntimeError("batch size"))  # type: ignore[method-assign]
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1)
    collector.start(buffer)
    with pytest.raises(CollectorError, match=r"RuntimeError: batch size.*LazyStackStorage"):
        collector.join(fakes.PATIENCE)


# One reader at a time


def test_reading_a_running_collector_is_refused_L07() -> None:
    gate = Gate()
    collector = LLMCollector(
        ScriptedEnv, Policy(lambda call, texts: gate() if call == 3 else None), steps_per_batch=1, total_steps=12
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(100), batch_size=1)
    collector.start(buffer)
    gate.wait()
    assert collector.is_running()
    for call in (lambda: next(collector), lambda: list(collector), lambda: collector.start(buffer)):
        with pytest.raises(CollectorError, match=r"runs in the background since start\(\)"):
            call()
    gate.open()
    assert collector.join(fakes.PATIENCE)
    assert fakes.texts(buffer[:].unbind(0)) == [f"q{i}#0" for i in range(12)]


def test_two_threads_cannot_read_one_collector() -> None:
    gate = Gate()
    collector = LLMCollector(lambda: ScriptedEnv(on_step=gate), echo, steps_per_batch=1)
    reader = threading.Thread(target=lambda: next(collector))
    reader.start()
    gate.wait()
    with pytest.raises(CollectorError, match="read by another thread"):
        next(collector)
    gate.open()
    reader.join(fakes.PATIENCE)
    assert next(collector)["text"] == ["q1#0"]
    collector.shutdown()


def test_two_collectors_share_a_buffer_and_mix_nothing_up_L08() -> None:
    own = [ReplayBuffer(storage=LazyStackStorage(100), batch_size=1) for _ in range(2)]
    shared = ReplayBuffer(storage=LazyStackStorage(100), batch_size=1)
    for buffers in (own, [shared, shared]):
        collectors = [
            LLMCollector(
                lambda prefix=prefix: ScriptedEnv(fakes.numbered(prefix)), echo, steps_per_batch=1, total_steps=10
            )
            for prefix in "ab"
        ]
        for collector, buffer in zip(collectors, buffers, strict=True):
            collector.start(buffer)
        while any(collector.is_running() for collector in collectors):
            if len(buffers[0]):
                buffers[0].sample(2)
        for collector in collectors:
            assert collector.join(fakes.PATIENCE)
            assert_settled(collector.stats())
    for prefix, buffer in zip("ab", own, strict=True):
        assert fakes.texts(buffer[:].unbind(0)) == [f"{prefix}{i}#0" for i in range(10)]
    rows = fakes.texts(shared[:].unbind(0))
    assert len(rows) == 20
    for prefix in "ab":
        assert [t for t in rows if t.startswith(prefix)] == [f"{prefix}{i}#0" for i in range(10)]


def test_sampling_before_the_first_write_is_a_clear_error_and_no_end_L09() -> None:
    gate = Gate()
    collector = LLMCollector(ScriptedEnv, Policy(lambda call, texts: gate()), steps_per_batch=1, total_steps=2)
    buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=2)
    collector.start(buffer)
    gate.wait()
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer.sample()
    assert collector.is_running()
    gate.open()
    assert collector.join(fakes.PATIENCE)
    assert set(buffer.sample()["text"]) <= {"q0#0", "q1#0"}


def test_join_waits_no_longer_than_told_and_only_for_what_was_started() -> None:
    gate = Gate()
    collector = LLMCollector(lambda: ScriptedEnv(on_step=gate), echo, steps_per_batch=1, total_steps=1)
    with pytest.raises(CollectorError, match=r"start\(\) was not called"):
        collector.join()
    collector.start(queue.Queue())
    gate.wait()
    assert collector.join(timeout=0.05) is False
    gate.open()
    assert collector.join() is True


# Collectors that nobody ends


def test_a_started_collector_that_is_dropped_ends_L41() -> None:
    target: queue.Queue[Any] = queue.Queue(maxsize=1)
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1)
    full = watch_full(target)
    collector.start(target)
    assert full.wait(fakes.PATIENCE)
    dropped = weakref.ref(collector)
    del collector
    gc.collect()
    assert dropped() is None
    assert not [t for t in threading.enumerate() if t.name.startswith("torchrl_llm")]
    assert target.get_nowait()["text"] == ["q0#0"]
    assert target.get_nowait() is None


def test_a_loop_that_was_left_and_dropped_leaves_no_thread() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, env_threads=2)
    for _ in collector:
        break
    del collector
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("torchrl_llm")]


def test_a_constructor_that_failed_leaves_nothing(recwarn: pytest.WarningsRecorder) -> None:
    closed = threading.Event()

    def bad_policy() -> Any:
        raise OSError("no such model")

    with pytest.raises(PolicyError, match=r"bad_policy failed: OSError: no such model"):
        LLMCollector(lambda: ScriptedEnv(on_close=closed.set), [lambda: Policy(), bad_policy], steps_per_batch=1)
    assert closed.is_set()
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("torchrl_llm")]
    assert not [w for w in recwarn if issubclass(w.category, pytest.PytestUnraisableExceptionWarning)]


def test_what_was_given_stays_open_and_what_was_built_is_closed() -> None:
    closed: list[str] = []
    given = ScriptedEnv(on_close=lambda: closed.append("given"))

    def make_env() -> ScriptedEnv:
        return ScriptedEnv(on_close=lambda: closed.append("built"))

    def make_chat_env() -> EnvBase:
        base = ScriptedEnv(on_close=lambda: closed.append("built, transformed"))
        return TransformedEnv(base, StepCounter(max_steps=3))

    with LLMCollector([given, make_env, make_chat_env], echo, steps_per_batch=1) as collector:
        next(collector)
    assert sorted(closed) == ["built", "built, transformed"]


SCRIPT = """
import queue, sys
sys.path[:0] = [{tests!r}, {root!r}]
from tensordict import set_list_to_stack
set_list_to_stack(True).set()
from fakes import Gate, ScriptedEnv, echo
from torchrl_llm import LLMCollector

if __name__ == "__main__":
    gate = Gate()
    {body}
    print("the end", flush=True)
"""
ENDLESS = """
    target = queue.Queue()
    collector = LLMCollector(ScriptedEnv, echo, num_envs=2, steps_per_batch=1, env_threads=1)
    collector.start(target)
    target.get()
"""
HUNG = """
    collector = LLMCollector(lambda: ScriptedEnv(on_step=gate), echo, steps_per_batch=1)
    collector.start(queue.Queue())
    gate.wait()
"""


@pytest.mark.parametrize("body", [ENDLESS, HUNG], ids=["endless", "hung"])
def test_a_process_exits_with_a_running_collector_L84(body: str, tmp_path: Path) -> None:
    tests = Path(__file__).parent
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(tests), root=str(tests.parent), body=body.strip()))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the end\n"
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_an_unbounded_collector_is_finished_by_its_data_alone() -> None:
    """A slot whose data run out does not end the others."""
    collector = LLMCollector(
        [lambda: ScriptedEnv(["a0"]), lambda: ScriptedEnv(["b0", "b1", "b2"])], echo, steps_per_batch=1
    )
    assert sorted(fakes.texts(row for batch in collector for row in batch.unbind(0))) == [
        "a0#0",
        "b0#0",
        "b1#0",
        "b2#0",
    ]
    assert_settled(collector.stats())
    assert torch.is_grad_enabled()
