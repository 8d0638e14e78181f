"""What was built apart, together: units, order, filters, sources, lag, updates, failures, threads, ways of reading.

Scenarios are drawn at random; each is played on a real collector with a policy whose answers tell their version, and
checked by what must hold whatever happens: the books, the age of what is delivered, whole groups, every prompt once.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fakes import PATIENCE, EndAfter, Gate, ScriptedEnv, assert_conserved, assert_settled, ids
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from telling_weights import perturbed, telling, token_of, vllm_policy
from tensordict import TensorDictBase
from test_groups import Answered, Slow
from test_lag import Module, weights
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper, vLLMWrapper

from torchrl_llm import CollectorError, LLMCollector, PromptSource
from torchrl_llm.policies.engine import acquire

STEPS, TRAJECTORIES, GROUPS = "steps_per_batch", "trajectories_per_batch", "groups_per_batch"


@dataclass
class Scenario:
    """One collection: its arguments, what goes wrong, who updates when, and how it is read."""

    unit: str
    size: int
    prompts: int
    repeats: int
    slots: int
    rows: int
    seed: int
    lag: int | None = None
    way: str = "next"
    updates: str = "none"
    threads: int = 0
    failures: float = 0.0
    policy_failures: float = 0.0
    slow: bool = False
    filtered: float = 0.0
    total_steps: int = -1
    options: dict[str, Any] = field(default_factory=dict)

    def length(self, prompt: str) -> int:
        return 1 + (int(prompt[1:]) * 7 + self.seed) % 3


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    unit = draw(st.sampled_from([STEPS, TRAJECTORIES, GROUPS, GROUPS]))
    options: dict[str, Any] = {}
    if unit != STEPS:
        options = dict(draw(st.sampled_from([{}, {"order": "completion"}, {"order": "launch"}, {"window": 1}])))
    if unit == GROUPS:
        over = draw(st.sampled_from([{}, {}, {"oversample": 1}, {"oversample": 2, "keep_surplus": False}]))
        options = dict(over) if over else options
    threads = draw(st.sampled_from([0, 0, 2]))
    if threads and draw(st.integers(0, 3)) == 0:
        options |= {"max_turn_seconds": 0.03, "on_timeout": draw(st.sampled_from(["deliver", "drop"]))}
    return Scenario(
        unit=unit,
        size=draw(st.integers(1, 4)),
        prompts=draw(st.integers(1, 10)),
        repeats=draw(st.integers(1, 4)),
        slots=draw(st.integers(1, 5)),
        rows=draw(st.sampled_from([1, 1, 2, 3])),
        seed=draw(st.integers(0, 10_000)),
        lag=draw(st.sampled_from([None, 0, 1, 2, 3])),
        way=draw(st.sampled_from(["next", "queue", "buffer"])),
        updates=draw(st.sampled_from(["none", "between", "thread"])),
        threads=threads,
        failures=draw(st.sampled_from([0.0, 0.0, 0.03, 0.1])),
        policy_failures=draw(st.sampled_from([0.0, 0.0, 0.03])),
        slow=draw(st.booleans()),
        filtered=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])) if unit == GROUPS else 0.0,
        total_steps=draw(st.sampled_from([-1, -1, -1, 7, 20])),
        options=options,
    )


class Chances:
    """Random choices that several threads draw."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __call__(self, probability: float) -> bool:
        with self._lock:
            return self._random.random() < probability

    def seconds(self, most: float) -> float:
        with self._lock:
            return self._random.random() * most


class Unsteady(Module):
    """Answers with its version; sometimes it fails, sometimes it takes its time."""

    def __init__(self, chances: Chances, failures: float, slow: bool) -> None:
        super().__init__()
        self._chances, self._failures, self._slow = chances, failures, slow

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        if self._chances(self._failures):
            raise OSError("the policy is gone")
        if self._slow:
            time.sleep(self._chances.seconds(0.004))
        return super().forward(td)


