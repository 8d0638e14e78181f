"""Faults of a cluster, on real Ray: processes that are killed, hang, cannot start, or leave with their node."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import pytest
from fakes import PATIENCE, ScriptedEnv, assert_conserved, assert_settled, echo

from torchrl_llm import CollectorError, LLMCollector, PolicyError, RayCollector, WorkerError, WorkerHooks

pytestmark = pytest.mark.slow


def pid_of(collector: RayCollector, worker: int) -> int:
    """The process of a worker."""
    import ray

    actor = collector._fleet._members[worker].actor
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def living_actors() -> list[Any]:
    from ray._private.state import actors

    return [actor for actor in actors().values() if actor["ActorClassName"] == "Worker" and actor["State"] != "DEAD"]


def assert_no_actor_lives() -> None:
    """Ray notes an actor's end a little after its process has ended."""
    wait_until(lambda: not living_actors())


def kill(collector: RayCollector, worker: int) -> None:
    os.kill(pid_of(collector, worker), signal.SIGKILL)


def crash_at(number: int, mark: Path | None = None) -> Callable[..., None]:
    """A hook that ends its process at its ``number``-th call; with a mark, only where that file is not there yet."""
    calls = []

    def hook(*args: Any) -> None:
        calls.append(args)
        if len(calls) > number and (mark is None or not mark.exists()):
            if mark is not None:
                mark.touch()
            os._exit(1)

    return hook


def wait_in_step(folder: Path, text: str) -> Callable[[list[str]], None]:
    """A step that says that it was reached, by a file with its process, and then waits until there is another one."""

    def on_step(texts: list[str]) -> None:
        if text in texts and not (folder / "go").exists():
            written = folder / f"reached {os.getpid()}"
            written.write_text(str(os.getpid()))
            written.rename(folder / "reached")
            while not (folder / "go").exists():
                time.sleep(0.01)

    return on_step


