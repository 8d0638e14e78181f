"""Turns and trajectories that take too long: cut, marked as truncated, delivered or dropped, counted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
from fakes import PATIENCE, assert_settled, ids
from tensordict import TensorDictBase
from test_groups import Answered, echo, prompts

from torchrl_llm import CollectorError, LLMCollector, PromptSource, split_trajectories

# Short for what is stuck for ever, long for what is not.
LIMIT = 1.0


class Stuck:
    """A hook that never lets the calls for some prompts come back, until the test is over."""

    def __init__(self, *stuck: str, times: int = 10**6) -> None:
        self._stuck = Counter(dict.fromkeys(stuck, times))
        self.over = threading.Event()

    def __call__(self, prompts: list[str]) -> None:
        for prompt in prompts:
            if self._stuck[prompt] > 0:
                self._stuck[prompt] -= 1
                assert self.over.wait(PATIENCE)


def described(rows: list[TensorDictBase]) -> dict[str, list[tuple[bool, bool, float]]]:
    """(done, truncated, reward) of each prompt's turns."""
    found: dict[str, list[tuple[bool, bool, float]]] = {}
    for row in rows:
        following = row["next"]
        entry = (bool(following["done"]), bool(following["truncated"]), following["reward"].item())
        found.setdefault(row["text"], []).append(entry)
    return found


@pytest.mark.parametrize("unit", ["steps_per_batch", "trajectories_per_batch", "groups_per_batch"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_stuck_step_is_given_up_and_its_turn_delivered_as_truncated(unit: str, rows: int) -> None:
    stuck = Stuck("q1")
    closed = threading.Semaphore(0)

    class Closing(Answered):
        def close(self, **kwargs: Any) -> None:
            closed.release()

    source = PromptSource(prompts(6), epochs=1)
    collector = LLMCollector(
        source.env(lambda: Closing(rows, on_step=stuck)),
        echo,
        num_envs=2,
        env_threads=2,
        max_turn_seconds=LIMIT,
        **{unit: 1},
    )
    with collector:
        found = described([row for batch in collector for row in batch.unbind(0)])
        stats = collector.stats()
        stuck.over.set()
    assert found.keys() == set(prompts(6))
    truncated = {prompt for prompt, turns in found.items() if turns == [(True, True, 0.0)]}
    assert "q1" in truncated and len(truncated) <= rows  # its neighbours in one env are as stuck as it is
    for prompt in found.keys() - truncated:
        assert found[prompt] == [(True, False, 4.0)]
    assert_settled(stats)
    assert (stats["timeouts"], stats["env_timeouts"], stats["env_restarts"]) == (1, 1, 1)
    for _ in range(3):  # those of the two slots, and the one that was left, when its thread comes back
        assert closed.acquire(timeout=PATIENCE)


def test_what_is_dropped_is_tried_again_and_then_given_up_for_good() -> None:
    stuck = Stuck("q1", times=2)
    source = PromptSource(prompts(4), repeats=2, epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, on_step=stuck)),
        echo,
        num_envs=2,
        env_threads=2,
        groups_per_batch=1,
        max_turn_seconds=LIMIT,
        on_timeout="drop",
    ) as collector:
        batches = list(collector)
        stats = collector.stats()
        stuck.over.set()
    assert [set(ids(batch.unbind(0), "group_id")) for batch in batches] == [{0}, {1}, {2}, {3}]
    assert stats["recorded_by_reason"] == {"timed_out": 2} and stats["timeouts"] == 2
    assert_settled(stats)


def test_an_instance_that_is_stuck_is_out_of_use_and_without_any_the_collection_ends() -> None:
    stuck = Stuck("q0")
    source = PromptSource(prompts(3), epochs=1)
    make_env = source.env(lambda: Answered(1, on_step=stuck))
    with LLMCollector(
        [make_env(), make_env()], echo, env_threads=2, steps_per_batch=1, max_turn_seconds=LIMIT
    ) as collector:
        found = described([row for batch in collector for row in batch.unbind(0)])
        stats = collector.stats()
        stuck.over.set()
    assert found == {"q0": [(True, True, 0.0)], "q1": [(True, False, 4.0)], "q2": [(True, False, 4.0)]}
    assert stats["env_restarts"] == 0 and stats["env_timeouts"] == 1
    alone = Stuck("q0")
    source = PromptSource(prompts(3), epochs=1)
    collector = LLMCollector(
        source.env(lambda: Answered(1, on_step=alone))(),
        echo,
        env_threads=1,
        steps_per_batch=1,
        max_turn_seconds=LIMIT,
    )
    assert bool(next(collector)["next", "truncated"])
    with pytest.raises(CollectorError, match="no environment is left"):
        next(collector)
    assert_settled(collector.stats())
    alone.over.set()


