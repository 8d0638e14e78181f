"""Groups end to end: complete, contiguous, filtered, over-sampled, retried; in the order of their launches."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from fakes import (
    PATIENCE,
    WAYS,
    EndAfter,
    Policy,
    assert_conserved,
    assert_settled,
    chat_echo,
    echo,
    ids,
    read_to_the_end,
)
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv

from torchrl_llm import CollectorError, LLMCollector, PromptSource, split_trajectories


class Answered(EnvBase):
    """Gives the prompt of its reset back, takes an answer, ends after ``length`` turns.

    Args:
        rows: its batch size.
        length: turns of a trajectory, by its prompt.
        on_step: called with the prompts of the rows at each step; it may raise or block.
    """

    batch_locked = True

    def __init__(self, rows: int = 1, length: Any = 1, on_step: Any = None) -> None:
        from torchrl.data import Composite, NonTensor, Unbounded

        super().__init__(batch_size=(rows,))
        self._length = length if callable(length) else lambda prompt: length
        self._on_step = on_step
        text = NonTensor(shape=(rows,), example_data="q")
        self.observation_spec = Composite(text=text, shape=(rows,))
        self.full_action_spec = Composite(answer=text.clone(), shape=(rows,))
        self.reward_spec = Unbounded(shape=(rows, 1))
        self._turn = [0] * rows

    data_key = "text"

    def _reset(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
        mask = tensordict.get("_reset", None)
        for row in range(len(self._turn)):
            if mask is None or bool(mask[row]):
                self._turn[row] = 0
        return tensordict.select("text")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        from tensordict import lazy_stack

        prompts = [row["text"] for row in tensordict.unbind(0)]
        if self._on_step is not None:
            self._on_step(prompts)
        rows = []
        for index, (prompt, row) in enumerate(zip(prompts, tensordict.unbind(0), strict=True)):
            self._turn[index] += 1
            done = torch.tensor([self._turn[index] >= self._length(prompt)])
            following = row.select("text")
            following.update({"done": done, "terminated": done.clone()})
            following["reward"] = torch.tensor([float(len(row["answer"]))])
            rows.append(following)
        return lazy_stack(rows)

    def _set_seed(self, seed: int | None) -> None:
        pass


def prompts(count: int) -> list[str]:
    return [f"q{index}" for index in range(count)]


Group = list[tuple[str, int, int]]


def groups_of(rows: list[TensorDictBase]) -> dict[int, Group]:
    """(prompt, index, step) of each group's turns, by group id, in the order in which they came."""
    found: dict[int, Group] = {}
    for row in rows:
        entry = (row["text"], int(row["collector", "group_index"]), int(row["collector", "step"]))
        found.setdefault(int(row["collector", "group_id"]), []).append(entry)
    return found


def assert_whole(batch: TensorDictBase, repeats: int, lengths: Any) -> list[int]:
    """Each group is contiguous, its trajectories are whole and in the order of their index; the groups' ids."""
    rows = list(batch.unbind(0))
    runs = [key for key, _ in itertools.groupby(ids(rows, "group_id"))]
    assert len(runs) == len(set(runs))
    for turns in groups_of(rows).values():
        prompt = turns[0][0]
        assert turns == [(prompt, index, step) for index in range(repeats) for step in range(lengths(prompt))]
    return runs


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rows", "slots", "threads"), [(1, 4, 0), (3, 2, 0), (2, 3, 2)])
def test_groups_come_complete_and_contiguous_in_every_way_of_reading_L31_L32(
    way: str, rows: int, slots: int, threads: int
) -> None:
    def length(prompt: str) -> int:
        return 1 + int(prompt[1:]) % 3

    source = PromptSource(prompts(7), repeats=4, epochs=1)
    collector = LLMCollector(
        source.env(lambda: Answered(rows, length)), echo, num_envs=slots, groups_per_batch=2, env_threads=threads
    )
    outcome = read_to_the_end(collector, way)
    assert outcome.error is None
    if way == "buffer":
        [batch] = outcome.batches
        assert assert_whole(batch, 4, length) == list(range(7))
    else:
        found = [assert_whole(batch, 4, length) for batch in outcome.batches]
        assert found == [[0, 1], [2, 3], [4, 5], [6]]
    assert {g: turns[0][0] for g, turns in groups_of(outcome.rows).items()} == dict(enumerate(prompts(7)))
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["groups"], stats["trajectories"]) == (7, 28)
    collector.shutdown()


