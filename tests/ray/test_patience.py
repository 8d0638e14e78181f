"""Waits for workers that hang, on real Ray: whoever waits, they end; and those that are well are left alone."""

from __future__ import annotations

import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from fakes import PATIENCE, ScriptedEnv, assert_settled, echo
from ray.exceptions import RayActorError
from torch import nn

from torchrl_llm import LLMCollector, RayCollector, WorkerError
from torchrl_llm.ledger import Ledger
from torchrl_llm.ray import patience
from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.member import COLLECTING, Member
from torchrl_llm.ray.messages import Header

pytestmark = pytest.mark.slow


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 3 * PATIENCE  # workers have to start
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def within_patience(call: Callable[[], Any]) -> Any:
    """What a call gives that must not hang."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(3 * PATIENCE)
    assert not thread.is_alive(), "it hangs"
    return answers[0]


def hang_once(mark: Path, text: str) -> Callable[[list[str]], None]:
    """A hook that never returns where it sees a text, the first time."""

    def hook(texts: list[str]) -> None:
        if text in texts and not mark.exists():
            mark.touch()
            threading.Event().wait()

    return hook


def policy_with(hook: Callable[[list[str]], None]) -> Callable[[], nn.Module]:
    """A policy with a weight that calls a hook with what it is asked."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, td: Any) -> Any:
            hook(td["text"])
            return echo(td)

    return Policy


def pause(collector: RayCollector) -> None:
    with collector.pause():
        pass


def state(collector: RayCollector) -> None:
    assert collector.state_dict()["policy_version"] == 0


def update(collector: RayCollector) -> None:
    collector.update_policy_weights_({"weight": torch.ones(1)})


@pytest.mark.parametrize(
    ("call", "where"), [(pause, "env"), (state, "env"), (update, "policy")], ids=["pause", "state", "update"]
)
def test_a_call_in_the_readers_loop_gives_up_a_worker_that_hangs(
    ray_cluster: Any, tmp_path: Path, call: Callable[[RayCollector], Any], where: str
) -> None:
    mark = tmp_path / "hung"
    hang = hang_once(mark, "h2#0")
    collector = LLMCollector(
        [
            lambda: ScriptedEnv(fakes.numbered("a")),
            lambda: ScriptedEnv(fakes.numbered("h"), on_step=hang if where == "env" else None),
        ],
        policy_with(hang if where == "policy" else lambda texts: None), steps_per_batch=1, backend="ray", num_cpus=0.5,
        worker_timeout=4,
    )  # fmt: skip
    with collector:
        wait_until(lambda: next(collector) is not None and mark.exists())
        within_patience(lambda: call(collector))
        assert collector.stats()["workers"][1]["restarts"] == 1
        # It takes part again.
        wait_until(lambda: next(collector)["text"] == ["h2#0"])
    assert_settled(collector.stats())


def test_a_state_that_is_taken_beside_the_reader_gives_up_a_worker_that_hangs(ray_cluster: Any, tmp_path: Path) -> None:
    mark = tmp_path / "hung"
    hang = hang_once(mark, "q2#0")
    collector = LLMCollector(
        lambda: ScriptedEnv(on_step=hang), echo, steps_per_batch=1, total_steps=4, backend="ray", worker_timeout=2
    )
    target: queue.Queue[Any] = queue.Queue()
    with collector:
        collector.start(target)
        wait_until(mark.exists)
        assert within_patience(collector.state_dict)["policy_version"] == 0
        assert collector.stats()["worker_restarts"] == 1
        assert collector.join(2 * PATIENCE)
    assert_settled(collector.stats())


@pytest.fixture
def stopped() -> Iterator[list[int]]:
    """Processes that a test stops; they go on, if they are still there, when it is over."""
    processes: list[int] = []
    yield processes
    for pid in processes:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize("paused", [False, True], ids=["collecting", "paused"])
def test_a_call_of_a_process_that_is_stopped_is_answered_by_the_others(
    ray_cluster: Any, stopped: list[int], paused: bool
) -> None:
    collector = LLMCollector(
        ScriptedEnv, echo, steps_per_batch=1, backend="ray", num_workers=2, num_cpus=0.5, worker_timeout=2
    )
    with collector:
        next(collector)
        pids = collector.call_workers(lambda c: os.getpid())

        def call() -> None:
            stopped.append(pids[1])
            os.kill(pids[1], signal.SIGSTOP)
            with pytest.raises(WorkerError, match="on 1 of 2 workers: worker 1") as raised:
                collector.call_workers(lambda c: os.getpid())
            assert raised.value.results == {0: pids[0]}

        def call_paused() -> None:
            with collector.pause():
                call()

        within_patience(call_paused if paused else call)
        assert collector.stats()["worker_restarts"] == 1


# With a clock and a Ray of the test's own, since a busy machine would decide else


class FakeRay:
    """References that are answered at a time; who waits makes it pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.killed: set[Any] = set()

    def monotonic(self) -> float:
        return self.now

    def wait(self, refs: list[Any], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        self.now += 1e6 if timeout is None else timeout
        return [ref for ref in refs if self._answered(ref)], [ref for ref in refs if not self._answered(ref)]

    def _answered(self, ref: Any) -> bool:
        at, actor, _ = ref
        return self.now >= at or actor in self.killed

    def get(self, ref: Any) -> Any:
        _, actor, value = ref
        if actor in self.killed:
            raise RayActorError
        return value


class FakeActor:
    """Answers reports at once, unless its process is stopped; each says that so many turns were finished."""

    def __init__(self, ray: FakeRay, stopped: bool = False, seconds_per_turn: float = math.inf) -> None:
        self.report = self
        self._ray, self._stopped, self._seconds_per_turn = ray, stopped, seconds_per_turn
        self._reports = 0

    def remote(self) -> Any:
        self._reports += 1
        report = Ledger().snapshot() | {"turns_finished": self._ray.now // self._seconds_per_turn}
        return math.inf if self._stopped else self._ray.now, self, Header(self._reports, report=report)


@pytest.mark.parametrize(
    ("actor", "expected", "given_up_at"),
    [
        ({}, False, None),
        ({}, True, 10),
        ({"stopped": True}, False, 10),
        ({"seconds_per_turn": 7}, True, None),
    ],
    ids=["busy with a call", "hangs", "stopped", "goes on"],
)
def test_only_who_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, actor: dict[str, Any], expected: bool, given_up_at: float | None
) -> None:
    ray = FakeRay()
    monkeypatch.setattr(patience, "ray", ray)
    monkeypatch.setattr(patience, "time", ray)
    books = ClusterBooks()
    books.begin(0, 0)
    gone: list[tuple[float, str]] = []

    def give_up(member: Member, why: str) -> None:
        gone.append((ray.now, why))
        ray.killed.add(member.actor)

    member = Member(0, 0, FakeActor(ray, **actor), lambda event: None, state=COLLECTING, progress=0.0)
    waits = patience.Patience(books, 10.0, give_up)
    waits.wait({member: (60.0, member.actor, None)}, None, lambda member: expected)
    if given_up_at is None:
        assert gone == []
        assert ray.now == 60
    else:
        [(when, why)] = gone
        assert given_up_at < when <= given_up_at + 3
        assert ("not answered" if actor else "no progress") in why and "(worker_timeout: 10)" in why
        assert when <= ray.now <= when + 2, "the wait ends with the process"
    waits.wait({member: (1000.0, FakeActor(ray), None)}, 0.5, lambda member: expected)
    assert len(gone) == (given_up_at is not None), "a timeout of its own ends a wait before"
