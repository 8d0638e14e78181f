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
from fakes import PATIENCE, assert_conserved, assert_settled, ids
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from test_groups import Answered
from test_lag import Module, weights

from torchrl_llm import CollectorError, LLMCollector, PromptSource

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
            while (batch := target.get(timeout=2 * PATIENCE)) is not None:
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
