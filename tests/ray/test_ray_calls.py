"""Calls of workers beside their batches, beside each other, and beside what says that they are well."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE, ScriptedEnv, assert_settled, echo

from torchrl_llm import LLMCollector

pytestmark = pytest.mark.slow


def holder(folder: Path) -> Any:
    """A call that says that it is there, and waits until it may go."""

    def hold(collector: Any, seconds: float = PATIENCE) -> bool:
        (folder / "there").touch()
        deadline = time.monotonic() + seconds
        while not (folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return (folder / "go").exists()

    return hold


def in_thread(call: Any) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    return thread, answers


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} is not there"
        time.sleep(0.01)


def test_a_call_does_not_stand_behind_a_long_one(ray_cluster: Any, tmp_path: Path) -> None:
    hold = holder(tmp_path)
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=1, backend="ray") as collector:
        thread, answers = in_thread(lambda: collector.call_workers(hold))
        wait_for(tmp_path / "there")
        # That the long call is answered with True shows that these came through while it was there.
        assert collector.call_workers(lambda c: "quick", timeout=PATIENCE / 2) == {0: "quick"}
        assert collector.set_seed(3, static_seed=True) == 3
        with collector.pause():
            (tmp_path / "go").touch()
        thread.join(PATIENCE)
    assert answers == [{0: True}]


def test_standing_orders_of_a_worker_are_obeyed_one_after_the_other(ray_cluster: Any, tmp_path: Path) -> None:
    hold = holder(tmp_path)
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=1, backend="ray") as collector:

        def first(c: Any) -> None:
            hold(c)
            c.told = ["first"]

        def second(c: Any) -> None:
            c.told.append("second")

        threads = [in_thread(lambda: collector._roster.order("a", first, lambda life: ()))[0]]
        wait_for(tmp_path / "there")
        threads.append(in_thread(lambda: collector._roster.order("b", second, lambda life: ()))[0])
        assert collector.call_workers(lambda c: hasattr(c, "told")) == {0: False}
        (tmp_path / "go").touch()
        for thread in threads:
            thread.join(PATIENCE)
        assert collector.call_workers(lambda c: c.told) == {0: ["first", "second"]}


def test_a_worker_that_goes_on_beside_a_long_call_is_not_taken_for_hung(ray_cluster: Any, tmp_path: Path) -> None:
    hold = holder(tmp_path)
    collector = LLMCollector(
        lambda: ScriptedEnv(on_step=lambda texts: time.sleep(0.05)), echo, steps_per_batch=120, total_steps=120,
        backend="ray", worker_timeout=2, max_restarts=0,
    )  # fmt: skip
    target: queue.Queue[Any] = queue.Queue()
    with collector:
        collector.start(target)
        # Reports are the only sign of progress, for longer than worker_timeout.
        thread, _ = in_thread(lambda: collector.call_workers(hold))
        assert len(target.get(timeout=PATIENCE)) == 120
        (tmp_path / "go").touch()
        collector.join(PATIENCE)
        thread.join(PATIENCE)
    assert collector.stats()["worker_restarts"] == 0
    assert_settled(collector.stats())