def test_the_first_group_has_all_its_members_L30() -> None:
    source = PromptSource(prompts(2), repeats=3, epochs=1)
    with LLMCollector(source.env(lambda: Answered(2)), echo, steps_per_batch=1) as collector:
        rows = [batch[0] for batch in collector]
    assert Counter(row["text"] for row in rows) == {"q0": 3, "q1": 3}
    assert sorted(zip(ids(rows, "group_id"), ids(rows, "group_index"), strict=True)) == [
        *((0, 0), (0, 1), (0, 2)),
        *((1, 0), (1, 1), (1, 2)),
    ]


def test_one_source_in_several_constructors_is_one_stream_and_epochs_are_counted_L24() -> None:
    source = PromptSource(prompts(3), repeats=2, epochs=2)
    envs = [source.env(lambda: Answered(1)), source.env(lambda: Answered(2, length=2))]
    with LLMCollector(envs, echo, groups_per_batch=1) as collector:
        batches = list(collector)
    rows = [row for batch in batches for row in batch.unbind(0)]
    assert list(groups_of(rows)) == list(range(6))
    assert [(int(b[0]["collector", "epoch"]), b[0]["text"]) for b in batches] == [
        *((0, "q0"), (0, "q1"), (0, "q2")),
        *((1, "q0"), (1, "q1"), (1, "q2")),
    ]
    assert set(ids(rows, "env_id")) == {0, 1}


def test_two_sources_in_one_collector_have_group_ids_of_their_own() -> None:
    left, right = PromptSource(["a0", "a1"], epochs=1, repeats=2), PromptSource(["b0", "b1"], epochs=1, repeats=2)
    envs = [left.env(lambda: Answered(1)), right.env(lambda: Answered(1))]
    with LLMCollector(envs, echo, groups_per_batch=1) as collector:
        rows = [row for batch in collector for row in batch.unbind(0)]
    assert {g: turns[0][0] for g, turns in groups_of(rows).items()} == {0: "a0", 1: "b0", 2: "a1", 3: "b1"}


def test_without_a_source_there_are_no_groups() -> None:
    def make_env() -> EnvBase:
        env = ChatEnv.from_dataloader([{"query": ["q"]}], batch_size=(1,))
        return env.append_transform(StepCounter(max_steps=1))

    with LLMCollector(make_env, chat_echo, steps_per_batch=2, total_steps=2) as collector:
        rows = list(next(collector).unbind(0))
    assert ids(rows, "group_id") == ids(rows, "group_index") == ids(rows, "epoch") == [-1, -1]
    closed: list[bool] = []
    with pytest.raises(ValueError, match=r"groups_per_batch needs prompts in groups, and env 1 has its prompts from"):
        LLMCollector(
            [PromptSource(["q"]).env(lambda: Answered()), make_env], lambda: closed.append(True), groups_per_batch=1
        )
    assert not closed


@pytest.mark.parametrize("slots", [1, 3, 7])
def test_two_collectors_that_take_from_one_source_at_once_get_whole_groups(slots: int) -> None:
    source = PromptSource(prompts(12), repeats=4, epochs=1)
    begun = [threading.Event(), threading.Event()]

    def build(index: int) -> LLMCollector:
        def meet(prompts: list[str]) -> None:
            begun[index].set()
            assert begun[1 - index].wait(PATIENCE)

        return LLMCollector(source.env(lambda: Answered(on_step=meet)), echo, num_envs=slots, groups_per_batch=1)

    collectors = [build(index) for index in range(2)]
    outcomes: list[Any] = [None, None]

    def run(index: int) -> None:
        outcomes[index] = read_to_the_end(collectors[index], "loop")

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    found = []
    for collector, outcome in zip(collectors, outcomes, strict=True):
        assert outcome.error is None
        assert len(outcome.batches) > 0
        found += [group for batch in outcome.batches for group in assert_whole(batch, 4, lambda prompt: 1)]
        assert_settled(collector.stats())
        assert collector.stats()["groups_failed"] == collector.stats()["recorded"] == 0
    assert sorted(found) == list(range(12))
    assert source.state_dict()["held"] == []