class Play:
    """Plays a scenario, and checks what comes."""

    def __init__(self, scenario: Scenario) -> None:
        self.it = scenario
        self.chances = Chances(scenario.seed)
        self.rows: list[TensorDictBase] = []
        self.done = threading.Event()
        self.error: CollectorError | None = None
        self.source = PromptSource(
            [f"q{index}" for index in range(scenario.prompts)],
            repeats=scenario.repeats,
            epochs=1,
            shuffle=bool(scenario.seed % 2),
            seed=scenario.seed,
        )
        options = dict(scenario.options)
        if scenario.filtered:
            options["group_filter"] = lambda group: not self.chances(scenario.filtered)
        self.collector = LLMCollector(
            self.source.env(lambda: Answered(scenario.rows, scenario.length, self.on_step)),
            lambda: Unsteady(self.chances, scenario.policy_failures, scenario.slow),
            num_envs=scenario.slots,
            max_policy_lag=scenario.lag,
            env_threads=scenario.threads,
            on_error="restart",
            total_steps=scenario.total_steps,
            **{scenario.unit: scenario.size},
            **options,
        )

    def on_step(self, prompts: list[str]) -> None:
        if self.chances(self.it.failures):
            raise OSError("the environment is gone")
        if self.it.threads and self.it.slow:
            time.sleep(self.chances.seconds(0.004))
        if "max_turn_seconds" in self.it.options and self.chances(0.03):
            time.sleep(0.06)

    def update(self) -> None:
        self.collector.update_policy_weights_(weights(self.collector.policy_version + 1))

    def update_now_and_then(self) -> None:
        """At most so often that the collection comes to its end."""
        for _ in range(15):
            if self.done.wait(self.chances.seconds(0.02)):
                return
            try:
                self.update()
            except CollectorError:
                return  # it has ended

    def __call__(self) -> None:
        hung = threading.Event()
        watchdog = threading.Timer(PATIENCE, lambda: (hung.set(), self.collector.shutdown(1.0)))
        watchdog.daemon = True
        watchdog.start()
        trainer = threading.Thread(target=self.update_now_and_then)
        if self.it.updates == "thread":
            trainer.start()
        try:
            with self.collector:
                try:
                    self.read()
                except CollectorError as error:
                    assert not hung.is_set(), f"hung: {self.collector.stats()}"
                    assert "is gone" in str(error), error  # three failures in a row
                    self.error = error
        finally:
            watchdog.cancel()
            self.done.set()
            if trainer.ident is not None:
                trainer.join()
            watchdog.join()
        assert not hung.is_set()
        self.check_end()

    # Reading

    def read(self) -> None:
        if self.it.way == "next":
            self.read_by_next()
        elif self.it.way == "queue":
            target = Watched(self, maxsize=1)
            self.collector.start(target)
            while target.get(timeout=2 * PATIENCE) is not None:
                assert_conserved(self.collector.stats())
                if self.it.slow:
                    time.sleep(self.chances.seconds(0.01))
                self.between()
            assert self.collector.join(PATIENCE)
        else:
            self.collector.start(Watched(self))
            assert self.collector.join(2 * PATIENCE)

    def between(self) -> None:
        if self.it.updates == "between" and self.chances(0.7):
            try:
                self.update()
            except CollectorError as error:
                assert "is gone" in str(error)

    def read_by_next(self) -> None:
        while True:
            before = self.collector.policy_version
            try:
                batch = next(self.collector)
            except StopIteration:
                return
            # At delivery the version was at least the one of before.
            self.check_batch(batch, before)
            if self.it.lag == 0 and self.it.updates != "thread":
                assert {int(answer) for answer, _ in self.begun(batch)} <= {self.collector.policy_version}
            assert_conserved(self.collector.stats())
            self.between()

    # Checking

    def begun(self, batch: TensorDictBase) -> list[tuple[str, int]]:
        """(answer, version) of the responses whose age counts: of each turn, or each trajectory's first."""
        rows = [row for row in batch.unbind(0) if self.it.unit == STEPS or int(row["collector", "step"]) == 0]
        return [(row["answer"], int(row["collector", "policy_version"])) for row in rows]

    def check_batch(self, batch: TensorDictBase, current: int) -> None:
        rows = list(batch.unbind(0))
        for answer, version in self.begun(batch):
            assert int(answer) == version
            assert self.it.lag is None or version >= current - self.it.lag, (version, current)
        self.check_size(rows)
        if self.it.unit != STEPS:
            self.check_whole(rows)
        self.rows += rows

    def check_size(self, rows: list[TensorDictBase]) -> None:
        key = {STEPS: None, TRAJECTORIES: "traj_ids", GROUPS: "group_id"}[self.it.unit]
        assert 1 <= len(rows if key is None else set(ids(rows, key))) <= self.it.size

    def check_whole(self, rows: list[TensorDictBase]) -> None:
        """Trajectories, and groups, are contiguous, complete and in order."""
        trajectories = [list(run) for _, run in itertools.groupby(rows, lambda row: int(row["collector", "traj_ids"]))]
        assert len(trajectories) == len(set(ids(rows, "traj_ids")))
        for turns in trajectories:
            assert ids(turns, "step") == list(range(len(turns)))
            assert [bool(turn["next", "done"]) for turn in turns] == [False] * (len(turns) - 1) + [True]
            if not bool(turns[-1]["next", "truncated"].any()):
                assert len(turns) == self.it.length(turns[0]["text"])
        if self.it.unit == GROUPS:
            groups = [list(run) for _, run in itertools.groupby(trajectories, lambda t: ids(t, "group_id")[0])]
            for group in groups:
                assert [ids(turns, "group_index")[0] for turns in group] == list(range(self.it.repeats))
                assert len({turns[0]["text"] for turns in group}) == 1

    def check_end(self) -> None:
        stats = self.collector.stats()
        assert_settled(stats)
        assert stats["turns"] == len(self.rows)
        seen = Counter(zip(ids(self.rows, "traj_ids"), ids(self.rows, "step"), strict=True))
        assert max(seen.values(), default=1) == 1
        ended = [row for row in self.rows if bool(row["next", "done"].any())]
        assert len(ended) == stats["trajectories"]
        members = Counter(zip(ids(ended, "group_id"), ids(ended, "group_index"), strict=True))
        assert max(members.values(), default=1) == 1, "a member was delivered twice"
        if self.it.unit == GROUPS:
            assert stats["groups"] == len(set(ids(self.rows, "group_id")))
        if self.error is not None:
            return
        if self.it.total_steps > 0 and len(self.rows) >= self.it.total_steps:
            return
        # The data ran out: each member was delivered, or it is in the books why not.
        assert self.source.state_dict()["held"] == []
        reasons = stats["recorded_by_reason"]
        missing = self.it.prompts * self.it.repeats - len(members)
        if self.it.unit == GROUPS:
            assert stats["groups"] + stats["groups_filtered"] + stats["groups_failed"] == self.it.prompts
        else:
            assert missing <= (reasons.get("failed", 0) + reasons.get("timed_out", 0)) // 3


