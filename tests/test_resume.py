"""A run goes on from a saved state: nothing is lost, what comes twice is recognisable, also after SIGKILL."""

from __future__ import annotations

import io
import os
import queue
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import PATIENCE, ScriptedEnv, assert_conserved, assert_settled, echo, ids
from tensordict import TensorDictBase
from test_groups import Answered, Slow, prompts
from torch.utils.data import DataLoader

from torchrl_llm import CollectorError, LLMCollector, PromptSource


def saved(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def keys(rows: list[TensorDictBase]) -> list[tuple[int, int, int, str]]:
    return [
        (int(c["epoch"]), int(c["group_id"]), int(c["group_index"]), row["text"])
        for row in rows
        for c in [row["collector"]]
    ]


def build(unit: str = "groups_per_batch", data: Any = None, **options: Any) -> LLMCollector:
    data = prompts(9) if data is None else data
    source = PromptSource(data, repeats=3, epochs=1, shuffle=isinstance(data, list), seed=5)
    return LLMCollector(source.env(lambda: Answered(1, length=2)), echo, num_envs=4, **{unit: 2}, **options)


@pytest.mark.parametrize("unit", ["groups_per_batch", "trajectories_per_batch", "steps_per_batch"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_new_collector_goes_on_with_what_was_not_delivered_L27(unit: str, stream: bool) -> None:
    def data() -> Any:
        return iter(prompts(9)) if stream else prompts(9)

    first = build(unit, data())
    rows = [row for _ in range(2) for row in next(first).unbind(0)]
    state = saved(first.state_dict())
    before = first.stats()
    first.shutdown()
    with build(unit, data()) as second:
        second.load_state_dict(state)
        stats = second.stats()
        assert_conserved(stats)
        assert stats["in_flight"] == 0
        for name in ("launched", "delivered", "turns", "turns_finished", "batches"):
            assert stats[name] == before[name]
        assert stats["recorded_by_reason"].get("interrupted", 0) == before["in_flight"]
        rest = [row for batch in second for row in batch.unbind(0)]
    assert_settled(second.stats())
    last = [row for row in rows + rest if bool(row["next", "done"])]
    assert Counter(keys(last)).most_common(1)[0][1] == 1, "delivered twice"
    assert Counter(row["text"] for row in last) == dict.fromkeys(prompts(9), 3)
    groups = {key[1]: key[3] for key in keys(rows + rest)}
    assert len(groups) == len(set(groups.values())) == 9
    assert min(ids(rest, "traj_ids")) >= before["launched"] > max(ids(rows, "traj_ids"))


@pytest.mark.parametrize("kind", ["generator", "loader"])
def test_a_state_from_before_the_first_batch_of_a_stream_loses_no_prompt(kind: str) -> None:
    def data() -> Any:
        return iter(prompts(4)) if kind == "generator" else DataLoader(prompts(4), batch_size=3)

    with build(data=data()) as first:
        state = saved(first.state_dict())
    with build(data=data()) as second:
        second.load_state_dict(state)
        ends = [row for batch in second for row in batch.unbind(0) if bool(row["next", "done"])]
    assert [row["text"] for row in ends] == [prompt for prompt in prompts(4) for _ in range(3)]


def test_total_steps_counts_over_both_lives() -> None:
    with build("steps_per_batch", total_steps=10) as first:
        delivered = len(next(first))
        state = first.state_dict()
    with build("steps_per_batch", total_steps=10) as second:
        second.load_state_dict(state)
        assert delivered + sum(len(batch) for batch in second) == 10


def test_a_state_is_consistent_while_the_collection_runs() -> None:
    import queue

    target: queue.Queue[Any] = queue.Queue()
    with build(data=prompts(60)) as collector:
        collector.start(target)
        states = [collector.state_dict() for _ in range(30)]
        assert collector.join(PATIENCE)
    for state in states:
        [source] = state["launches"]["sources"]
        undone = sum(len(group["undone"]) for group in source["held"])
        handed = source["next_group"] * 3
        assert handed - undone == state["ledger"]["delivered"]


def test_a_state_does_not_go_into_a_collector_that_has_begun_or_is_built_otherwise() -> None:
    with build() as collector:
        next(collector)
        state = collector.state_dict()
        with pytest.raises(CollectorError, match="the collector has begun: load a state into a new one"):
            collector.load_state_dict(state)
    with (
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1) as other,
        pytest.raises(ValueError, match="the state has 1 prompt sources and the collector 0"),
    ):
        other.load_state_dict(state)


def test_groups_that_were_begun_by_trajectories_are_not_completed_short() -> None:
    with build("trajectories_per_batch") as first:
        next(first)
        state = first.state_dict()
    with (
        build("groups_per_batch") as second,
        pytest.raises(ValueError, match="groups of which some members were delivered"),
    ):
        second.load_state_dict(state)


def test_a_collector_without_a_source_keeps_its_counters() -> None:
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=6) as first:
        for _ in range(4):
            next(first)
        state = saved(first.state_dict())
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=6) as second:
        second.load_state_dict(state)
        assert ids([row for batch in second for row in batch.unbind(0)], "traj_ids") == [4, 5]


def test_a_state_taken_while_an_env_is_stuck_has_its_prompt() -> None:
    slow = Slow("q0")
    source = PromptSource(prompts(3), epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, on_step=slow)), echo, num_envs=3, steps_per_batch=1, env_threads=3
    ) as collector:
        got = {next(collector)[0]["text"] for _ in range(2)}
        state = collector.state_dict()
        slow.go.set()
    assert got == {"q1", "q2"}
    again = PromptSource(prompts(3), epochs=1)
    again.load_state_dict(state["launches"]["sources"][0])
    assert [member.prompt for member in again.take(9)] == ["q0"]


