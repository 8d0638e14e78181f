"""``on_error="restart"``: what failed is rebuilt and counted, and gives up after three failures in a row."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import fakes
import pytest
from fakes import WAYS, Policy, ScriptedEnv, assert_settled, echo, read_to_the_end
from tensordict import TensorDictBase

from torchrl_llm import CollectorError, EnvError, LLMCollector, PolicyError


class Factory:
    """Builds one thing after the other and counts them; the last is built again and again."""

    def __init__(self, *makers: Callable[[], Any]) -> None:
        self._makers = makers
        self.built = 0

    def __call__(self) -> Any:
        self.built += 1
        return self._makers[min(self.built, len(self._makers)) - 1]()


def prompts(first: int) -> list[str]:
    return [f"q{i}" for i in range(first, first + 3)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("env_threads", [0, 1])
@pytest.mark.parametrize("call", ["on_step", "on_reset"])
def test_an_env_that_raised_is_rebuilt_and_its_trajectory_dropped(way: str, env_threads: int, call: str) -> None:
    closed: list[str] = []
    make_env = Factory(
        lambda: ScriptedEnv(on_close=lambda: closed.append("first"), **{call: fakes.raise_at(2, OSError("down"))}),
        lambda: ScriptedEnv(fakes.numbered("second")),
    )
    collector = LLMCollector(
        make_env, echo, steps_per_batch=2, total_steps=4, on_error="restart", env_threads=env_threads
    )
    assert make_env.built == 1
    outcome = read_to_the_end(collector, way)
    assert outcome.error is None
    assert outcome.texts == ["q0#0", "q1#0", "second0#0", "second1#0"]
    assert make_env.built == 2
    assert closed == ["first"]
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["env_errors"], stats["env_restarts"], stats["policy_restarts"]) == (1, 1, 0)
    assert stats["recorded_by_reason"] == ({"failed": 1} if call == "on_step" else {})
    assert fakes.ids(outcome.rows, "traj_ids") == ([0, 1, 3, 4] if call == "on_step" else [0, 1, 2, 3])


@pytest.mark.parametrize("way", WAYS)
def test_a_policy_that_raised_is_rebuilt_and_its_trajectories_dropped(way: str) -> None:
    make_policy = Factory(
        lambda: Policy(fakes.raise_at(2, OSError("engine died")), name="first"), lambda: Policy(name="second")
    )
    collector = LLMCollector(ScriptedEnv, make_policy, steps_per_batch=2, total_steps=4, on_error="restart")
    outcome = read_to_the_end(collector, way)
    assert outcome.error is None
    assert [row["answer"] for row in outcome.rows] == [
        "first:q0#0",
        "first:q1#0",
        "second:q3#0",
        "second:q4#0",
    ]
    assert make_policy.built == 2
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["policy_errors"], stats["policy_restarts"], stats["env_restarts"]) == (1, 1, 0)
    assert stats["recorded_by_reason"] == {"failed": 1}


def test_all_requests_that_were_lost_with_a_policy_are_one_failure() -> None:
    make_policy = Factory(*[lambda: Policy(fakes.raise_at(0, OSError("dead")))] * 2, lambda: Policy(name="third"))
    collector = LLMCollector(
        lambda: ScriptedEnv(batch_size=(8,)), make_policy, steps_per_batch=8, total_steps=8, on_error="restart"
    )
    outcome = read_to_the_end(collector, "loop")
    assert outcome.error is None
    assert {row["answer"][:6] for row in outcome.rows} == {"third:"}
    stats = collector.stats()
    assert_settled(stats)
    assert stats["policy_restarts"] == 2
    assert stats["recorded_by_reason"]["failed"] == stats["policy_errors"] <= 16


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("make_env", "make_policy", "error", "errors"),
    [
        (lambda: ScriptedEnv(on_step=fakes.raise_at(0, ValueError("boom"))), Policy, EnvError, "env_errors"),
        (lambda: ScriptedEnv(on_reset=fakes.raise_at(0, ValueError("boom"))), Policy, EnvError, "env_errors"),
        (ScriptedEnv, lambda: Policy(fakes.raise_at(0, ValueError("boom"))), PolicyError, "policy_errors"),
        (ScriptedEnv, lambda: lambda td: td, PolicyError, "policy_errors"),
        (ScriptedEnv, lambda: lambda td: td[:0], PolicyError, "policy_errors"),
    ],
    ids=["step", "reset", "policy", "no out-keys", "wrong batch size"],
)
def test_three_failures_in_a_row_end_the_collection(
    way: str, make_env: Any, make_policy: Any, error: type[CollectorError], errors: str
) -> None:
    collector = LLMCollector(make_env, [make_policy], steps_per_batch=1, on_error="restart")
    outcome = read_to_the_end(collector, way)
    assert outcome.rows == []
    assert type(outcome.error) is error
    assert isinstance(outcome.error.__cause__, ValueError)
    with pytest.raises(error) as again:
        next(collector)
    assert again.value is outcome.error
    stats = collector.stats()
    assert_settled(stats)
    assert stats[errors] == stats["errors"] == 3
    assert stats["env_restarts"] + stats["policy_restarts"] <= 2


def test_a_success_in_between_begins_the_count_anew() -> None:
    calls = itertools.count()

    def two_of_three(texts: list[str]) -> None:
        if next(calls) % 3 < 2:
            raise ValueError("boom")

    collector = LLMCollector(
        lambda: ScriptedEnv(on_step=two_of_three), echo, steps_per_batch=1, total_steps=5, on_error="restart"
    )
    assert len(list(collector)) == 5
    stats = collector.stats()
    assert_settled(stats)
    assert stats["env_errors"] == stats["env_restarts"] == 10


@pytest.mark.parametrize("fault", ["env", "policy"])
def test_a_failure_at_every_second_turn_is_no_progress_for_whole_trajectories(fault: str) -> None:
    """Each first turn succeeds, and none is ever delivered."""

    def second_turn(*args: Any) -> None:
        if any(text.endswith("#1") for text in args[-1]):
            raise ValueError("boom")

    hooks = {"env": (second_turn, None), "policy": (None, second_turn)}[fault]
    collector = LLMCollector(
        lambda: ScriptedEnv(length=2, on_step=hooks[0]),
        [lambda: Policy(hooks[1])],
        trajectories_per_batch=1,
        on_error="restart",
    )
    with pytest.raises(EnvError if fault == "env" else PolicyError, match="boom"):
        next(collector)
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["errors"], stats["turns_finished"], stats["turns_dropped"]) == (3, 3, 3)
    assert stats["recorded_by_reason"] == {"failed": 3}


def test_finished_turns_of_a_trajectory_that_failed_are_delivered_with_steps() -> None:
    make_env = Factory(
        lambda: ScriptedEnv(length=3, on_step=fakes.raise_at(2, ValueError("third turn"))),
        lambda: ScriptedEnv(fakes.numbered("b"), length=3),
    )
    collector = LLMCollector(make_env, echo, steps_per_batch=5, total_steps=5, on_error="restart")
    assert [fakes.texts(batch.unbind(0)) for batch in collector] == [["q0#0", "q0#1", "b0#0", "b0#1", "b0#2"]]
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["launched"], stats["delivered"], stats["recorded"]) == (2, 1, 1)


def test_the_budget_of_a_trajectory_that_failed_is_free_again() -> None:
    make_env = Factory(
        lambda: ScriptedEnv(length=4, on_step=fakes.raise_at(3, ValueError("last turn"))),
        lambda: ScriptedEnv(fakes.numbered("b"), length=4),
    )
    collector = LLMCollector(make_env, echo, trajectories_per_batch=1, total_steps=8, on_error="restart")
    assert [fakes.texts(batch.unbind(0)) for batch in collector] == [
        [f"b{i}#{turn}" for turn in range(4)] for i in range(2)
    ]
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["turns"], stats["turns_dropped"]) == (8, 3)


def test_one_row_of_an_env_that_the_policy_fails_does_not_disturb_the_others() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        for row in td.unbind(0):
            if row["text"] != "q1#0":
                row["answer"] = row["text"]
        return td

    collector = LLMCollector(
        lambda: ScriptedEnv(length=2, batch_size=(3,)), policy, steps_per_batch=7, total_steps=7, on_error="restart"
    )
    [batch] = collector
    assert fakes.texts(batch.unbind(0)) == ["q0#0", "q2#0", "q0#1", "q3#0", "q2#1", "q4#0", "q3#1"]
    stats = collector.stats()
    assert_settled(stats)
    assert stats["recorded_by_reason"]["failed"] == 1


def test_only_the_env_that_failed_is_rebuilt() -> None:
    good, bad = (
        Factory(lambda: ScriptedEnv(fakes.numbered("good"))),
        Factory(
            lambda: ScriptedEnv(on_step=fakes.raise_at(0, ValueError("boom"))),
            lambda: ScriptedEnv(fakes.numbered("better")),
        ),
    )
    collector = LLMCollector([good, bad], echo, steps_per_batch=4, total_steps=4, on_error="restart")
    [batch] = collector
    assert (good.built, bad.built) == (1, 2)
    assert {text.rstrip("0123456789#") for text in fakes.texts(batch.unbind(0))} == {"good", "better"}


def test_an_env_that_cannot_be_rebuilt_ends_the_collection() -> None:
    def no_more() -> ScriptedEnv:
        raise OSError("no more sandboxes")

    make_env = Factory(lambda: ScriptedEnv(on_step=fakes.raise_at(1, ValueError("boom"))), no_more)
    collector = LLMCollector(make_env, echo, steps_per_batch=2, on_error="restart")
    outcome = read_to_the_end(collector, "loop")
    assert outcome.texts == ["q0#0"]
    assert "the env cannot be rebuilt: OSError: no more sandboxes (slot 0)" in str(outcome.error)
    assert isinstance(outcome.error.__cause__, OSError)
    assert_settled(collector.stats())


def test_an_env_that_is_rebuilt_with_another_batch_size_ends_the_collection() -> None:
    make_env = Factory(
        lambda: ScriptedEnv(on_step=fakes.raise_at(0, ValueError("boom"))), lambda: ScriptedEnv(batch_size=(2,))
    )
    collector = LLMCollector(make_env, echo, steps_per_batch=2, on_error="restart")
    with pytest.raises(EnvError, match="now gives another batch size"):
        next(collector)


def test_an_env_that_cannot_even_be_closed_is_rebuilt() -> None:
    make_env = Factory(
        lambda: ScriptedEnv(
            on_step=fakes.raise_at(0, ValueError("boom")), on_close=fakes.raise_at(0, OSError("broken pipe"))
        ),
        lambda: ScriptedEnv(fakes.numbered("second")),
    )
    collector = LLMCollector(make_env, echo, steps_per_batch=1, total_steps=1, on_error="restart")
    with pytest.warns(RuntimeWarning, match="env 0 could not be closed: OSError: broken pipe"):
        assert fakes.texts(next(collector).unbind(0)) == ["second0#0"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector.shutdown()


def test_a_policy_that_was_given_cannot_be_rebuilt_and_says_so() -> None:
    collector = LLMCollector(
        ScriptedEnv, Policy(fakes.raise_at(1, ValueError("boom"))), steps_per_batch=1, on_error="restart"
    )
    outcome = read_to_the_end(collector, "loop")
    assert outcome.texts == ["q0#0"]
    assert "policy 0 cannot be rebuilt: TypeError: it was passed as an instance" in str(outcome.error)
    assert_settled(collector.stats())


def test_data_that_run_out_are_no_failure() -> None:
    make_env = Factory(lambda: ScriptedEnv(["q0", "q1"]))
    collector = LLMCollector(make_env, echo, steps_per_batch=1, on_error="restart")
    assert len(list(collector)) == 2
    assert make_env.built == 1
    assert collector.stats()["errors"] == 0
