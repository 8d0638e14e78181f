"""The lock of a collector and its engines: whoever shares an engine waits, and nobody waits for ever."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import PATIENCE, in_background

from torchrl_llm.changing import Changing


def make_engines(count: int) -> list[Any]:
    return [SimpleNamespace(changing=threading.RLock()) for _ in range(count)]


def test_collectors_that_share_an_engine_exclude_each_other_and_others_do_not() -> None:
    first, second = make_engines(2)
    one, sharing, other = (Changing(lambda e=engines: e) for engines in ([first, second], [second], []))  # type: ignore[misc]

    def take(changing: Changing) -> str:
        with changing:
            return "taken"

    with one, one:  # the same thread, twice
        waiting = in_background(lambda: take(sharing))
        assert in_background(lambda: take(other)).result(PATIENCE) == "taken"
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
    assert waiting.result(PATIENCE) == "taken"
    assert in_background(lambda: take(Changing(lambda: [first, second]))).result(PATIENCE) == "taken"


def test_collectors_that_share_engines_do_not_wait_for_each_other() -> None:
    engines = make_engines(5)
    locks = [Changing(lambda: engines), Changing(lambda: engines[::-1])]

    def take_often(changing: Changing) -> int:
        for _ in range(2000):
            with changing:
                pass
        return 2000

    taking = [in_background(lambda changing=changing: take_often(changing)) for changing in locks]  # type: ignore[misc]
    assert [result.result(PATIENCE) for result in taking] == [2000, 2000]