@pytest.mark.parametrize("slots", [1, 3])
def test_total_steps_never_cuts_a_group(slots: int) -> None:
    source = PromptSource(prompts(50), repeats=3)
    with LLMCollector(
        source.env(lambda: Answered(1, length=2)), echo, num_envs=slots, groups_per_batch=4, total_steps=20
    ) as collector:
        batches = list(collector)
    assert [assert_whole(batch, 3, lambda prompt: 2) for batch in batches] == [[0, 1, 2, 3]]
    assert sum(len(batch) for batch in batches) == 24
    assert_settled(collector.stats())


# Filters and over-sampling


def test_a_filter_drops_groups_which_are_replaced_and_counted() -> None:
    seen: list[tuple[int, list[str], int]] = []

    def keep(group: TensorDictBase) -> bool:
        seen.append((int(group[0]["collector", "group_id"]), [row["text"] for row in group.unbind(0)], len(group)))
        return int(group[0]["text"][1:]) % 3 != 0

    source = PromptSource(prompts(9), repeats=2, epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, length=2)), echo, num_envs=3, groups_per_batch=2, group_filter=keep
    ) as collector:
        found = [assert_whole(batch, 2, lambda prompt: 2) for batch in collector]
    assert found == [[1, 2], [4, 5], [7, 8]]
    assert sorted(seen) == [(g, [f"q{g}"] * 4, 4) for g in range(9)]
    stats = collector.stats()
    assert_settled(stats)
    assert stats["recorded_by_reason"] == {"filtered": 6} and stats["turns_dropped"] == 12
    assert (stats["groups"], stats["groups_filtered"]) == (6, 3)
    assert source.state_dict()["held"] == []


def test_a_filter_that_drops_everything_ends_with_the_data_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    source = PromptSource(prompts(250), epochs=1)
    with (
        caplog.at_level(logging.WARNING, "torchrl_llm"),
        LLMCollector(source.env(lambda: Answered()), echo, groups_per_batch=1, group_filter=lambda group: False) as c,
    ):
        assert list(c) == []
    said = [record.message for record in caplog.records if "group_filter" in record.message]
    assert said == [f"group_filter has dropped {n} groups in a row, none was kept" for n in (100, 200)]
    assert c.stats()["groups_filtered"] == 250


def test_a_filter_that_raises_ends_the_collection_with_its_error() -> None:
    def fail(group: TensorDictBase) -> bool:
        raise ZeroDivisionError("no")

    collector = LLMCollector(
        PromptSource(prompts(2)).env(lambda: Answered()), echo, groups_per_batch=1, group_filter=fail
    )
    with pytest.raises(CollectorError, match="group_filter failed: ZeroDivisionError: no"):
        next(collector)
    assert_settled(collector.stats())


class Slow:
    """Holds the steps of some prompts until they are let go."""

    def __init__(self, *slow: str) -> None:
        self.slow = set(slow)
        self.reached = threading.Semaphore(0)
        self.go = threading.Event()

    def __call__(self, prompts: list[str]) -> None:
        if self.slow & set(prompts) and not self.go.is_set():
            self.reached.release()
            assert self.go.wait(PATIENCE)


def test_over_sampling_delivers_the_groups_that_are_complete_first_and_keeps_the_others() -> None:
    slow = Slow("q0")
    source = PromptSource(prompts(6), repeats=2, epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, on_step=slow)), echo, num_envs=8, groups_per_batch=2, oversample=1, env_threads=8
    ) as collector:
        first = assert_whole(next(collector), 2, lambda prompt: 1)
        assert 0 not in first and max(first) <= 2
        assert collector.stats()["launched"] <= 6
        slow.go.set()
        rest = [group for batch in collector for group in assert_whole(batch, 2, lambda prompt: 1)]
    assert sorted(first + rest) == list(range(6))
    assert_settled(collector.stats())
    assert collector.stats()["recorded"] == 0


