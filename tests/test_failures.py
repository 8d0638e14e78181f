"""What a failure costs: a prompt that always fails costs itself only, what always fails the whole collection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fakes import Policy, assert_settled, echo, read_to_the_end
from tensordict import TensorDictBase
from test_groups import Answered, prompts

from torchrl_llm import EnvError, LLMCollector, PolicyError, PromptSource


def fails_on(*bad: str) -> Callable[..., None]:
    """A hook for environments and policies that raises whenever it is given one of these prompts."""

    def hook(*args: Any) -> None:
        if set(bad) & set(args[-1]):
            raise ValueError("poison")

    return hook


@pytest.mark.parametrize("unit", ["groups_per_batch", "trajectories_per_batch"])
@pytest.mark.parametrize(("slots", "repeats", "threads"), [(1, 1, 0), (2, 2, 0), (4, 1, 0), (4, 4, 0), (8, 4, 4)])
def test_a_prompt_on_which_the_env_always_fails_costs_only_itself(
    unit: str, slots: int, repeats: int, threads: int
) -> None:
    source = PromptSource(prompts(12), repeats=repeats, epochs=1)
    collector = LLMCollector(
        source.env(lambda: Answered(on_step=fails_on("q3"))),
        echo,
        num_envs=slots,
        env_threads=threads,
        on_error="restart",
        **{unit: 1},
    )
    outcome = read_to_the_end(collector, "loop")
    assert outcome.error is None
    assert Counter(outcome.texts) == {f"q{index}": repeats for index in range(12) if index != 3}
    stats = collector.stats()
    assert_settled(stats)
    tries = {"groups_per_batch": (3, 3 * repeats), "trajectories_per_batch": (3 * repeats,) * 2}[unit]
    assert tries[0] <= stats["env_errors"] == stats["env_restarts"] <= tries[1]
    assert stats["groups_failed"] == (unit == "groups_per_batch")
    assert source.state_dict()["held"] == []


def test_a_prompt_with_which_the_env_cannot_be_reset_costs_only_itself() -> None:
    class Picky(Answered):
        def _reset(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
            fails_on("q3")([row["text"] for row in tensordict.unbind(0)])
            return super()._reset(tensordict, **kwargs)

    source = PromptSource(prompts(6), repeats=2, epochs=1)
    collector = LLMCollector(source.env(Picky), echo, num_envs=2, groups_per_batch=1, on_error="restart")
    outcome = read_to_the_end(collector, "loop")
    assert outcome.error is None
    assert outcome.texts == [text for text in prompts(6) if text != "q3" for _ in range(2)]
    assert collector.stats()["groups_failed"] == 1


@pytest.mark.parametrize("unit", ["groups_per_batch", "trajectories_per_batch"])
@pytest.mark.parametrize(("slots", "repeats"), [(1, 1), (4, 1), (8, 4)])
def test_a_prompt_on_which_the_policy_always_fails_costs_only_itself(unit: str, slots: int, repeats: int) -> None:
    """Also when others are in the same call: they are tried again, each in a call of its own."""
    source = PromptSource(prompts(12), repeats=repeats, epochs=1)
    calls: list[list[str]] = []

    def watched(number: int, texts: list[str]) -> None:
        calls.append(texts)
        fails_on("q3")(texts)

    collector = LLMCollector(
        source.env(Answered), lambda: Policy(watched), num_envs=slots, on_error="restart", **{unit: 1}
    )
    outcome = read_to_the_end(collector, "loop")
    assert outcome.error is None
    assert Counter(outcome.texts) == {f"q{index}": repeats for index in range(12) if index != 3}
    stats = collector.stats()
    assert_settled(stats)
    failed = [texts for texts in calls if "q3" in texts]
    assert stats["policy_restarts"] == len(failed) <= 3 * repeats
    assert ["q3"] in failed
    assert stats["groups_failed"] == (unit == "groups_per_batch")
    assert source.state_dict()["held"] == []


@pytest.mark.parametrize("fault", ["env", "policy"])
def test_three_different_prompts_in_a_row_end_the_collection(fault: str) -> None:
    fail = fails_on(*prompts(20))
    hooks = {"env": (fail, None), "policy": (None, fail)}[fault]
    source = PromptSource(prompts(20), repeats=2, epochs=1)
    collector = LLMCollector(
        source.env(lambda: Answered(on_step=hooks[0])),
        lambda: Policy(hooks[1]),
        groups_per_batch=1,
        on_error="restart",
    )
    outcome = read_to_the_end(collector, "loop")
    assert type(outcome.error) is (EnvError if fault == "env" else PolicyError)
    assert outcome.rows == []
    stats = collector.stats()
    assert_settled(stats)
    # One slot: the first two groups are given up after three tries of their first member, then a third one fails.
    assert (stats["errors"], stats["groups_failed"]) == (7, 2)


def test_a_policy_that_fails_on_everything_ends_the_collection_with_several_slots_too() -> None:
    source = PromptSource(prompts(20), epochs=1)
    collector = LLMCollector(
        source.env(Answered),
        lambda: Policy(fails_on(*prompts(20))),
        num_envs=4,
        groups_per_batch=1,
        on_error="restart",
    )
    outcome = read_to_the_end(collector, "loop")
    assert type(outcome.error) is PolicyError
    assert outcome.rows == []
    assert_settled(collector.stats())
    # At most three prompts are tried three times each, what is lost with them is not tried by that.
    assert collector.stats()["policy_restarts"] <= 8
    assert collector.stats()["groups_failed"] <= 2
