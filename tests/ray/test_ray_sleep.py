"""Sleep over a cluster: what is left behind where a worker fails. All workers together: test_ray_evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from torchrl_llm import CollectorError, WorkerError
from torchrl_llm.ray.sleep import ClusterSleep, awaken, fall_asleep


class Roster:
    """Workers that fail in what they are told to fail in."""

    def __init__(self, failing: dict[Any, BaseException]) -> None:
        self.asleep = self.at_rest = False
        self.refreshed = 0
        self.failing = failing
        self.orders: list[Any] = []

    def order(self, name: str, method: Any, arguments_for: Any, at_rest: bool | None = None) -> None:
        self.orders.append(method)
        if method in self.failing:
            raise self.failing[method]

    def refresh(self) -> None:
        self.refreshed += 1


def failure(text: str) -> WorkerError:
    error: Any = WorkerError(text)
    error.results, error.failures = {0: None}, {1: RuntimeError(text)}
    return error


@pytest.mark.parametrize("second", [None, failure("no memory to wake up"), KeyboardInterrupt()])
def test_where_the_engines_could_not_fall_asleep_workers_are_watched_again(second: BaseException | None) -> None:
    roster: Any = Roster({fall_asleep: failure("cannot sleep")} | ({} if second is None else {awaken: second}))
    sleep = ClusterSleep(roster)
    with pytest.raises(KeyboardInterrupt if isinstance(second, KeyboardInterrupt) else WorkerError) as caught:
        sleep.sleep_all(1)
    if not isinstance(second, KeyboardInterrupt):
        assert str(caught.value) == "cannot sleep", "the first failure is the one to know"
    assert roster.orders == [fall_asleep, awaken]
    assert not roster.asleep and roster.refreshed == 1 and sleep.level == 0


def test_engines_that_could_not_be_woken_are_still_asleep_and_can_be_woken_again() -> None:
    roster: Any = Roster({awaken: failure("no memory to wake up")})
    sleep = ClusterSleep(roster)
    sleep.sleep_all(1)
    assert roster.asleep
    with pytest.raises(WorkerError, match="no memory to wake up"):
        sleep.wake_up()
    assert (sleep.level, roster.asleep) == (1, True)
    with pytest.raises(CollectorError, match="engines sleep"):
        sleep.check_ready()
    roster.failing.clear()
    sleep.wake_up()
    assert (sleep.level, roster.asleep) == (0, False)
