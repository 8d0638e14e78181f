"""The loop: what runs beside what, in which order, and where every trajectory ends."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections import Counter
from typing import Any

import fakes
import pytest
import torch
from fakes import Gate, Policy, ScriptedEnv, assert_conserved, assert_settled, echo, numbered
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from torchrl_llm import CollectorError, EnvError, LLMCollector, PolicyError, split_trajectories

# Raise it to look for rare orders of events.
EXAMPLES = int(os.environ.get("TORCHRL_LLM_EXAMPLES", "60"))


def by_prompt(prompt: str) -> int:
    """Lengths 1, 2, 3, 1, ...: q4 has two turns."""
    return 1 + int(prompt[1:]) % 3


def collect(collector: LLMCollector, turns: int) -> list[TensorDictBase]:
    """Rows until there are so many, then shuts down; the law holds after each batch."""
    rows: list[TensorDictBase] = []
    with collector:
        while len(rows) < turns:
            rows += next(collector).unbind(0)
            assert_conserved(collector.stats())
    assert_settled(collector.stats())
    return rows


def trajectories(rows: list[TensorDictBase]) -> dict[int, list[str]]:
    """The texts of each trajectory, by its id; its steps are counted from 0 without a gap."""
    found: dict[int, list[str]] = {}
    for row in rows:
        turns = found.setdefault(int(row["collector", "traj_ids"]), [])
        assert int(row["collector", "step"]) == len(turns)
        turns.append(row["text"])
    return found


# What a turn is


@pytest.mark.parametrize("batch_size", [(), (1,), (3,)])
def test_a_turn_holds_what_env_and_policy_wrote(batch_size: tuple[int, ...]) -> None:
    collector = LLMCollector(
        lambda: ScriptedEnv(length=2, batch_size=batch_size), echo, steps_per_batch=3, total_steps=6
    )
    rows = [row for batch in collector for row in batch.unbind(0)]
    expected = ["q0#0", "q0#1", "q1#0", "q1#1", "q2#0", "q2#1"]
    assert sorted(row["text"] for row in rows) == expected
    for row in rows:
        text = row["text"]
        assert row.batch_size == torch.Size([])
        assert row["answer"] == f"a:{text}"
        turn = int(text[-1])
        assert row["next", "text"] == f"{text[:-1]}{turn + 1}"
        assert row["next", "reward"].tolist() == [6.0]
        assert row["next", "done"].tolist() == row["next", "terminated"].tolist() == [turn == 1]
        assert row["done"].tolist() == [False]
        stamps = row["collector"]
        assert all(stamps[key].dtype == torch.int64 and stamps[key].shape == () for key in stamps.keys())
        assert int(stamps["step"]) == turn
        assert int(stamps["group_id"]) == -1
        assert int(stamps["policy_version"]) == int(stamps["policy_version_end"]) == 0
    assert_settled(collector.stats())


def test_every_row_says_which_trajectory_turn_env_and_policy_it_is_L70() -> None:
    envs = [lambda p=prefix: ScriptedEnv(fakes.numbered(p), length=2) for prefix in "abc"]
    collector = LLMCollector(
        envs, [Policy(name="0"), Policy(name="1")], route="sticky", steps_per_batch=4, total_steps=40
    )
    rows = [row for batch in collector for row in batch.unbind(0)]
    assert len(rows) == 40
    for texts in trajectories(rows).values():
        assert texts in ([f"{texts[0][:-1]}0"], [f"{texts[0][:-1]}0", f"{texts[0][:-1]}1"])
    for row in rows:
        env_id, policy_id = int(row["collector", "env_id"]), int(row["collector", "policy_id"])
        assert row["text"][0] == "abc"[env_id]
        assert row["answer"] == f"{policy_id}:{row['text']}"
        assert policy_id == env_id % 2
    prompts: dict[int, set[str]] = {}
    for row in rows:
        prompts.setdefault(int(row["collector", "traj_ids"]), set()).add(row["text"].split("#")[0])
    assert all(len(found) == 1 for found in prompts.values())
    assert len({min(found) for found in prompts.values()}) == len(prompts)


@pytest.mark.parametrize("batch_size", [(), (1,), (3,)])
@pytest.mark.parametrize("env_threads", [0, 2])
def test_unequal_lengths_give_whole_trajectories_L20(batch_size: tuple[int, ...], env_threads: int) -> None:
    def make_env() -> ScriptedEnv:
        return ScriptedEnv(length=by_prompt, batch_size=batch_size)

    collector = LLMCollector(make_env, echo, trajectories_per_batch=4, total_steps=24, env_threads=env_threads)
    rows = []
    for batch in collector:
        assert isinstance(batch, LazyStackedTensorDict)
        assert batch.ndim == 1
        parts = split_trajectories(batch)
        assert torch.cat([part["collector", "traj_ids"] for part in parts]).tolist() == fakes.ids(
            batch.unbind(0), "traj_ids"
        ), "not contiguous"
        for part in parts:
            prompt = part[0]["text"].split("#")[0]
            assert fakes.texts(part.unbind(0)) == [f"{prompt}#{i}" for i in range(by_prompt(prompt))]
            assert part["next", "done"].flatten().tolist() == [False] * (len(part) - 1) + [True]
        rows += batch.unbind(0)
    assert 24 <= len(rows) < 24 + 3
    stats = collector.stats()
    assert_settled(stats)
    assert stats["turns"] == len(rows)
    assert stats["trajectories"] == len(trajectories(rows))


def test_envs_of_different_kinds_and_batch_sizes_run_at_once() -> None:
    envs = [
        lambda: ScriptedEnv(fakes.numbered("a"), length=1),
        lambda: ScriptedEnv(fakes.numbered("b"), length=3, batch_size=(1,)),
        lambda: ScriptedEnv(fakes.numbered("c"), length=2, batch_size=(4,)),
    ]
    rows = collect(LLMCollector(envs, echo, trajectories_per_batch=3), 60)
    lengths = {"a": 1, "b": 3, "c": 2}
    found = trajectories(rows)
    assert {texts[0][0] for texts in found.values()} == set("abc")
    for texts in found.values():
        prompt = texts[0].split("#")[0]
        assert texts == [f"{prompt}#{i}" for i in range(lengths[prompt[0]])]


def test_rows_of_one_env_take_new_prompts_while_others_go_on() -> None:
    collector = LLMCollector(
        lambda: ScriptedEnv(length=by_prompt, batch_size=(3,)), echo, steps_per_batch=3, total_steps=9
    )
    assert [fakes.texts(batch.unbind(0)) for batch in collector] == [
        ["q0#0", "q1#0", "q2#0"],
        ["q3#0", "q1#1", "q2#1"],
        ["q4#0", "q5#0", "q2#2"],
    ]


def test_a_function_a_module_and_a_class_are_policies() -> None:
    class Upper:
        def __call__(self, td: TensorDictBase) -> TensorDictBase:
            for row in td.unbind(0):
                row["answer"] = row["text"].upper()
            return td

    class Answers(torch.nn.Module):
        def forward(self, td: TensorDictBase) -> TensorDictBase:
            return echo(td)

    module = TensorDictModule(lambda text: ["m:" + t for t in text], in_keys=["text"], out_keys=["answer"])
    for policy, answer in ((echo, "a:q0#0"), (Upper, "Q0#0"), (Answers(), "a:q0#0"), (module, "m:q0#0")):
        with LLMCollector(ScriptedEnv, policy, steps_per_batch=1) as collector:
            assert next(collector)["answer"] == [answer]


def test_a_policy_may_return_only_what_it_wrote() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        return echo(td).select("answer")

    with LLMCollector(ScriptedEnv, policy, num_envs=2, steps_per_batch=2) as collector:
        row = next(collector)[0]
        assert (row["text"], row["answer"], row["next", "text"]) == ("q0#0", "a:q0#0", "q0#1")


def test_a_batched_policy_sees_a_one_dimensional_lazy_stack_of_all_that_wait() -> None:
    seen: list[tuple[type, torch.Size]] = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        seen.append((type(td), td.batch_size))
        return echo(td)

    with LLMCollector(lambda: ScriptedEnv(batch_size=(4,)), policy, steps_per_batch=4) as collector:
        next(collector)
    assert {kind for kind, _ in seen} == {LazyStackedTensorDict}
    assert all(size.numel() <= 4 and len(size) == 1 for _, size in seen)


# The order of things


def test_a_turn_is_delivered_before_its_env_is_asked_for_the_next_prompt() -> None:
    gate = Gate()
    resets = []

    def on_reset() -> None:
        resets.append(threading.get_ident())
        if len(resets) == 2:
            gate()

    collector = LLMCollector(lambda: ScriptedEnv(on_reset=on_reset), echo, steps_per_batch=1)
    assert next(collector)["text"] == ["q0#0"]
    assert len(resets) == 1
    gate.open()
    assert next(collector)["text"] == ["q1#0"]
    collector.shutdown()


def test_building_a_collector_takes_no_prompt_and_the_first_is_collected_first_L25() -> None:
    taken: list[str] = []

    def prompts() -> Any:
        for prompt in fakes.numbered():
            taken.append(prompt)
            yield prompt

    collector = LLMCollector(lambda: ScriptedEnv(prompts(), batch_size=(2,)), echo, steps_per_batch=2, total_steps=6)
    assert taken == []
    rows = [row for batch in collector for row in batch.unbind(0)]
    assert fakes.texts(rows) == [f"q{i}#0" for i in range(6)]
    assert taken == [f"q{i}" for i in range(6)]


def test_two_policies_run_at_the_same_time() -> None:
    together = threading.Barrier(2)

    def meet(call: int, texts: list[str]) -> None:
        together.wait(fakes.PATIENCE)

    policies = [Policy(meet, name="0"), Policy(meet, name="1")]
    collector = LLMCollector(ScriptedEnv, policies, num_envs=2, route="paired", steps_per_batch=2, total_steps=8)
    rows = [row for batch in collector for row in batch.unbind(0)]
    assert Counter(fakes.ids(rows, "policy_id")) == {0: 4, 1: 4}
    assert not policies[0].threads & policies[1].threads
    assert_settled(collector.stats())


def test_a_slow_policy_holds_back_no_other() -> None:
    gate = Gate()
    collector = LLMCollector(
        ScriptedEnv,
        [Policy(lambda call, texts: gate()), Policy(name="fast")],
        num_envs=2,
        route="paired",
        steps_per_batch=1,
    )
    for _ in range(5):
        assert fakes.ids(next(collector).unbind(0), "policy_id") == [1]
    gate.wait()
    gate.open()
    while fakes.ids(next(collector).unbind(0), "policy_id") != [0]:
        pass
    collector.shutdown()
    assert_settled(collector.stats())


def test_a_slow_env_on_a_thread_holds_back_neither_the_others_nor_the_policy() -> None:
    gate, policy = Gate(), Policy()
    envs = [
        lambda: ScriptedEnv(fakes.numbered("slow"), on_step=gate),
        lambda: ScriptedEnv(fakes.numbered("a")),
        lambda: ScriptedEnv(fakes.numbered("b")),
    ]
    collector = LLMCollector(envs, policy, steps_per_batch=1, env_threads=3)
    rows = [next(collector)[0] for _ in range(12)]
    gate.wait()
    assert {row["text"][0] for row in rows} == {"a", "b"}
    assert_conserved(collector.stats())
    gate.open()
    while not next(collector)[0]["text"].startswith("slow0"):
        pass
    collector.shutdown()
    assert_settled(collector.stats())


def test_a_slow_reset_on_a_thread_holds_back_no_other() -> None:
    gate = Gate()
    collector = LLMCollector(
        [lambda: ScriptedEnv(on_reset=gate), lambda: ScriptedEnv(fakes.numbered("a"))],
        echo,
        steps_per_batch=1,
        env_threads=2,
    )
    assert [next(collector)[0]["text"] for _ in range(4)] == [f"a{i}#0" for i in range(4)]
    gate.open()
    collector.shutdown()


@pytest.mark.parametrize("env_threads", [1, 3])
def test_an_env_is_called_by_one_thread_at_a_time(env_threads: int) -> None:
    busy, overlaps = threading.Lock(), []

    def alone(texts: list[str]) -> None:
        if not busy.acquire(blocking=False):
            overlaps.append(texts)
        else:
            threading.Event().wait(0.001)  # time for another to come
            busy.release()

    collector = LLMCollector(
        lambda: ScriptedEnv(length=by_prompt, batch_size=(2,), on_step=alone),
        echo,
        steps_per_batch=2,
        total_steps=30,
        env_threads=env_threads,
    )
    assert sum(len(batch) for batch in collector) == 30
    assert not overlaps


def test_env_steps_that_wait_for_a_thread_are_given_up_at_shutdown() -> None:
    gate, stepped = Gate(), []

    def on_step(texts: list[str]) -> None:
        stepped.append(texts)
        gate()

    collector = LLMCollector(lambda: ScriptedEnv(on_step=on_step), echo, num_envs=4, steps_per_batch=1, env_threads=1)
    collector.start(queue.Queue())
    gate.wait()
    with pytest.warns(RuntimeWarning, match="torchrl_llm-env-0"):
        collector.shutdown(timeout=0.1)
    gate.open()
    while any(t.name == "torchrl_llm-env-0" for t in threading.enumerate()):
        threading.Event().wait(0.01)
    assert len(stepped) == 1


def test_the_same_run_gives_the_same_order_when_everything_runs_in_place() -> None:
    def run() -> list[str]:
        collector = LLMCollector(
            lambda: ScriptedEnv(length=by_prompt, batch_size=(3,)), echo, steps_per_batch=5, total_steps=20
        )
        return [text for batch in collector for text in fakes.texts(batch.unbind(0))]

    assert run() == run()


# How many


@pytest.mark.parametrize(("size", "total"), [(1, 1), (4, 10), (3, 9), (7, 5)])
@pytest.mark.parametrize(("num_envs", "batch_size"), [(1, ()), (3, (1,)), (2, (4,))])
def test_exactly_total_steps_are_delivered_L16(
    size: int, total: int, num_envs: int, batch_size: tuple[int, ...]
) -> None:
    collector = LLMCollector(
        lambda: ScriptedEnv(length=by_prompt, batch_size=batch_size),
        echo,
        num_envs=num_envs,
        steps_per_batch=size,
        total_steps=total,
    )
    lengths = [len(batch) for batch in collector]
    assert lengths == [size] * (total // size) + ([total % size] if total % size else [])
    assert len(collector) == len(lengths)
    assert_settled(collector.stats())


@pytest.mark.parametrize("num_envs", [1, 3])
def test_no_turn_is_begun_that_nobody_will_read(num_envs: int) -> None:
    policy = Policy()
    collector = LLMCollector(
        lambda: ScriptedEnv(length=by_prompt), policy, num_envs=num_envs, steps_per_batch=2, total_steps=7
    )
    assert sum(len(batch) for batch in collector) == 7
    assert sum(len(call) for call in policy.calls) == 7
    assert collector.stats()["turns_finished"] == 7


def test_the_last_trajectory_is_not_cut_by_total_steps() -> None:
    collector = LLMCollector(lambda: ScriptedEnv(length=3), echo, trajectories_per_batch=2, total_steps=7)
    assert [len(batch) for batch in collector] == [6, 3]
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["turns"], stats["delivered"], stats["recorded"]) == (9, 3, 0)


def test_what_is_in_flight_at_the_end_of_total_steps_is_cut_off() -> None:
    envs = [lambda: ScriptedEnv(fakes.numbered("a")), lambda: ScriptedEnv(fakes.numbered("b"), length=50)]
    collector = LLMCollector(envs, echo, trajectories_per_batch=1, total_steps=5)
    assert sum(len(batch) for batch in collector) >= 5
    stats = collector.stats()
    assert_settled(stats)
    assert set(stats["recorded_by_reason"]) <= {"cut_off"}


def test_what_postproc_keeps_back_does_not_count_as_delivered() -> None:
    def postproc(batch: TensorDictBase) -> TensorDictBase | None:
        return None if "q1#0" in batch["text"] else batch

    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=2, total_steps=4, postproc=postproc)
    assert [fakes.texts(batch.unbind(0)) for batch in collector] == [["q2#0", "q3#0"], ["q4#0", "q5#0"]]
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["turns"], stats["turns_dropped"]) == (4, 2)
    assert stats["recorded_by_reason"] == {"postproc_kept": 2}


def test_the_last_turns_of_dialogs_can_be_kept_alone_L18() -> None:
    def last_turns(batch: TensorDictBase) -> TensorDictBase:
        return batch[batch["next", "done"].flatten()]

    collector = LLMCollector(
        lambda: ScriptedEnv(length=3), echo, trajectories_per_batch=1, total_steps=7, postproc=last_turns
    )
    assert [fakes.texts(batch.unbind(0)) for batch in collector] == [["q0#2"], ["q1#2"], ["q2#2"]]
    assert collector.stats()["turns"] == 9


# Routing


def test_a_trajectory_stays_with_its_policy_and_loads_are_even() -> None:
    policies = [Policy(name=str(i)) for i in range(3)]
    collector = LLMCollector(lambda: ScriptedEnv(length=by_prompt), policies, num_envs=6, trajectories_per_batch=6)
    rows = collect(collector, 60)
    owners: dict[int, set[int]] = {}
    for row in rows:
        owners.setdefault(int(row["collector", "traj_ids"]), set()).add(int(row["collector", "policy_id"]))
    assert all(len(policy_ids) == 1 for policy_ids in owners.values())
    counts = Counter(next(iter(policy_ids)) for policy_ids in owners.values())
    assert set(counts) == {0, 1, 2}


def test_a_route_sees_how_many_trajectories_each_policy_has() -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []

    def route(env_id: int, loads: Any) -> int:
        seen.append((env_id, tuple(loads)))
        return env_id

    with LLMCollector(ScriptedEnv, [Policy(), Policy()], num_envs=2, route=route, steps_per_batch=1) as collector:
        for _ in range(6):
            row = next(collector)[0]
            assert int(row["collector", "policy_id"]) == int(row["collector", "env_id"])
    assert seen[:2] == [(0, (0, 0)), (1, (1, 0))]
    for env_id, loads in seen[2:]:
        assert loads[env_id] == 0, "a finished trajectory is still counted"
        assert loads[1 - env_id] <= 1


@pytest.mark.parametrize(
    ("route", "message"),
    [
        (lambda env_id, loads: 2, "route returned 2; an int from 0 to 1 is needed (slot 0)"),
        (lambda env_id, loads: None, "route returned None; an int from 0 to 1 is needed (slot 0)"),
        (lambda env_id: 0, "route failed: TypeError"),
    ],
)
def test_a_route_that_gives_no_policy_is_an_error(route: Any, message: str) -> None:
    collector = LLMCollector(ScriptedEnv, [Policy(), Policy()], route=route, steps_per_batch=1)
    for _ in range(2):
        with pytest.raises(CollectorError) as raised:
            next(collector)
        assert message in str(raised.value)
    assert_settled(collector.stats())


def test_a_route_that_fails_later_loses_no_finished_turn() -> None:
    route = fakes.raise_at(3, ZeroDivisionError("no policy"))
    collector = LLMCollector(ScriptedEnv, echo, route=lambda env_id, loads: route() or 0, steps_per_batch=5)
    outcome = fakes.read_to_the_end(collector, "loop")
    assert outcome.texts == ["q0#0", "q1#0", "q2#0"]
    assert "route failed: ZeroDivisionError: no policy" in str(outcome.error)


def test_an_env_that_returns_nonsense_is_an_error_and_no_hang() -> None:
    class Lost(ScriptedEnv):
        def step(self, tensordict: TensorDictBase) -> TensorDictBase:
            if tensordict["text"] == "q2#0":
                return tensordict  # without "next"
            return super().step(tensordict)

    collector = LLMCollector(Lost, echo, steps_per_batch=5)
    outcome = fakes.read_to_the_end(collector, "loop")
    assert outcome.texts == ["q0#0", "q1#0"]
    assert isinstance(outcome.error, CollectorError)
    assert outcome.error.__cause__ is not None
    assert_settled(collector.stats())


# The law


@settings(max_examples=EXAMPLES, derandomize="TORCHRL_LLM_EXAMPLES" not in os.environ, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_envs=st.integers(1, 4),
    num_policies=st.integers(1, 2),
    rows=st.sampled_from([(), (1,), (3,)]),
    unit=st.sampled_from(["steps_per_batch", "trajectories_per_batch"]),
    size=st.integers(1, 5),
    total=st.sampled_from([-1, 1, 7, 25]),
    env_threads=st.sampled_from([0, 2]),
    on_error=st.sampled_from(["raise", "restart"]),
    faults=st.sampled_from([0.0, 0.05, 0.4]),
    prompts=st.sampled_from([None, 0, 1, 6]),
)
def test_every_trajectory_ends_in_exactly_one_way(
    seed: int,
    num_envs: int,
    num_policies: int,
    rows: tuple[int, ...],
    unit: str,
    size: int,
    total: int,
    env_threads: int,
    on_error: str,
    faults: float,
    prompts: int | None,
) -> None:
    chance = random.Random(seed)

    def fail(*args: Any) -> None:
        if chance.random() < faults:
            raise ValueError("bad luck")

    def make_env() -> ScriptedEnv:
        source = None if prompts is None else [f"q{i}" for i in range(prompts)]
        return ScriptedEnv(source, by_prompt, rows, on_step=fail, on_reset=fail)

    collector = LLMCollector(
        make_env,
        [Policy(fail) if on_error == "raise" else lambda: Policy(fail) for _ in range(num_policies)],
        num_envs=num_envs,
        total_steps=total,
        env_threads=env_threads,
        on_error=on_error,
        **{unit: size},
    )
    delivered: list[TensorDictBase] = []
    failed = False
    try:
        for _ in range(12):
            batch = next(collector)
            assert_conserved(collector.stats())
            delivered += batch.unbind(0)
    except StopIteration:
        assert total > 0 or prompts is not None
    except (EnvError, PolicyError) as error:
        assert faults
        assert isinstance(error.__cause__, ValueError)
        failed = True
    collector.shutdown()
    stats = collector.stats()
    assert_settled(stats)
    assert stats["turns"] == len(delivered)
    assert bool(stats["errors"]) or not failed
    whole = sum(bool(row["next", "done"]) for row in delivered)
    assert stats["delivered"] == stats["trajectories"] == whole
    assert len({(*fakes.ids([row], "traj_ids"), *fakes.ids([row], "step")) for row in delivered}) == len(delivered)
    if unit == "steps_per_batch" and total > 0:
        assert stats["turns"] <= total
    if unit == "trajectories_per_batch":
        assert len(trajectories(delivered)) == whole


# Giving up


def test_an_abandoned_trajectory_is_recorded_and_its_slot_goes_on_with_the_next_prompt() -> None:
    gate = Gate()

    def hold_first(number: int, texts: list[str]) -> None:
        if number == 0:
            gate()

    def abandon_other(texts: list[str]) -> None:
        # In the loop's thread, while the other slot's request is in its policy.
        if texts == ["b0#0"]:
            gate.wait()
            rollout = collector._collection._rollout
            rollout.abandon(rollout.slots[0], rollout.slots[0].rows[0], "too late")
            gate.open()

    collector = LLMCollector(
        [lambda: ScriptedEnv(numbered("a")), lambda: ScriptedEnv(numbered("b"), on_step=abandon_other)],
        [lambda: Policy(hold_first), lambda: Policy()],
        route="paired",
        steps_per_batch=4,
        total_steps=4,
    )
    rows = list(next(collector).unbind(0))
    stats = collector.stats()
    collector.shutdown()
    assert "a0#0" not in [row["text"] for row in rows]
    assert stats["recorded_by_reason"] == {"too late": 1}
    assert_settled(collector.stats())


@pytest.mark.parametrize("env_threads", [0, 1])
def test_a_trajectory_abandoned_during_its_step_ends_when_the_step_returns(env_threads: int) -> None:
    def abandon_self(texts: list[str]) -> None:
        if texts[0].startswith("q0#1"):
            rollout = collector._collection._rollout
            rollout.abandon(rollout.slots[0], rollout.slots[0].rows[0], "too late")

    collector = LLMCollector(
        lambda: ScriptedEnv(length=3, batch_size=(2,), on_step=abandon_self),
        echo,
        trajectories_per_batch=2,
        env_threads=env_threads,
    )
    with collector:
        rows = next(collector).unbind(0)
        stats = collector.stats()
    assert [row["text"] for row in rows] == [f"{q}#{turn}" for q in ("q1", "q2") for turn in range(3)]
    assert stats["recorded_by_reason"] == {"too late": 1}
    assert stats["turns_dropped"] == 1
    assert_settled(collector.stats())
