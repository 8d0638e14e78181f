"""One prompt source for all workers, on real Ray: groups, epochs, lost workers, saved states."""

from __future__ import annotations

import io
import os
import queue
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import PATIENCE, assert_settled, ids
from test_faults import wait_for, wait_in_step
from test_groups import Answered, assert_whole, echo, prompts

from torchrl_llm import LLMCollector, PromptSource, WorkerHooks

pytestmark = pytest.mark.slow


def lengths(prompt: str) -> int:
    return 1 + int(prompt[1:]) % 2


def build(count: int = 8, *, on_step: Any = None, epochs: int = 1, **options: Any) -> LLMCollector:
    source = PromptSource(prompts(count), repeats=3, epochs=epochs)
    make_env = source.env(lambda: Answered(1, length=lengths, on_step=on_step))
    options = {"groups_per_batch": 2, "num_workers": 2} | options
    return LLMCollector(make_env, echo, num_envs=2, backend="ray", **options)


def members(rows: list[Any]) -> Counter[tuple[str, int, int]]:
    """How often each member's last turn came."""
    return Counter(
        (row["text"], int(row["collector", "group_id"]), int(row["collector", "group_index"]))
        for row in rows
        if bool(row["next", "done"])
    )


def every_member(count: int = 8) -> dict[tuple[str, int, int], int]:
    return {(f"q{group}", group, index): 1 for group in range(count) for index in range(3)}


@pytest.mark.parametrize("affinity", [True, False])
def test_groups_are_whole_and_an_epoch_is_one_epoch(ray_cluster: Any, affinity: bool) -> None:
    with build(group_affinity=affinity) as collector:
        batches = list(collector)
        stats = collector.stats()
    for batch in batches:
        assert len(assert_whole(batch, 3, lengths)) == 2
    rows = [row for batch in batches for row in batch.unbind(0)]
    assert members(rows) == every_member()
    assert set(ids(rows, "epoch")) == {0}
    workers = defaultdict(set)
    for row in rows:
        workers[int(row["collector", "group_id"])].add(int(row["collector", "worker_id"]))
    assert set.union(*workers.values()) <= {0, 1}
    if affinity:
        assert all(len(found) == 1 for found in workers.values())
    assert stats["launched"] == stats["delivered"] == 24


@pytest.mark.parametrize("unit", ["trajectories_per_batch", "steps_per_batch"])
def test_prompts_are_shared_without_groups_too(ray_cluster: Any, unit: str) -> None:
    with build(**{"groups_per_batch": None, unit: 4}, epochs=2) as collector:
        rows = [row for batch in collector for row in batch.unbind(0)]
    found = members(rows)
    assert set(found.values()) == {1}
    assert Counter(text for text, _, _ in found) == dict.fromkeys(prompts(8), 6)
    assert {int(row["collector", "group_id"]) for row in rows} == set(range(16))
    assert set(ids(rows, "epoch")) == {0, 1}


@pytest.mark.parametrize("affinity", [True, False])
def test_prompts_of_a_worker_that_died_are_handed_out_again(ray_cluster: Any, tmp_path: Path, affinity: bool) -> None:
    hold = wait_in_step(tmp_path, "q3")
    collector = build(on_step=lambda texts: hold(texts), group_affinity=affinity)
    target: queue.Queue[Any] = queue.Queue()
    with collector:
        collector.start(target)
        wait_for(tmp_path / "reached")
        os.kill(int((tmp_path / "reached").read_text()), signal.SIGKILL)
        (tmp_path / "go").touch()
        batches = list(iter(lambda: target.get(timeout=PATIENCE), None))
        collector.join()
        stats = collector.stats()
    rows = [row for batch in batches for row in batch.unbind(0)]
    assert members(rows) == every_member()
    assert stats["worker_restarts"] == 1
    assert stats["recorded_by_reason"].keys() <= {"worker_died"}
    assert_settled(stats)
    for batch in batches:
        assert_whole(batch, 3, lengths)


def test_prompts_of_a_removed_worker_are_handed_out_again(ray_cluster: Any, tmp_path: Path) -> None:
    hold = wait_in_step(tmp_path, "q7")
    collector = build(on_step=lambda texts: hold(texts), num_cpus=0.5)
    target: queue.Queue[Any] = queue.Queue()
    with collector:
        collector.start(target)
        wait_for(tmp_path / "reached")
        collector.remove_workers(1)
        (tmp_path / "go").touch()
        batches = list(iter(lambda: target.get(timeout=PATIENCE), None))
        collector.join()
    rows = [row for batch in batches for row in batch.unbind(0)]
    assert members(rows) == every_member()