def test_surplus_that_is_not_kept_is_recorded_and_its_prompts_come_again() -> None:
    slow = Slow("q0")
    source = PromptSource(prompts(6), repeats=2, epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, on_step=slow)),
        echo,
        num_envs=8,
        groups_per_batch=2,
        oversample=1,
        keep_surplus=False,
        env_threads=8,
    ) as collector:
        first = assert_whole(next(collector), 2, lambda prompt: 1)
        assert 0 not in first
        stats = collector.stats()
        assert_conserved(stats)
        assert stats["groups_surplus"] == 1
        slow.go.set()
        rest = [group for batch in collector for group in assert_whole(batch, 2, lambda prompt: 1)]
    assert sorted(first + rest) == list(range(6))
    stats = collector.stats()
    assert_settled(stats)
    assert set(stats["recorded_by_reason"]) == {"surplus"} and stats["recorded"] >= 2
    assert source.state_dict()["held"] == []


# Failures


def test_a_member_that_failed_is_tried_again_in_its_group() -> None:
    attempts: Counter[str] = Counter()

    def fail_twice(prompts: list[str]) -> None:
        attempts[prompts[0]] += 1
        if prompts == ["q1"] and attempts["q1"] <= 2:
            raise OSError("gone")

    source = PromptSource(prompts(3), repeats=3, epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, on_step=fail_twice)), echo, groups_per_batch=1, on_error="restart"
    ) as collector:
        found = [assert_whole(batch, 3, lambda prompt: 1) for batch in collector]
    assert found == [[0], [1], [2]]
    stats = collector.stats()
    assert_settled(stats)
    assert stats["recorded_by_reason"] == {"failed": 2} and stats["env_restarts"] == 2
    assert (stats["groups"], stats["groups_failed"], stats["launched"]) == (3, 0, 11)


def test_a_group_whose_member_fails_again_and_again_is_given_up_whole() -> None:
    def fail(prompts: list[str]) -> None:
        if prompts == ["q1"] and next(count) % 2:  # every other member of the group
            raise OSError("gone")

    count = itertools.count()
    source = PromptSource(prompts(4), repeats=4, epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, on_step=fail)), echo, num_envs=4, groups_per_batch=1, on_error="restart"
    ) as collector:
        found = [group for batch in collector for group in assert_whole(batch, 4, lambda prompt: 1)]
    stats = collector.stats()
    assert_settled(stats)
    assert [group for group in found if group != 1] == [0, 2, 3]
    if 1 not in found:
        assert stats["groups_failed"] == 1 and stats["recorded_by_reason"]["group_failed"] >= 1
    assert source.state_dict()["held"] == []


@pytest.mark.parametrize("seed", range(12))
def test_under_random_failures_groups_are_whole_and_nothing_is_lost(seed: int) -> None:
    chance = random.Random(seed)
    lock = threading.Lock()

    def sometimes(prompts: list[str]) -> None:
        with lock:
            if chance.random() < 0.06:
                raise OSError("gone")

    def length(prompt: str) -> int:
        return 1 + int(prompt[1:]) % 3

    def keep(group: TensorDictBase) -> bool:
        with lock:
            return chance.random() < 0.8

    options: dict[str, Any] = chance.choice(
        [{}, {"order": "completion"}, {"oversample": 2}, {"oversample": 1, "keep_surplus": False}, {"window": 1}]
    )
    rows, slots, threads = chance.choice([1, 2, 3]), chance.choice([1, 3, 5]), chance.choice([0, 3])
    source = PromptSource(prompts(30), repeats=3, epochs=1, shuffle=True, seed=seed)
    collector = LLMCollector(
        source.env(lambda: Answered(rows, length, on_step=sometimes)),
        echo,
        num_envs=slots,
        groups_per_batch=2,
        env_threads=threads,
        on_error="restart",
        group_filter=keep,
        **options,
    )
    with collector:
        found: list[int] = []
        try:
            for batch in collector:
                found += assert_whole(batch, 3, length)
                assert_conserved(collector.stats())
        except CollectorError as error:
            assert "gone" in str(error)  # three failures of one slot in a row
            return
    stats = collector.stats()
    assert_settled(stats)
    assert len(found) == len(set(found)) == stats["groups"]
    assert stats["groups"] + stats["groups_filtered"] + stats["groups_failed"] == 30
    assert source.state_dict()["held"] == []
    assert options.get("order", "launch") != "launch" or "oversample" in options or found == sorted(found)


# Order


