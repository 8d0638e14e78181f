"""How workers are led in, on real Ray: what the user's hook may do, and what happens to it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE, ScriptedEnv, assert_settled, echo

from torchrl_llm import LLMCollector, WorkerHooks

pytestmark = pytest.mark.slow


def test_a_worker_that_dies_in_the_call_of_its_hook_is_restarted(ray_cluster: Any, tmp_path: Path) -> None:
    mark = tmp_path / "died"
    greeted: list[int] = []

    def die_once(collector: Any) -> None:
        if not mark.exists():
            mark.touch()
            os._exit(1)

    def on_worker_ready(worker: int, call: Any) -> None:
        greeted.append(worker)
        call(die_once)

    collector = LLMCollector(
        ScriptedEnv, echo, steps_per_batch=1, total_steps=2, backend="ray",
        hooks=WorkerHooks(on_worker_ready=on_worker_ready),
    )  # fmt: skip
    assert [batch["text"] for batch in collector] == [["q0#0"], ["q1#0"]]
    assert greeted == [0, 0]
    assert collector.stats()["worker_restarts"] == 1
    assert_settled(collector.stats())


def test_what_fails_in_a_hook_is_not_taken_for_a_loss(ray_cluster: Any) -> None:
    def refuse(collector: Any) -> None:
        raise ValueError("not this one")

    hooks = WorkerHooks(on_worker_ready=lambda worker, call: call(refuse))
    with pytest.raises(Exception, match="ValueError: not this one"):
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, backend="ray", hooks=hooks)


def test_a_hook_may_wait_for_what_other_threads_ask_of_the_workers(ray_cluster: Any) -> None:
    seen: list[Any] = []

    def on_worker_ready(worker: int, call: Any) -> None:
        if worker == 0:
            return
        # Another thread gives a standing order meanwhile: it comes to the new worker before that takes part.
        thread = threading.Thread(target=lambda: seen.append(collector.call_workers(lambda c: "there")))
        order = threading.Thread(target=lambda: collector._roster.order("mark", set_mark, lambda life: ()))
        for each in (thread, order):
            each.start()
            each.join(PATIENCE)
            assert not each.is_alive()

    def set_mark(c: Any) -> None:
        c.mark = "set"

    collector = LLMCollector(
        ScriptedEnv, echo, steps_per_batch=1, backend="ray", num_cpus=0.5,
        hooks=WorkerHooks(on_worker_ready=on_worker_ready),
    )  # fmt: skip
    with collector:
        assert collector.add_workers(1) == [1]
        deadline = time.monotonic() + PATIENCE
        while collector.stats()["workers"][1]["turns"] == 0:
            assert time.monotonic() < deadline
            next(collector)
        assert seen == [{0: "there"}]
        assert collector.call_workers(lambda c: c.mark) == {0: "set", 1: "set"}