def wait_for(path: Path) -> None:
    wait_until(path.exists)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_worker_killed_in_the_middle_of_a_batch_is_restarted_and_its_turns_are_counted(
    ray_cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[int] = []
    ready: list[int] = []
    hooks = WorkerHooks(on_worker_ready=lambda worker, call: ready.append(worker), on_worker_lost=lost.append)
    holds = [wait_in_step(tmp_path, text) for text in ("p4#0", "q2#0")]
    envs = [lambda: ScriptedEnv(fakes.numbered("p"), on_step=holds[0]), lambda: ScriptedEnv(on_step=holds[1])]
    collector = LLMCollector(envs, echo, steps_per_batch=4, total_steps=40, backend="ray", hooks=hooks)
    target: queue.Queue[Any] = queue.Queue()
    with collector, caplog.at_level(logging.WARNING, "torchrl_llm"):
        collector.start(target)
        batches = [target.get(timeout=PATIENCE)]
        assert batches[0]["text"] == [f"p{i}#0" for i in range(4)]
        # Worker 1 has finished two turns of four, and is in its third.
        wait_until(lambda: collector.stats()["workers"][1]["turns_finished"] == 2)
        assert collector.stats()["workers"][1]["in_flight"] == 3
        kill(collector, 1)
        wait_until(lambda: collector.stats()["worker_restarts"] == 1)
        assert_conserved(collector.stats())
        (tmp_path / "go").touch()
        batches += iter(lambda: target.get(timeout=PATIENCE), None)
        collector.join()
    stats = collector.stats()
    assert_settled(stats)
    assert [len(batch) for batch in batches] == [4] * 10
    assert lost == [1]
    assert ready[:2] in ([0, 1], [1, 0]) and ready[2:] in ([], [1])  # all may be delivered before it is back
    assert stats["turns"] == 40
    assert stats["workers"][1]["restarts"] == 1
    assert stats["turns_lost_with_workers"] == 2
    assert stats["recorded_by_reason"]["worker_died"] == 3
    assert "worker 1 was lost" in caplog.text
    assert "3 trajectories in flight and 2 finished turns went with it" in caplog.text
    assert len({i for batch in batches for i in batch["collector", "traj_ids"].tolist()}) == 40


def test_trajectory_ids_are_unique_over_workers_and_restarts_L47(ray_cluster: Any, tmp_path: Path) -> None:
    crash = crash_at(3, tmp_path / "crashed")
    collector = LLMCollector(lambda: ScriptedEnv(on_step=crash), echo, steps_per_batch=1, total_steps=8, backend="ray")
    rows = [row for batch in collector for row in batch.unbind(0)]
    before = fakes.texts(rows).index("q0#0", 1)
    # The fourth step begins when the third turn has found room, and so after the driver has the second.
    assert before in (2, 3)
    assert fakes.texts(rows)[:before] == [f"q{i}#0" for i in range(before)]
    assert fakes.texts(rows)[before:] == [f"q{i}#0" for i in range(8 - before)]  # the restarted worker begins anew
    ids = fakes.ids(rows, "traj_ids")
    assert len(set(ids)) == 8
    assert set(fakes.ids(rows, "worker_id")) == {0}
    stats = collector.stats()
    assert_settled(stats)
    assert stats["worker_restarts"] == 1
    assert_no_actor_lives()


def test_a_worker_that_dies_again_and_again_is_an_error_after_max_restarts_L47(ray_cluster: Any) -> None:
    crash = crash_at(2)
    collector = LLMCollector(lambda: ScriptedEnv(on_step=crash), echo, steps_per_batch=1, backend="ray", max_restarts=1)
    outcome = fakes.read_to_the_end(collector, "loop")
    # The third step begins when the second turn has found room, and so after the driver has the first.
    certain = [text for text in outcome.texts if text != "q1#0"]
    assert certain == ["q0#0", "q0#0"], "what was finished comes before the error"
    assert type(outcome.error) is WorkerError
    assert "worker 0 was lost, and was restarted 1 times before (max_restarts=1)" in str(outcome.error)
    for _ in range(2):
        with pytest.raises(WorkerError) as again:
            next(collector)
        assert again.value is outcome.error
    assert_settled(collector.stats())
    assert_no_actor_lives()


def test_without_restarts_the_others_deliver_what_they_have_before_the_error(ray_cluster: Any) -> None:
    crash = crash_at(0)
    envs = [lambda: ScriptedEnv(on_step=crash), lambda: ScriptedEnv(["p0", "p1"])]
    collector = LLMCollector(envs, echo, steps_per_batch=5, backend="ray", max_restarts=0, num_cpus=0.5)
    outcome = fakes.read_to_the_end(collector, "queue")
    assert outcome.texts in ([], ["p0#0"], ["p0#0", "p1#0"])
    assert type(outcome.error) is WorkerError
    stats = collector.stats()
    assert_settled(stats)
    assert stats["turns"] == len(outcome.texts)


def test_a_worker_that_hangs_is_restarted_after_worker_timeout(ray_cluster: Any, tmp_path: Path) -> None:
    mark = tmp_path / "hung"

    def hang_once(texts: list[str]) -> None:
        if texts == ["q2#0"] and not mark.exists():
            mark.touch()
            threading.Event().wait()

    collector = LLMCollector(
        lambda: ScriptedEnv(on_step=hang_once), echo, steps_per_batch=1, total_steps=6, backend="ray", worker_timeout=3
    )
    assert [batch["text"][0] for batch in collector] == ["q0#0", "q1#0", "q0#0", "q1#0", "q2#0", "q3#0"]
    stats = collector.stats()
    assert_settled(stats)
    assert stats["worker_restarts"] == 1
    assert stats["recorded_by_reason"]["worker_died"] >= 1


def test_a_stopped_process_is_taken_for_hung_too(ray_cluster: Any) -> None:
    collector = LLMCollector(
        lambda: ScriptedEnv(), echo, steps_per_batch=1, backend="ray", worker_timeout=1, max_restarts=0
    )
    with collector:
        next(collector)
        pid = pid_of(collector, 0)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerError, match=r"worker 0 has made no progress for 1\.\d s \(worker_timeout: 1\)"):
                while True:
                    next(collector)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert_settled(collector.stats())


def test_a_constructor_that_fails_is_the_constructors_error(ray_cluster: Any) -> None:
    def load_model() -> Any:
        raise MemoryError("CUDA out of memory")

    with pytest.raises(PolicyError, match=r"load_model failed: MemoryError: CUDA out of memory") as raised:
        LLMCollector(ScriptedEnv, load_model, steps_per_batch=1, backend="ray")
    assert type(raised.value.__cause__) is MemoryError
    assert raised.value.worker_id == 0
    assert_no_actor_lives()


def test_an_engine_that_kills_its_process_at_the_start_is_tried_again(ray_cluster: Any, tmp_path: Path) -> None:
    mark = tmp_path / "tried"

    def make_policy() -> Any:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        return fakes.Policy()

    with LLMCollector(ScriptedEnv, make_policy, steps_per_batch=1, total_steps=1, backend="ray") as collector:
        assert next(collector)["text"] == ["q0#0"]
    assert collector.stats()["worker_restarts"] == 1


