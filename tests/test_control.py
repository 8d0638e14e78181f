"""Stop and pause between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from fakes import PATIENCE

from torchrl_llm import CollectorError
from torchrl_llm.control import Control, Stopped


class Driver:
    """A thread that drives: it waits for work, and passes a checkpoint before each piece."""

    def __init__(self) -> None:
        self.work = threading.Semaphore(0)
        self.done = 0
        self.stopped = False
        self.control = Control(wake=self.work.release)
        self.thread = threading.Thread(target=self._drive)
        self.thread.start()

    def _drive(self) -> None:
        try:
            with self.control.driving():
                while True:
                    self.control.checkpoint()
                    self.work.acquire()
                    self.control.checkpoint()
                    self.done += 1
        except Stopped:
            self.stopped = True

    def wait_for(self, condition: Callable[[], bool]) -> None:
        for _ in range(int(PATIENCE / 0.001)):
            if condition():
                return
            threading.Event().wait(0.001)
        raise AssertionError("it did not happen")


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.control.stop()
    made.thread.join(PATIENCE)
    assert not made.thread.is_alive()


def test_a_stop_reaches_a_driver_that_waits_for_work(driver: Driver) -> None:
    assert not driver.control.stopping
    driver.control.stop()
    driver.thread.join(PATIENCE)
    assert driver.stopped
    assert driver.control.stopping
    driver.control.stop()


def test_a_driver_does_no_work_during_a_pause_and_goes_on_afterwards(driver: Driver) -> None:
    with driver.control.pause():
        for _ in range(5):
            driver.work.release()
        done = driver.done
        threading.Event().wait(0.02)
        assert driver.done == done
    driver.wait_for(lambda: driver.done >= done + 5)


def test_pauses_nest_and_overlap(driver: Driver) -> None:
    inner_left = threading.Event()
    outer_leaves = threading.Event()

    def other() -> None:
        with driver.control.pause():
            inner_left.wait(PATIENCE)
        outer_leaves.set()

    with driver.control.pause(), driver.control.pause():
        thread = threading.Thread(target=other)
        thread.start()
        driver.work.release()
        done = driver.done
        driver.wait_for(lambda: len(driver.control._pausers) == 3)
    threading.Event().wait(0.02)
    assert driver.done == done, "the other thread's pause still holds"
    inner_left.set()
    assert outer_leaves.wait(PATIENCE)
    thread.join(PATIENCE)
    driver.wait_for(lambda: driver.done > done)


def test_a_stop_ends_a_pause(driver: Driver) -> None:
    with driver.control.pause():
        driver.control.stop()
        driver.thread.join(PATIENCE)
        assert driver.stopped


def test_a_pause_after_a_stop_does_not_wait(driver: Driver) -> None:
    driver.control.stop()
    with driver.control.pause():
        pass


def test_a_pause_waits_until_the_driver_is_at_rest() -> None:
    working, go_on, paused = threading.Event(), threading.Event(), threading.Event()
    control = Control(wake=lambda: None)

    def drive() -> None:
        with control.driving():
            working.set()
            assert go_on.wait(PATIENCE)
            control.checkpoint()

    def pause() -> None:
        with control.pause():
            paused.set()

    driver, pauser = threading.Thread(target=drive), threading.Thread(target=pause)
    driver.start()
    assert working.wait(PATIENCE)
    pauser.start()
    assert not paused.wait(0.05), "it did not wait for the driver"
    go_on.set()
    assert paused.wait(PATIENCE)
    for thread in (driver, pauser):
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_pause_ends_its_wait_when_the_driver_leaves() -> None:
    working, leave = threading.Event(), threading.Event()
    control = Control(wake=leave.set)

    def drive() -> None:
        with control.driving():
            working.set()
            leave.wait(PATIENCE)

    driver = threading.Thread(target=drive)
    driver.start()
    assert working.wait(PATIENCE)
    with control.pause():
        driver.join(PATIENCE)


def test_the_driver_itself_may_pause() -> None:
    control = Control(wake=lambda: None)
    with control.driving(), control.pause():
        pass
    control.checkpoint()


def test_one_may_not_drive_inside_ones_own_pause() -> None:
    control = Control(wake=lambda: None)
    control.check_may_drive()
    with control.pause(), pytest.raises(CollectorError, match="leave it first"):
        control.check_may_drive()
    control.check_may_drive()


def test_a_pause_ends_with_its_context_also_after_an_error() -> None:
    control = Control(wake=lambda: None)
    with pytest.raises(ZeroDivisionError), control.pause():
        raise ZeroDivisionError
    with control.driving():
        control.checkpoint()