def test_an_order_of_launches_holds_with_slow_and_fast_prompts_and_every_window_is_half_and_half() -> None:
    """Prompts are slow and fast in turn; as they end, the fast ones would come first."""

    def length(prompt: str) -> int:
        return 1 if int(prompt[1:]) % 2 else 12

    def run(order: str) -> tuple[list[int], dict[str, Any], list[int]]:
        busy: list[int] = []
        policy = Policy()

        def watch(td: TensorDictBase) -> TensorDictBase:
            busy.append(len(td))
            return echo(td)

        source = PromptSource(prompts(160), epochs=1)
        with LLMCollector(
            source.env(lambda: Answered(1, length)), watch, num_envs=8, trajectories_per_batch=8, order=order
        ) as collector:
            first = [t[0]["text"] for _ in range(10) for t in split_trajectories(next(collector))]
            stats = collector.stats()
        assert policy.calls == []
        return [length(prompt) for prompt in first], stats, busy

    lengths, stats, _ = run("launch")
    for start in range(0, 80, 8):
        assert Counter(lengths[start : start + 8]) == {1: 4, 12: 4}
    assert stats["most_overtaken"] > 0 and stats["longest_wait_seconds"] > 0.0
    by_completion, _, _ = run("completion")
    assert Counter(by_completion[:8]) != {1: 4, 12: 4}


@pytest.mark.parametrize("window", [1, 3, None])
def test_a_window_bounds_what_waits_and_while_it_has_room_nothing_idles(window: int | None) -> None:
    slow = Slow("q0")
    source = PromptSource(prompts(40), epochs=1)
    done: list[str] = []

    def on_step(prompts: list[str]) -> None:
        slow(prompts)
        done.extend(prompts)

    with LLMCollector(
        source.env(lambda: Answered(1, on_step=on_step)),
        echo,
        num_envs=4,
        trajectories_per_batch=1,
        env_threads=4,
        window=window,
    ) as collector:
        held = 4 if window is None else window
        reader: list[TensorDictBase] = []
        thread = threading.Thread(target=lambda: reader.append(next(collector)))
        thread.start()
        assert slow.reached.acquire(timeout=PATIENCE)
        # What is launched before the window is full ends; then nothing more begins.
        deadline = threading.Event()
        while (
            collector.stats()["requests_in_flight"]
            or len(done) < held
            or collector.stats()["in_flight"] != len(done) + 1
        ):
            assert not deadline.wait(0.002)
        waiting = len(done)
        assert held <= waiting <= held + 3  # three more were under way when it became full
        slow.go.set()
        thread.join(PATIENCE)
        assert [row["text"] for row in reader[0].unbind(0)] == ["q0"]
        assert [row["text"] for batch in collector for row in batch.unbind(0)] == prompts(40)[1:]
    assert_settled(collector.stats())


# What TorchRL makes of it


class Reward(Transform):
    """Rewards an answer by a number that depends on its trajectory's place in its group."""

    def __init__(self) -> None:
        super().__init__()
        self._count = itertools.count()

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rewards = [[[float(next(self._count) % 5)]] for _ in tensordict.unbind(0)]
        next_tensordict["reward"] = torch.tensor(rewards)
        return next_tensordict


@pytest.mark.parametrize("key", [("collector", "group_id"), "query"])
@pytest.mark.parametrize("turns", [1, 2])
def test_mc_advantage_takes_groups_as_they_are(key: Any, turns: int) -> None:
    from torchrl.objectives.llm import MCAdvantage

    def make_env() -> EnvBase:
        return ChatEnv(batch_size=(1,)).append_transform(EndAfter(turns)).append_transform(Reward())

    buffer = ReplayBuffer(
        storage=LazyStackStorage(100), batch_size=4, transform=MCAdvantage(grpo_size=4, prompt_key=key)
    )
    source = PromptSource([{"query": f"q{index}", "answer": index} for index in range(4)], repeats=4, epochs=1)
    with LLMCollector(source.env(make_env), chat_echo, num_envs=3, groups_per_batch=2) as collector:
        for batch in collector:
            buffer.extend(batch)
    rows = buffer[:]
    assert len(rows) == 16 * turns
    for group in range(4):
        mine = rows[rows["collector", "group_id"] == group]
        rewards = mine["next", "reward"].flatten()
        assert len(rewards) == 4 * turns
        expected = (rewards - rewards.mean()) / rewards.std().clamp_min(1e-6)
        torch.testing.assert_close(mine["advantage"].flatten(), expected)
        assert set(mine["query"]) == {f"q{group}"} and set(mine["answer"].tolist()) == {group}