def test_an_engine_that_always_kills_its_process_is_a_worker_error(ray_cluster: Any) -> None:
    def make_policy() -> Any:
        os._exit(137)

    with pytest.raises(WorkerError, match="worker 0 was lost, and was restarted 1 times before"):
        LLMCollector(ScriptedEnv, make_policy, steps_per_batch=1, backend="ray", max_restarts=1)
    assert_no_actor_lives()


def test_a_restart_that_fails_in_a_constructor_counts_and_the_others_go_on(ray_cluster: Any, tmp_path: Path) -> None:
    crash = crash_at(2)

    def make_env() -> ScriptedEnv:
        if (tmp_path / "built").exists():
            raise OSError("out of memory")
        (tmp_path / "built").touch()
        return ScriptedEnv(on_step=crash)

    collector = LLMCollector(make_env, echo, steps_per_batch=1, backend="ray", max_restarts=2)
    outcome = fakes.read_to_the_end(collector, "loop")
    assert outcome.texts in (["q0#0"], ["q0#0", "q1#0"])  # the second may have been on its way
    assert type(outcome.error) is WorkerError
    assert "out of memory" in str(outcome.error)
    assert collector.stats()["worker_restarts"] == 2


def test_a_constructor_whose_module_the_workers_lack_is_named(ray_cluster: Any, monkeypatch: Any) -> None:
    import sys
    import types

    module = types.ModuleType("only_on_the_driver")
    exec("def make_env():\n    raise AssertionError('it was called')", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_on_the_driver", module)
    with pytest.raises(WorkerError, match=r"worker 0 cannot be built: .*No module named 'only_on_the_driver'"):
        LLMCollector(module.make_env, echo, steps_per_batch=1, backend="ray")


def test_an_error_in_a_worker_keeps_its_type_its_message_and_its_cause_L46(ray_cluster: Any) -> None:
    def policy(td: Any) -> Any:
        if td["text"] == ["q2#0"]:
            raise ValueError("third call")
        return echo(td)

    collector = LLMCollector(ScriptedEnv, policy, steps_per_batch=1, backend="ray")
    seen = []
    for _ in range(2):
        with pytest.raises(PolicyError, match="policy 0 failed: ValueError: third call") as raised:
            for batch in collector:
                seen.append(batch["text"][0])
        assert type(raised.value.__cause__) is ValueError
        assert "third call" in str(raised.value.__cause__.__cause__), (
            "the worker's traceback is at the end of the chain"
        )
    assert seen == ["q0#0", "q1#0"]
    assert (raised.value.slot, raised.value.trajectory, raised.value.worker_id) == (0, 2, 0)
    assert_settled(collector.stats())


def test_an_interrupt_in_the_driver_ends_the_workers(ray_cluster: Any, tmp_path: Path) -> None:
    hold = wait_in_step(tmp_path, "q1#0")
    collector = LLMCollector(lambda: ScriptedEnv(on_step=hold), echo, steps_per_batch=1, backend="ray")
    assert next(collector)["text"] == ["q0#0"]
    wait_for(tmp_path / "reached")
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(collector)
    timer.join()
    with pytest.raises(CollectorError, match="broken off by KeyboardInterrupt"):
        next(collector)
    assert_no_actor_lives()
    assert_settled(collector.stats())


def test_shutdown_leaves_no_actor_and_says_closed_L48(ray_cluster: Any) -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, backend="ray")
    next(collector)
    assert len(living_actors()) == 1
    collector.shutdown()
    collector.shutdown()
    assert_no_actor_lives()
    assert not collector.is_running()
    for call in (collector.next, lambda: next(collector), lambda: collector.start(queue.Queue())):
        with pytest.raises(CollectorError, match="was shut down"):
            call()
    assert ray_cluster.is_initialized()
    wait_until(lambda: ray_cluster.available_resources()["CPU"] == 2)
    assert_settled(collector.stats())


def test_stats_balance_while_workers_come_and_go(ray_cluster: Any) -> None:
    collector = LLMCollector(lambda: ScriptedEnv(length=2), echo, steps_per_batch=3, backend="ray")
    target: queue.Queue[Any] = queue.Queue(maxsize=2)
    with collector:
        collector.start(target)
        for _ in range(20):
            target.get(timeout=PATIENCE)
            assert_conserved(collector.stats())
        kill(collector, 0)
        for _ in range(20):
            target.get(timeout=PATIENCE)
            assert_conserved(collector.stats())
    assert_settled(collector.stats())
    assert collector.stats()["worker_restarts"] == 1