def test_a_group_that_no_environment_can_complete_does_not_hold_up_the_others() -> None:
    stuck = Stuck("q0")
    lost, going = PromptSource(prompts(3), repeats=2, epochs=1), PromptSource(["p0", "p1", "p2"], repeats=2, epochs=1)
    envs = [lost.env(lambda: Answered(1, on_step=stuck))(), going.env(lambda: Answered(1))]
    with LLMCollector(
        envs, echo, env_threads=2, groups_per_batch=1, window=1, max_turn_seconds=LIMIT, on_timeout="drop"
    ) as collector:
        found = [batch[0]["text"] for batch in collector]
        stats = collector.stats()
        stuck.over.set()
    assert found == ["p0", "p1", "p2"]
    assert stats["groups_failed"] == 1
    assert_settled(stats)
    # What was lost is not forgotten: a state would hand it out again.
    assert [group["undone"] for group in lost.state_dict()["held"]] == [[0, 1]]


def test_a_call_that_waits_for_a_thread_leaves_its_environment_as_it_is() -> None:
    """The next one gets the thread when it is just due itself, and has a moment of its own."""
    stuck = Stuck("q0")

    def on_step(prompts: list[str]) -> None:
        stuck(prompts)
        time.sleep(LIMIT / 4)

    source = PromptSource(prompts(3), epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, on_step=on_step)),
        echo,
        num_envs=3,
        env_threads=1,
        steps_per_batch=1,
        max_turn_seconds=5 * LIMIT,
    ) as collector:
        found = described([row for batch in collector for row in batch.unbind(0)])
        stats = collector.stats()
        stuck.over.set()
    assert found["q0"] == [(True, True, 0.0)]
    assert found["q1"] == [(True, False, 4.0)]
    assert stats["env_restarts"] == 1 <= stats["env_timeouts"]
    assert_settled(stats)


def test_a_stuck_reset_is_given_up_and_its_prompt_comes_again() -> None:
    over = threading.Event()
    calls: list[str] = []

    class StuckOnce(Answered):
        def _reset(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
            calls.append(tensordict[0]["text"])
            if calls == ["q0"]:
                assert over.wait(PATIENCE)
            return super()._reset(tensordict)

    source = PromptSource(prompts(2), epochs=1)
    with LLMCollector(
        source.env(lambda: StuckOnce(1)), echo, env_threads=1, steps_per_batch=1, max_turn_seconds=LIMIT
    ) as collector:
        rows = [row for batch in collector for row in batch.unbind(0)]
        stats = collector.stats()
        over.set()
    assert [row["text"] for row in rows] == ["q0", "q1"]
    assert (stats["launched"], stats["env_timeouts"]) == (2, 1)
    assert_settled(stats)


def test_a_trajectory_has_a_time_of_its_own() -> None:
    """Each turn is quick, and there is no end of them."""
    source = PromptSource(["q0"], epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, length=10**9)),
        echo,
        trajectories_per_batch=1,
        env_threads=1,
        max_turn_seconds=60,
        max_trajectory_seconds=LIMIT,
    ) as collector:
        [batch] = list(collector)
    [turns] = [split_trajectories(batch)[0].unbind(0)]
    assert len(turns) > 1
    ends = [(bool(turn["next", "done"]), bool(turn["next", "truncated"])) for turn in turns]
    assert ends == [(False, False)] * (len(turns) - 1) + [(True, True)]
    assert collector.stats()["timeouts"] == 1


def test_time_in_which_nobody_reads_does_not_count() -> None:
    source = PromptSource(prompts(4), epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, length=3)), echo, num_envs=2, trajectories_per_batch=1, max_turn_seconds=LIMIT
    ) as collector:
        next(collector)
        threading.Event().wait(2 * LIMIT)
        rest = list(collector)
    assert len(rest) == 3 and collector.stats()["timeouts"] == 0


def test_a_policy_that_cannot_be_cut_is_waited_for_and_its_trajectory_ends() -> None:
    late = threading.Event()

    def slow(td: TensorDictBase) -> TensorDictBase:
        if not late.is_set():
            late.wait(2 * LIMIT)
            late.set()
        return echo(td)

    source = PromptSource(["q0"], epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, length=5)), slow, steps_per_batch=1, max_turn_seconds=LIMIT
    ) as collector:
        found = described([row for batch in collector for row in batch.unbind(0)])
    assert found == {"q0": [(True, True, 4.0)]}
    assert collector.stats()["generation_timeouts"] == 1
