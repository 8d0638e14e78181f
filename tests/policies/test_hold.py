"""A hold: each wait and each task ends, whoever goes on, gives up or lets go, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from fakes import PATIENCE, in_background

from torchrl_llm.policies.hold import Hold, HoldEnded, OwnerThread, refuse_owners


def started(target: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_a_task_for_an_owner_that_was_released_is_refused_and_not_run() -> None:
    hold, ran = Hold("engine"), []
    owner = started(hold.rest)
    hold.wait()
    assert hold.run(lambda: threading.current_thread() is owner)
    hold.release()
    owner.join(PATIENCE)
    with pytest.raises(HoldEnded, match="engine rests no longer"):
        in_background(lambda: hold.run(lambda: ran.append(1))).result(PATIENCE)
    hold.release()  # again: nothing happens
    assert not ran and not owner.is_alive()


def test_a_task_that_came_before_the_release_is_run() -> None:
    hold, inside, go = Hold("engine"), threading.Event(), threading.Event()
    owner = started(hold.rest)
    first = in_background(lambda: hold.run(lambda: (inside.set(), go.wait(PATIENCE))))
    assert inside.wait(PATIENCE)
    second = in_background(lambda: hold.run(lambda: "second"))
    while hold._tasks.empty():
        assert not second.done()
    hold.release()
    go.set()
    assert first.result(PATIENCE) and second.result(PATIENCE) == "second"
    owner.join(PATIENCE)
    assert not owner.is_alive()


def test_a_hold_that_was_given_up_ends_waits_and_tasks_and_its_owner_goes_on() -> None:
    hold = Hold("engine")
    waiting = in_background(hold.wait)
    early = in_background(lambda: hold.run(lambda: None))
    while hold._tasks.empty():
        assert not early.done()
    hold.give_up(RuntimeError("the engine was given back"))
    with pytest.raises(RuntimeError, match="given back"):
        waiting.result(PATIENCE)
    for task in (early, in_background(lambda: hold.run(lambda: None))):
        with pytest.raises(HoldEnded, match="engine"):
            task.result(PATIENCE)
    hold.give_up(RuntimeError("a second time"))
    owner = started(hold.rest)  # it comes after all, and must not rest for nobody
    owner.join(PATIENCE)
    assert not owner.is_alive()


def test_an_owner_that_rests_cannot_be_given_up() -> None:
    hold = Hold("engine")
    owner = started(hold.rest)
    hold.wait()
    hold.give_up(RuntimeError("too late"))
    assert in_background(lambda: hold.run(lambda: "at rest")).result(PATIENCE) == "at rest"
    hold.release()
    owner.join(PATIENCE)
    assert not owner.is_alive()


def test_an_owner_that_is_released_before_it_rests_goes_on_at_once() -> None:
    hold = Hold("engine")
    hold.release()
    owner = started(hold.rest)
    owner.join(PATIENCE)
    assert not owner.is_alive()


def test_owners_are_refused_and_others_are_not() -> None:
    refuse_owners()
    result: Future[None] = Future()

    def work() -> None:
        try:
            refuse_owners()
            result.set_result(None)
        except RuntimeError as error:
            result.set_exception(error)

    owner = OwnerThread(target=work)
    owner.start()
    with pytest.raises(RuntimeError, match="cannot update its own weights from its call"):
        result.result(PATIENCE)
    owner.join(PATIENCE)