class Watched:
    """A queue, or a replay buffer, that checks each batch at the moment at which it is taken."""

    def __init__(self, play: Play, maxsize: int | None = None) -> None:
        self._play = play
        self._queue: queue.Queue[Any] = queue.Queue(maxsize or 0)
        self._failed: AssertionError | None = None
        self.get = self._queue.get
        if maxsize is None:
            self.extend = self._check
        else:
            self.put = self._put

    def _put(self, item: Any, timeout: float | None = None) -> None:
        self._queue.put(item, timeout=timeout)
        if item is not None:
            self._check(item)

    def _check(self, batch: TensorDictBase) -> None:
        self._play.check_batch(batch, self._play.collector.policy_version)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    print_blob=False,
)
@given(scenario=scenarios())
def test_whatever_happens_the_books_are_right_and_what_is_delivered_is_whole_and_young_enough(
    scenario: Scenario,
) -> None:
    Play(scenario)()


__all__ = ["Play", "Scenario", "pytest", "torch"]


# What the scenarios have found, and what they cannot see


def test_a_group_of_which_several_members_fail_at_once_is_counted_as_failed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three rows of one environment hold one group."""
    monkeypatch.setattr("torchrl_llm.launches.MAX_TRIES", 1)
    broken = {"q1"}

    def on_step(prompts: list[str]) -> None:
        if broken & set(prompts):
            raise OSError("gone")

    source = PromptSource(["q0", "q1", "q2"], repeats=3, epochs=1)
    envs = [source.env(lambda: Answered(3, on_step=on_step)) for _ in range(2)]
    with LLMCollector(envs, lambda: Module(), groups_per_batch=1, on_error="restart") as collector:
        found = [int(batch[0]["collector", "group_id"]) for batch in collector]
        stats = collector.stats()
    assert found == [0, 2]
    assert (stats["groups"], stats["groups_failed"]) == (2, 1)
    assert_settled(stats)
    assert source.state_dict()["held"] == []


def test_running_members_of_a_group_that_is_given_up_do_not_count_as_failures_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchrl_llm.launches.MAX_TRIES", 1)
    gate = Gate()

    def on_step(prompts: list[str]) -> None:
        if prompts == ["q0"]:
            if next(count) == 0:
                gate()  # the first member is under way until the group has been given up
            raise OSError("gone")

    count = itertools.count()
    source = PromptSource(["q0", "q1"], repeats=2, epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, on_step=on_step)),
        lambda: Module(),
        num_envs=2,
        groups_per_batch=1,
        env_threads=2,
        on_error="restart",
    ) as collector:
        reader: list[Any] = []
        thread = threading.Thread(target=lambda: reader.extend(collector))
        thread.start()
        while not collector.stats()["groups_failed"] and thread.is_alive():
            time.sleep(0.001)
        gate.open()
        thread.join(PATIENCE)
        stats = collector.stats()
    assert stats["groups_failed"] == 1
    assert [int(batch[0]["collector", "group_id"]) for batch in reader] == [1]
    assert_settled(stats)


@pytest.mark.parametrize("unit", [STEPS, TRAJECTORIES])
def test_a_batch_that_is_taken_back_is_not_changed_twice_by_postproc(unit: str) -> None:
    collector: LLMCollector
    seen: list[int] = []

    def double(batch: TensorDictBase) -> TensorDictBase:
        seen.append(len(batch))
        for row in batch.unbind(0):
            row["next", "reward"] *= 2
        if len(seen) == 2:
            collector.update_policy_weights_(weights(1))  # by which the batch is too old for its delivery
        return batch

    source = PromptSource(["q0", "q1", "q2", "q3"], epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1)), Module(), postproc=double, max_policy_lag=0, **{unit: 2}
    ) as collector:
        rows = [row for batch in collector for row in batch.unbind(0)]
        stats = collector.stats()
    assert len(seen) == 3 and stats["turns_dropped"] == stats["recorded_by_reason"]["stale"] == 2
    assert [row["text"] for row in rows] == ["q0", "q1", "q2", "q3"]
    assert [row["next", "reward"].item() for row in rows] == [2.0] * 4
    assert [int(row["answer"]) for row in rows] == [0, 0, 1, 1]
    assert_settled(stats)


def test_what_postproc_changes_in_rows_that_stay_young_is_changed_once() -> None:
    """With a lag of 1 a batch of versions 0 and 1 comes back when version 2 is there; its younger rows stay."""
    collector: LLMCollector
    calls = itertools.count()

    def double(batch: TensorDictBase) -> TensorDictBase:
        for row in batch.unbind(0):
            row["next", "reward"] *= 2
        if next(calls) == 0:
            collector.update_policy_weights_(weights(2))
        return batch

    def on_step(prompts: list[str]) -> None:
        if prompts == ["q1"] and collector.policy_version == 0:
            collector.update_policy_weights_(weights(1))

    source = PromptSource(["q0", "q1", "q2", "q3"], epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, on_step=on_step)),
        Module(),
        postproc=double,
        max_policy_lag=1,
        steps_per_batch=3,
    ) as collector:
        rows = [row for batch in collector for row in batch.unbind(0)]
        stats = collector.stats()
    assert stats["stale_turns"] == 2
    assert sorted(row["text"] for row in rows) == ["q0", "q1", "q2", "q3"]
    assert [row["next", "reward"].item() for row in rows] == [2.0] * 4
    assert_settled(stats)


def test_a_batch_that_is_taken_back_ends_no_surplus() -> None:
    """What is under way beyond a batch is ended when the batch is delivered, and not before."""
    collector: LLMCollector
    calls = itertools.count()

    def update_at_first(batch: TensorDictBase) -> TensorDictBase:
        if next(calls) == 0:
            collector.update_policy_weights_(weights(1))
        return batch

    slow = Slow("q2")
    source = PromptSource(["q0", "q1", "q2"], epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, on_step=slow)),
        Module(),
        num_envs=3,
        groups_per_batch=1,
        oversample=2,
        keep_surplus=False,
        env_threads=3,
        postproc=update_at_first,
        max_policy_lag=0,
    ) as collector:
        batch = next(collector)
        stats = collector.stats()
        assert (stats["groups"], int(batch[0]["answer"])) == (1, 1)
        # Counted for the batch that was delivered only: at most the two others that were under way then.
        assert stats["groups_surplus"] <= 2
        slow.go.set()
        rest = list(collector)
    assert len(rest) == 2
    assert_settled(collector.stats())


@pytest.mark.parametrize("unit", [TRAJECTORIES, GROUPS])
def test_with_no_lag_at_all_a_wide_environment_gets_all_that_the_batch_needs_at_once(unit: str) -> None:
    """Members of groups that are open count once, with their group."""
    source = PromptSource([f"q{index}" for index in range(12)], repeats=4, epochs=1)
    size = {TRAJECTORIES: 8, GROUPS: 2}[unit]
    with LLMCollector(source.env(lambda: Answered(16)), Module(), max_policy_lag=0, **{unit: size}) as collector:
        for delivered in (8, 16, 24):
            assert len(next(collector)) == 8
            assert collector.stats()["launched"] == delivered


def test_the_window_holds_for_the_repeats_of_a_prompt_too() -> None:
    """Without groups per batch nothing obliges a member of a group to begin."""
    slow = Slow("q0")
    first = iter([["q0"]])

    def on_step(prompts: list[str]) -> None:
        if next(first, None) is not None:
            slow(prompts)

    source = PromptSource(["q0", "q1"], repeats=40, epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, on_step=on_step)),
        Module(),
        num_envs=3,
        env_threads=3,
        trajectories_per_batch=1,
        window=4,
    ) as collector:
        target: queue.Queue[Any] = queue.Queue()
        collector.start(target)
        assert slow.reached.acquire(timeout=PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while collector.stats()["turns_pending"] < 4:
            assert time.monotonic() < deadline
        time.sleep(0.2)
        assert collector.stats()["launched"] <= 1 + 4 + 2
        slow.go.set()
        assert collector.join(PATIENCE)
    assert collector.stats()["delivered"] == 80


# Updates, and policies that come and go


def test_an_update_while_a_policy_is_rebuilt_reaches_the_new_one() -> None:
    built = itertools.count()
    gate = Gate()

    class Breaking(Module):
        def forward(self, td: TensorDictBase) -> TensorDictBase:
            if self.breaks:
                raise OSError("gone")
            return super().forward(td)

    def make_policy() -> Module:
        policy = Breaking()
        policy.breaks = next(built) == 0
        if not policy.breaks:
            gate()
        return policy

    source = PromptSource(["q0"], epochs=1)
    with LLMCollector(source.env(lambda: Answered(1)), make_policy, steps_per_batch=1, on_error="restart") as collector:
        target: queue.Queue[Any] = queue.Queue()
        collector.start(target)
        gate.wait()
        collector.update_policy_weights_(weights(7), version=7)
        gate.open()
        batch = target.get(timeout=PATIENCE)
        assert (batch[0]["answer"], int(batch[0]["collector", "policy_version"])) == ("7", 7)
        assert collector.join(PATIENCE)


@pytest.mark.parametrize("kind", ["module", "vllm"])
def test_an_update_after_the_end_does_nothing_and_says_so(kind: str, engine: Any, original: Any) -> None:
    """A trainer beside the collector may still be at its last batches."""
    policy, new = (Module(), weights(1)) if kind == "module" else (vllm_policy(engine, tokens=2), original)
    env = Answered if kind == "module" else ScriptedEnv
    source = PromptSource(["q0"], epochs=1)
    make_env = source.env(lambda: Answered(1)) if env is Answered else (lambda: ScriptedEnv(["q0"]))
    collector = LLMCollector(make_env, policy, steps_per_batch=1)
    assert len(list(collector)) == 1
    with pytest.warns(RuntimeWarning, match="has come to its end, and its policies with it: no weights were updated"):
        collector.update_policy_weights_(new)
    assert collector.policy_version == 0
    collector.shutdown()
    with pytest.raises(CollectorError, match="was shut down"):
        collector.update_policy_weights_(new)


LIMIT = 2.0


@pytest.mark.parametrize("how", ["sleep", "wait"])
def test_a_request_that_is_held_is_not_slow(how: str, engine: Any) -> None:
    """While an engine sleeps, or lets nothing in before a switch of weights, the clocks of requests stand still."""
    envs = [ScriptedEnv() for _ in range(3)]
    with LLMCollector(
        envs, vllm_policy(engine, tokens=20), steps_per_batch=3, max_turn_seconds=LIMIT, max_trajectory_seconds=LIMIT
    ) as collector:
        target: queue.Queue[Any] = queue.Queue(1)
        if how == "sleep":
            collector.start(target)
            target.get(timeout=PATIENCE)
            collector.sleep()
        else:
            hold = acquire(engine).hold("wait")
            hold.wait()
            collector.start(target)
        time.sleep(1.5 * LIMIT)
        if how == "sleep":
            collector.wake_up()
        else:
            hold.release()
        for _ in range(4):
            for row in target.get(timeout=PATIENCE).unbind(0):
                assert len(row["tokens"].response) == 20 and not bool(row["next", "truncated"].any())
        assert collector.stats()["timeouts"] == 0
    if how == "wait":
        acquire(engine).release(0.0)


# Real engines


def prompts_env(turns: int) -> Any:
    return ChatEnv(batch_size=(1,)).append_transform(EndAfter(turns))


def history_policy(kind: str, engine: Any, model: Any, tokenizer: Any, tokens: int) -> Any:
    if kind == "vllm":
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
        return vLLMWrapper(engine, tokenizer=tokenizer, input_mode="history", generate_kwargs=options)
    options = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    return TransformersWrapper(model, tokenizer=tokenizer, input_mode="history", generate_kwargs=options)


@pytest.mark.parametrize(
    ("kind", "mode"), [("vllm", "continue"), ("vllm", "wait"), ("vllm", "restart"), ("transformers", "continue")]
)
def test_groups_of_real_engines_are_whole_young_and_tell_their_versions_while_a_trainer_updates(
    kind: str, mode: str, engine: Any, original: Any, tokenizer: Any
) -> None:
    """The weights of version v emit token v only; the prefix cache is on."""
    if kind == "vllm":
        assert engine.llm_engine.vllm_config.cache_config.enable_prefix_caching
    turns, repeats, tokens = 2, 3, 24
    source = PromptSource([{"query": f"question {index} " * 8} for index in range(400)], repeats=repeats, epochs=1)
    policy = history_policy(kind, engine, perturbed(original, 0), tokenizer, tokens)
    ages: list[int] = []
    rows: list[Any] = []
    over = threading.Event()

    class Target(queue.Queue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put(item, block, timeout)
            if item is not None:
                firsts = [row for row in item.unbind(0) if int(row["collector", "step"]) == 0]
                ages.append(collector.policy_version - min(ids(firsts, "policy_version")))

    with LLMCollector(
        source.env(lambda: prompts_env(turns)),
        policy,
        num_envs=6,
        groups_per_batch=2,
        max_policy_lag=1,
        update_mode=mode,
        track_token_versions=True,
    ) as collector:
        collector.update_policy_weights_(telling(original, 1))

        def train() -> None:
            version = 1
            while not over.wait(0.05 if kind == "vllm" else 0.3) and version < 60:
                version += 1
                collector.update_policy_weights_(telling(original, version))

        trainer = threading.Thread(target=train)
        target = Target(1)
        collector.start(target)
        trainer.start()
        try:
            for _ in range(8):
                batch = target.get(timeout=2 * PATIENCE)
                assert_conserved(collector.stats())
                rows += batch.unbind(0)
                assert len(set(ids(batch.unbind(0), "group_id"))) == 2
        finally:
            over.set()
            trainer.join()
        stats = collector.stats()
    assert len(rows) == 8 * 2 * repeats * turns
    for start in range(0, len(rows), repeats * turns):
        group = rows[start : start + repeats * turns]
        assert len(set(ids(group, "group_id"))) == 1
        assert ids(group, "group_index") == [index for index in range(repeats) for _ in range(turns)]
        assert ids(group, "step") == list(range(turns)) * repeats
    for row in rows:
        versions = row["collector", "token_versions"].tolist()
        assert row["tokens"].response.tolist() == [token_of(version) for version in versions]
        begin, end = int(row["collector", "policy_version"]), int(row["collector", "policy_version_end"])
        assert versions == sorted(versions) and (versions[0], versions[-1]) == (begin, end)
        assert begin == end or mode == "continue"
    assert len(ages) >= 8 and max(ages) <= 1
    assert stats["weight_updates"] > 1 and len({int(row["collector", "policy_version"]) for row in rows}) > 1
    assert_settled(collector.stats())
