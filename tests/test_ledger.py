"""The books: the law of conservation through any run of events."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fakes import assert_conserved, assert_settled
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchrl_llm.ledger import Ledger


class Books(RuleBasedStateMachine):
    """Any run of events that a rollout could cause, beside plain counters."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.live: dict[int, int] = {}  # trajectory -> its turns that wait
        self.waiting: list[tuple[int, int]] = []  # (turns, trajectory) finished and to be delivered
        self.launched = self.turns = self.delivered_turns = self.dropped = self.delivered = 0

    @rule()
    def launch(self) -> None:
        self.ledger.launch(self.launched)
        self.live[self.launched] = 0
        self.launched += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish_turn(self, data: Any) -> None:
        self.live[data.draw(st.sampled_from(sorted(self.live)))] += 1
        self.ledger.finish_turn(prompt_tokens=3, response_tokens=5)
        self.turns += 1

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        trajectory = data.draw(st.sampled_from(sorted(t for t, turns in self.live.items() if turns)))
        self.waiting.append((self.live.pop(trajectory), trajectory))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data: Any) -> None:
        trajectory = data.draw(st.sampled_from(sorted(self.live)))
        lost = self.live.pop(trajectory)
        self.ledger.record(trajectory, "failed", turns_dropped=lost)
        self.dropped += lost

    @precondition(lambda self: self.waiting)
    @rule()
    def deliver(self) -> None:
        turns, trajectory = self.waiting.pop(0)
        self.ledger.deliver(turns, [trajectory])
        self.delivered_turns += turns
        self.delivered += 1

    @precondition(lambda self: self.waiting)
    @rule()
    def keep_back(self) -> None:
        turns, trajectory = self.waiting.pop(0)
        self.ledger.drop(turns, [trajectory], "postproc_kept")
        self.dropped += turns

    @invariant()
    def the_law_holds(self) -> None:
        stats = self.ledger.snapshot()
        assert_conserved(stats)
        assert stats["launched"] == self.launched
        assert stats["delivered"] == stats["trajectories"] == self.delivered
        assert stats["in_flight"] == len(self.live) + len(self.waiting)
        assert stats["turns_finished"] == self.turns
        assert stats["turns"] == self.ledger.turns_delivered == self.delivered_turns
        assert stats["turns_dropped"] == self.dropped
        assert self.ledger.turns_kept == self.turns - self.dropped
        assert (stats["prompt_tokens"], stats["response_tokens"]) == (3 * self.turns, 5 * self.turns)

    def teardown(self) -> None:
        self.ledger.record_rest("shutdown")
        stats = self.ledger.snapshot()
        assert_settled(stats)
        assert stats["recorded_by_reason"].get("shutdown", 0) == len(self.live) + len(self.waiting)


TestBooks = Books.TestCase
TestBooks.settings = settings(derandomize=True, deadline=None, max_examples=50, stateful_step_count=30)


def test_a_trajectory_ends_once() -> None:
    ledger = Ledger()
    ledger.launch(0)
    ledger.record(0, "failed")
    with pytest.raises(KeyError):
        ledger.record(0, "failed")
    assert_conserved(ledger.snapshot())


def test_turns_of_a_trajectory_that_failed_are_delivered_but_not_the_trajectory() -> None:
    ledger = Ledger()
    ledger.launch(0)
    ledger.finish_turn(1, 1)
    ledger.record(0, "failed")
    ledger.deliver(turns=1, ended=[0])
    stats = ledger.snapshot()
    assert_settled(stats)
    assert (stats["turns"], stats["delivered"], stats["recorded"]) == (1, 0, 1)


def test_errors_and_restarts_are_counted_by_kind() -> None:
    ledger = Ledger()
    ledger.error("env")
    ledger.error("env")
    ledger.error("policy")
    ledger.restart("policy")
    stats = ledger.snapshot()
    assert (stats["errors"], stats["env_errors"], stats["policy_errors"]) == (3, 2, 1)
    assert (stats["env_restarts"], stats["policy_restarts"]) == (0, 1)


def test_a_snapshot_is_a_copy() -> None:
    ledger = Ledger()
    ledger.launch(0)
    ledger.record(0, "failed")
    before = ledger.snapshot()
    before["recorded_by_reason"]["failed"] = 99
    assert ledger.snapshot()["recorded_by_reason"] == {"failed": 1}


def test_a_snapshot_from_another_thread_is_of_one_moment() -> None:
    ledger, done = Ledger(), threading.Event()
    wrong: list[dict[str, Any]] = []

    def look() -> None:
        while not done.is_set():
            stats = ledger.snapshot()
            if stats["launched"] != stats["delivered"] + stats["recorded"] + stats["in_flight"]:
                wrong.append(stats)

    thread = threading.Thread(target=look)
    thread.start()
    for trajectory in range(3000):
        ledger.launch(trajectory)
        ledger.finish_turn(1, 1)
        if trajectory % 3:
            ledger.deliver(1, [trajectory])
        else:
            ledger.record(trajectory, "failed", turns_dropped=1)
    done.set()
    thread.join()
    assert not wrong
    assert_settled(ledger.snapshot())