def test_a_filter_sees_whole_groups_and_what_it_drops_is_counted(ray_cluster: Any) -> None:
    def wanted(group: Any) -> bool:
        return int(group[0]["text"][1:]) % 2 == 0

    for affinity in (True, False):
        with build(group_filter=wanted, group_affinity=affinity) as collector:
            rows = [row for batch in collector for row in batch.unbind(0)]
            stats = collector.stats()
        assert {row["text"] for row in rows} == {"q0", "q2", "q4", "q6"}
        assert stats["recorded_by_reason"] == {"filtered": 12}
        assert stats["groups_filtered"] == 4


def test_a_spread_group_that_fails_is_given_up_whole(ray_cluster: Any) -> None:
    def fail(texts: list[str]) -> None:
        if "q2" in texts:
            raise ValueError("no q2 here")

    def at_once(worker: int, arguments: dict[str, Any]) -> dict[str, Any]:
        from torchrl_llm import launches

        launches.MAX_TRIES = 1
        return arguments

    hooks = WorkerHooks(handle=at_once)
    with build(on_step=fail, group_affinity=False, on_error="restart", hooks=hooks) as collector:
        rows = [row for batch in collector for row in batch.unbind(0)]
        stats = collector.stats()
    expected = {key: 1 for key in every_member() if key[0] != "q2"}
    assert members(rows) == expected
    assert stats["groups_failed"] == 1


@pytest.mark.parametrize("affinity", [True, False])
def test_a_new_cluster_goes_on_from_a_saved_state(ray_cluster: Any, affinity: bool) -> None:
    with build(group_affinity=affinity) as first:
        rows = list(next(first).unbind(0))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        launched = first.stats()["delivered"]
    file.seek(0)
    state = torch.load(file, weights_only=True)
    with build(group_affinity=affinity) as second:
        second.load_state_dict(state)
        assert second.stats()["delivered"] == launched
        rest = [row for batch in second for row in batch.unbind(0)]
        assert second.stats()["delivered"] == 24
    assert members(rows + rest) == every_member()
    assert not set(ids(rows, "traj_ids")) & set(ids(rest, "traj_ids"))


def test_a_state_that_is_saved_right_after_a_worker_was_killed_loses_nothing(ray_cluster: Any, tmp_path: Path) -> None:
    hold = wait_in_step(tmp_path, "q3")
    target: queue.Queue[Any] = queue.Queue()
    rows: list[Any] = []
    with build(on_step=lambda texts: hold(texts)) as first:
        first.start(target)
        wait_for(tmp_path / "reached")
        os.kill(int((tmp_path / "reached").read_text()), signal.SIGKILL)
        (tmp_path / "go").touch()
        with first.pause():
            state = first.state_dict()
            while not target.empty():
                rows += target.get().unbind(0)
        # What is delivered from here on comes again.
    with build(on_step=lambda texts: hold(texts)) as second:
        second.load_state_dict(state)
        rest = [row for batch in second for row in batch.unbind(0)]
        assert second.stats()["delivered"] == 24
    assert members(rows + rest) == every_member()
    assert not set(ids(rows, "traj_ids")) & set(ids(rest, "traj_ids"))


def test_what_is_wrong_is_said_on_the_driver() -> None:
    with pytest.raises(ValueError, match="groups_per_batch=2 is not allowed here: environments that are not bound"):
        LLMCollector(Answered, echo, groups_per_batch=2, backend="ray")
    sources = [PromptSource(["a"]), PromptSource(["b"])]
    with pytest.raises(ValueError, match="env has 2 PromptSources: on Ray all environments share one"):
        LLMCollector([source.env(Answered) for source in sources], echo, steps_per_batch=1, backend="ray")
    with pytest.raises(ValueError, match="oversample=1 is not allowed with group_affinity=False"):
        LLMCollector(
            sources[0].env(Answered), echo, groups_per_batch=1, oversample=1, group_affinity=False, backend="ray"
        )
    with pytest.raises(TypeError, match="group_affinity= only makes sense with Ray"):
        LLMCollector(sources[0].env(Answered), echo, groups_per_batch=1, group_affinity=False)
