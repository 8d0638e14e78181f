"""Workers that leave, on real Ray: while they are busy or answers are on their way, and when that is interrupted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import pytest
from fakes import PATIENCE, ScriptedEnv, assert_settled, echo

from torchrl_llm import CollectorError, LLMCollector, WorkerHooks
from torchrl_llm.ray import departures, ending

pytestmark = pytest.mark.slow


def living_actors() -> list[Any]:
    from ray._private.state import actors

    return [actor for actor in actors().values() if actor["ActorClassName"] == "Worker" and actor["State"] != "DEAD"]


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def batches_in(target: queue.Queue[Any]) -> list[Any]:
    return [item["text"] for item in iter(target.get_nowait, None)]


def test_a_removal_that_is_interrupted_leaves_no_worker_behind(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=1, backend="ray", num_workers=2, num_cpus=0.5) as collector:
        next(collector)
        with monkeypatch.context() as patch:
            patch.setattr(departures, "ask_to_finish", interrupted)
            with pytest.raises(KeyboardInterrupt):
                collector.remove_workers(1)
        states = {worker: figures["state"] for worker, figures in collector.stats()["workers"].items()}
        assert states == {0: "collecting", 1: "removed"}
        wait_until(lambda: len(living_actors()) == 1)
        for _ in range(4):
            next(collector)
    assert_settled(collector.stats())


def test_an_end_that_is_interrupted_leaves_no_actor_and_no_placement_group(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.util import placement_group_table

    def groups() -> list[str]:
        return [entry["state"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"]

    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, backend="ray", placement="pack")
    next(collector)
    assert groups() == ["CREATED"]
    with monkeypatch.context() as patch:
        patch.setattr(departures, "ask_to_finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collector.shutdown()
    wait_until(lambda: not living_actors() and not groups())
    assert_settled(collector.stats())


def test_an_end_takes_those_along_whom_another_thread_lets_leave(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go = threading.Event(), threading.Event()
    real = departures.ask_to_finish

    def hold(*args: Any) -> Any:
        held.set()
        go.wait(PATIENCE)
        return real(*args)

    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, backend="ray", num_workers=2, num_cpus=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(departures, "ask_to_finish", hold)
        remover = threading.Thread(target=collector.remove_workers)
        remover.start()
        assert held.wait(PATIENCE)
        patch.setattr(departures, "ask_to_finish", real)
        collector.shutdown()
        wait_until(lambda: not living_actors())
        go.set()
        remover.join(PATIENCE)
    assert not remover.is_alive()
    assert_settled(collector.stats())


def test_a_batch_whose_answer_is_on_its_way_is_delivered_when_the_collector_ends(ray_cluster: Any) -> None:
    collector = LLMCollector(lambda: ScriptedEnv(["a", "b", "c"]), echo, steps_per_batch=10, backend="ray")
    [member] = collector._fleet._members.values()
    post, on_its_way = member.post, []
    # As if the thread that posts it had not come to that yet.
    member.post = lambda event: on_its_way.append(event) if event.call == "take" else post(event)
    target: queue.Queue[Any] = queue.Queue()
    collector.start(target)
    wait_until(lambda: len(on_its_way) == 1)
    collector.shutdown()
    assert batches_in(target) == [["a#0", "b#0", "c#0"]]
    stats = collector.stats()
    assert (stats["turns"], stats["turns_dropped"]) == (3, 0)
    assert_settled(stats)


def stuck_beside_three(folder: Path) -> list[Callable[[], ScriptedEnv]]:
    """One environment that has three turns, and one whose first step takes longer than any test."""

    def stick(texts: list[str]) -> None:
        (folder / "stuck").touch()
        threading.Event().wait()

    return [lambda: ScriptedEnv(["x", "y", "z"]), lambda: ScriptedEnv(fakes.numbered("s"), on_step=stick)]


def test_what_was_finished_beside_a_thread_that_is_stuck_is_delivered_at_the_end(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "FINISH_SECONDS", 4.0)
    collector = LLMCollector(
        stuck_beside_three(tmp_path), echo, steps_per_batch=100, env_threads=2, backend="ray", num_workers=1
    )
    target: queue.Queue[Any] = queue.Queue()
    collector.start(target)
    wait_until(lambda: collector.stats()["turns_finished"] == 3 and (tmp_path / "stuck").exists())
    collector.shutdown()
    [texts] = batches_in(target)
    assert sorted(texts) == ["x#0", "y#0", "z#0"]
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["turns"], stats["turns_dropped"]) == (3, 0)
    assert stats["recorded_by_reason"] == {"shutdown": 1}


@pytest.mark.parametrize("env_threads", [0, 2])
def test_a_worker_that_is_removed_while_it_is_stuck_has_not_died(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env_threads: int
) -> None:
    monkeypatch.setattr(ending, "FINISH_SECONDS", 4.0)
    three, stuck = stuck_beside_three(tmp_path)
    collector = LLMCollector(
        [lambda: ScriptedEnv(["a", "b"]), three, lambda: ScriptedEnv(["c", "d"]), stuck], echo, steps_per_batch=100,
        env_threads=env_threads, backend="ray", num_workers=2, num_cpus=0.5,
    )  # fmt: skip
    target: queue.Queue[Any] = queue.Queue()
    with collector:
        collector.start(target)
        wait_for = 3 if env_threads else 0
        wait_until(
            lambda: collector.stats()["workers"][1]["turns_finished"] >= wait_for and (tmp_path / "stuck").exists()
        )
        assert collector.remove_workers(1) == [1]
        collector.join(PATIENCE)
    stats = collector.stats()
    assert_settled(stats)
    texts = [text for batch in batches_in(target) for text in batch]
    if env_threads:
        assert sorted(texts) == ["a#0", "b#0", "c#0", "d#0", "x#0", "y#0", "z#0"]
        assert stats["recorded_by_reason"] == {"worker_removed": 1}
    assert stats["recorded_by_reason"].keys() == {"worker_removed"}
    assert stats["turns_lost_with_workers"] == 0


def test_who_removes_workers_leaves_the_others_events_to_the_reader(ray_cluster: Any) -> None:
    threads: list[str] = []
    hooks = WorkerHooks(on_worker_ready=lambda worker, call: threads.append(threading.current_thread().name))
    collector = LLMCollector(
        ScriptedEnv, echo, steps_per_batch=1, backend="ray", hooks=hooks, num_workers=2, num_cpus=0.5
    )
    with collector:
        posted = threading.Event()
        put = collector._fleet._events.put

        class Told:
            """The queue of events, which tells when a worker is ready."""

            def __getattr__(self, name: str) -> Any:
                return getattr(events, name)

            def put(self, event: Any) -> None:
                put(event)
                if event is not None and event.call == "ready":
                    posted.set()

        events, collector._fleet._events = collector._fleet._events, Told()
        del threads[:]
        assert collector.add_workers(1) == [2]
        assert posted.wait(PATIENCE)
        # Nobody reads: the event of the new worker waits.
        collector.add_workers(1)
        remover = threading.Thread(target=collector.remove_workers, name="remover")
        remover.start()
        remover.join(PATIENCE)
        assert threads == []
        wait_until(lambda: next(collector) is not None and threads != [])
        assert threads == [threading.current_thread().name]


def test_a_shutdown_with_a_timeout_does_not_wait_longer_for_busy_workers_that_write_to_a_sink(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    real = departures.ask_to_finish

    def seen(members: Any, seconds: float) -> Any:
        given.append(seconds)
        return real(members, seconds)

    monkeypatch.setattr(departures, "ask_to_finish", seen)
    _, stuck = stuck_beside_three(tmp_path)
    collector = LLMCollector(stuck, echo, steps_per_batch=1, backend="ray", queue=queue.Queue())

    def read() -> None:
        with pytest.raises(CollectorError, match="was shut down while it was being read"):
            next(collector)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until((tmp_path / "stuck").exists)
    begun = time.monotonic()
    collector.shutdown(timeout=0.5)
    reader.join(PATIENCE)
    assert time.monotonic() - begun < ending.FINISH_SECONDS / 2
    assert 0 < given[0] <= 0.5
    assert not living_actors()
    assert_settled(collector.stats())