CHILD = """
import os, random, sys
sys.path[:0] = {paths!r}
import torch
from fakes import echo
from test_groups import Answered
from torchrl_llm import LLMCollector, PromptSource

state_file, log_file, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
chance = random.Random(seed)
source = PromptSource([f"q{{i}}" for i in range(40)], repeats=3, epochs=2, shuffle=True, seed=11)
collector = LLMCollector(source.env(lambda: Answered(1, length=lambda p: 1 + len(p) % 3)), echo, num_envs=5,
                         groups_per_batch=2, env_threads=2)
if os.path.exists(state_file):
    collector.load_state_dict(torch.load(state_file, weights_only=True))
print("ready", flush=True)
log = open(log_file, "a")
for batch in collector:
    for row in batch.unbind(0):
        if bool(row["next", "done"]):
            c = row["collector"]
            print(int(c["epoch"]), int(c["group_id"]), int(c["group_index"]), row["text"], file=log)
    log.flush()
    if chance.random() < 0.4:
        torch.save(collector.state_dict(), state_file + ".new")
        os.replace(state_file + ".new", state_file)
    print("batch", flush=True)
collector.shutdown()
print("end", flush=True)
"""


def test_after_sigkill_at_random_points_every_prompt_comes_as_often_as_asked(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parents[1])]
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(paths=paths))
    chance = random.Random(3)
    log = tmp_path / "log"
    kills = 0
    for life in range(20):
        command = [sys.executable, str(script), str(tmp_path / "state"), str(log), str(life)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert child.stdout is not None
        watchdog = threading.Timer(120, child.kill)
        watchdog.start()
        last = ""
        try:
            until = chance.randint(3, 16) if kills < 3 else 10**6
            for _ in range(1 + until):
                last = child.stdout.readline().strip()
                if last in ("end", ""):
                    break
            else:
                os.kill(child.pid, signal.SIGKILL)
                kills += 1
        finally:
            watchdog.cancel()
            child.stdout.close()
            child.wait(PATIENCE)
        if last == "end":
            break
    assert last == "end" and kills == 3
    delivered = [tuple(line.split()) for line in log.read_text().splitlines()]
    assert len(set(delivered)) < len(delivered), "no kill came after a checkpoint"
    for epoch in ("0", "1"):
        unique = {(group, index, prompt) for e, group, index, prompt in delivered if e == epoch}
        assert Counter(prompt for _, _, prompt in unique) == {f"q{i}": 3 for i in range(40)}
        assert len({group for group, _, _ in unique}) == 40
    prompt_of = {(e, group): prompt for e, group, _, prompt in delivered}
    assert all(prompt_of[e, group] == prompt for e, group, _, prompt in delivered)


# One source, several collectors


@pytest.mark.parametrize("unit", ["groups_per_batch", "trajectories_per_batch", "steps_per_batch"])
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("end", ["shutdown", "total_steps", "error"])
def test_what_a_collector_had_in_flight_when_it_ended_comes_with_the_next_one(
    unit: str, threads: int, end: str
) -> None:
    source = PromptSource(prompts(12), repeats=2, epochs=1)
    broken = threading.Event()

    def fail(prompts: list[str]) -> None:
        if broken.is_set():
            raise ValueError("broken")

    def make(**options: Any) -> LLMCollector:
        return LLMCollector(
            source.env(lambda: Answered(on_step=fail)), echo, num_envs=5, env_threads=threads, **{unit: 2}, **options
        )

    with make(total_steps=4 if end == "total_steps" else -1) as first:
        rows = list(next(first).unbind(0))
        if end == "total_steps":
            rows += [row for batch in first for row in batch.unbind(0)]
        elif end == "error":
            broken.set()
            with pytest.raises(CollectorError, match="broken"):
                for batch in first:
                    rows += batch.unbind(0)
            broken.clear()
    assert_settled(first.stats())
    # A state that is saved now, and a collector that goes on, have the same members left.
    left = {(group["group_id"], index) for group in source.state_dict()["held"] for index in group["undone"]}
    assert left.isdisjoint((group, index) for _, group, index, _ in keys(rows))
    with make() as second:
        rows += [row for batch in second for row in batch.unbind(0)]
        assert second.stats()["groups_failed"] == second.stats()["recorded"] == 0
    assert sorted((group, index, text) for _, group, index, text in keys(rows)) == [
        (group, index, f"q{group}") for group in range(12) for index in range(2)
    ]
    assert source.state_dict()["held"] == []


def test_what_a_stuck_env_had_comes_with_the_next_collector() -> None:
    slow = Slow("q0")
    source = PromptSource(prompts(4), repeats=2, epochs=1)
    first = LLMCollector(
        source.env(lambda: Answered(on_step=slow)), echo, num_envs=2, trajectories_per_batch=1, env_threads=2
    )
    first.start(queue.Queue())
    assert slow.reached.acquire(timeout=PATIENCE)
    with pytest.warns(RuntimeWarning, match="could not be interrupted"):
        first.shutdown(timeout=0.1)
    slow.go.set()
    delivered = first.stats()["delivered"]
    with LLMCollector(source.env(Answered), echo, groups_per_batch=1) as second:
        rows = [row for batch in second for row in batch.unbind(0)]
    assert len(rows) + delivered == 8 and delivered == 0
    assert Counter(row["text"] for row in rows) == {f"q{index}": 2 for index in range(4)}
