"""The collector on Ray: what it adds to the local one. What is the same in both is tested where the local one is."""

from __future__ import annotations

import functools
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cluster_settings
import fakes
import pytest
import torch
from fakes import PATIENCE, Policy, ScriptedEnv, assert_conserved, assert_settled, chat_echo, chat_env, chats, echo
from same import assert_same
from tensordict import LazyStackedTensorDict, TensorDictBase
from torchrl.data import LazyStackStorage

from torchrl_llm import CollectorError, EnvError, LLMCollector, RayCollector, WorkerError, WorkerHooks

pytestmark = pytest.mark.slow


def prefixed(prefixes: str, **kwargs: Any) -> list[Callable[[], ScriptedEnv]]:
    """A constructor for each letter, whose prompts begin with it."""
    return [lambda p=p: ScriptedEnv(fakes.numbered(p), **kwargs) for p in prefixes]


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# The same data


def test_a_turn_at_the_reader_equals_what_the_worker_had(ray_cluster: Any) -> None:
    arguments = {"steps_per_batch": 4, "total_steps": 4}
    [here] = LLMCollector(lambda: chat_env(length=2), chat_echo, **arguments)
    [there] = LLMCollector(lambda: chat_env(length=2), chat_echo, backend="ray", **arguments)
    assert isinstance(there, LazyStackedTensorDict)
    assert there["collector", "worker_id"].tolist() == [0] * 4
    for row in there.unbind(0):
        del row["collector", "worker_id"]
    for mine, theirs in zip(here.unbind(0), there.unbind(0), strict=True):
        assert_same(mine, theirs)


def test_lists_are_dealt_out_and_ids_are_those_of_the_users_lists(ray_cluster: Any) -> None:
    policies = [Policy(name=str(i)) for i in range(3)]
    collector = LLMCollector(
        prefixed("abc"), policies, route="paired", steps_per_batch=1, total_steps=60, num_workers=2, ordered=True,
        backend="ray",
    )  # fmt: skip
    assert isinstance(collector, RayCollector) and isinstance(collector, LLMCollector)
    rows = [row for batch in collector for row in batch.unbind(0)]
    seen = {
        (row["text"][0], row["answer"][0], *(int(row["collector", k]) for k in ("env_id", "policy_id", "worker_id")))
        for row in rows
    }
    assert seen <= {("a", "0", 0, 0, 0), ("b", "1", 1, 1, 1), ("c", "2", 2, 2, 0)}
    assert {who[-1] for who in seen} == {0, 1}
    assert len(rows) == len(set(fakes.ids(rows, "traj_ids"))) == 60
    assert_settled(collector.stats())


@pytest.mark.parametrize("unit", ["steps_per_batch", "trajectories_per_batch"])
def test_total_steps_is_exact_over_all_workers_and_trajectories_are_whole(ray_cluster: Any, unit: str) -> None:
    envs = prefixed("ab", length=3)
    collector = LLMCollector(envs, echo, total_steps=31, backend="ray", **{unit: 2})
    batches = list(collector)
    rows = [row for batch in batches for row in batch.unbind(0)]
    if unit == "steps_per_batch":
        assert [len(batch) for batch in batches] == [2] * 15 + [1]
    else:
        assert [len(batch) for batch in batches] == [6] * 5 + [3], "whole trajectories, the last of which is not cut"
        for batch in batches:
            assert [row["text"][-1] for row in batch.unbind(0)] == ["0", "1", "2"] * (len(batch) // 3)
    stats = collector.stats()
    assert_settled(stats)
    assert stats["turns"] == len(rows) == (31 if unit == "steps_per_batch" else 33)
    assert stats["recorded_by_reason"].keys() <= {"cut_off"}
    by_worker = stats["workers"]
    assert {by_worker[w]["state"] for w in (0, 1)} == {"removed"}
    assert sum(by_worker[w]["turns"] for w in (0, 1)) >= len(rows)


def test_short_batches_of_workers_whose_data_end_are_put_together(ray_cluster: Any) -> None:
    envs = [lambda: ScriptedEnv(["a0", "a1", "a2"]), lambda: ScriptedEnv(["b0"])]
    batches = list(LLMCollector(envs, echo, steps_per_batch=2, backend="ray"))
    assert [len(batch) for batch in batches] == [2, 2]
    assert sorted(text for batch in batches for text in batch["text"]) == ["a0#0", "a1#0", "a2#0", "b0#0"]


def test_ordered_takes_batches_strictly_in_turn(ray_cluster: Any) -> None:
    def slow(texts: list[str]) -> None:
        time.sleep(0.02)

    envs = [lambda: ScriptedEnv(fakes.numbered("a"), on_step=slow), lambda: ScriptedEnv(fakes.numbered("b"))]
    collector = LLMCollector(envs, echo, steps_per_batch=2, total_steps=20, ordered=True, prefetch=2, backend="ray")
    expected = [text for i in range(0, 10, 2) for p in "ab" for text in (f"{p}{i}#0", f"{p}{i + 1}#0")]
    assert [text for batch in collector for text in batch["text"]] == expected


def test_workers_run_ahead_by_prefetch_and_no_further(ray_cluster: Any) -> None:
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=2, prefetch=2, backend="ray") as collector:
        assert next(collector)["text"] == ["q0#0", "q1#0"]
        ahead = 2 + 2 * 2 + 2  # what was read, what waits, and a finished batch that found no room
        wait_until(lambda: collector.call_workers("stats")[0]["turns_finished"] >= ahead)
        for _ in range(3):
            time.sleep(0.05)
            assert collector.call_workers("stats")[0]["turns_finished"] == ahead
        assert next(collector)["text"] == ["q2#0", "q3#0"]
        wait_until(lambda: collector.call_workers("stats")[0]["turns_finished"] == ahead + 2)


def test_building_takes_no_prompt_and_a_subclass_works_too(ray_cluster: Any) -> None:
    class Loud(LLMCollector):
        def shout(self, word: str) -> str:
            return word.upper()

    with Loud(ScriptedEnv, echo, steps_per_batch=1, backend="ray") as collector:
        assert collector.call_workers("stats")[0]["launched"] == 0
        assert collector.call_workers("shout", "word") == {0: "WORD"}
        assert next(collector)["text"] == ["q0#0"]
        assert repr(collector).startswith("RayCollector(steps_per_batch=1, total_steps=-1, turns=1, in_flight=")


def test_pause_brings_workers_to_rest(ray_cluster: Any) -> None:
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=1, backend="ray") as collector:
        target: queue.Queue[Any] = queue.Queue()
        collector.start(target)
        for _ in range(3):
            target.get(timeout=PATIENCE)
            with collector.pause():
                finished = collector.call_workers("stats")[0]["turns_finished"]
                size = target.qsize()
                time.sleep(0.05)
                assert collector.call_workers("stats")[0]["turns_finished"] == finished
                assert target.qsize() == size
            assert target.get(timeout=PATIENCE) is not None
    assert_settled(collector.stats())


# Targets that are Ray actors


def test_workers_write_straight_to_a_ray_queue_L49(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util.queue import Queue

    from torchrl_llm.ray import rollout

    def never(self: Any) -> Any:
        raise AssertionError("the driver read a batch")

    target = Queue(maxsize=2, actor_options={"num_cpus": 0})
    collector = LLMCollector(
        prefixed("ab"), echo, steps_per_batch=2, total_steps=12, backend="ray", num_cpus=0.5, queue=target
    )
    monkeypatch.setattr(rollout.ArrivedBatch, "rows", never)
    collector.start()
    wait_until(target.full)
    assert collector.is_running()
    assert not collector.join(0.2)
    assert_conserved(collector.stats())
    items = list(iter(lambda: target.get(timeout=PATIENCE), None))
    assert collector.join(PATIENCE)
    assert target.empty()
    assert all(isinstance(item, LazyStackedTensorDict) and len(item) == 2 for item in items)
    for worker, prefix in enumerate("ab"):
        texts = [text for item in items if item["collector", "worker_id"][0] == worker for text in item["text"]]
        assert texts == [f"{prefix}{i}#0" for i in range(len(texts))]
    assert len(items) == 6
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["turns"], stats["batches"]) == (12, 6)
    target.shutdown(force=True)


def test_a_batch_that_is_cut_or_changed_goes_to_the_ray_queue_through_the_driver(ray_cluster: Any) -> None:
    from ray.util.queue import Queue

    seen: list[int] = []

    def postproc(batch: TensorDictBase) -> TensorDictBase:
        seen.append(len(batch))
        return batch[:1]

    target = Queue(actor_options={"num_cpus": 0})
    for changed in (None, postproc):
        collector = LLMCollector(
            ScriptedEnv, echo, steps_per_batch=2, total_steps=5, backend="ray", queue=target, postproc=changed
        )
        assert list(collector) == [None] * 3
        texts = [list(item["text"]) for item in iter(lambda: target.get(timeout=PATIENCE), None)]
        if changed is None:
            assert texts == [["q0#0", "q1#0"], ["q2#0", "q3#0"], ["q4#0"]]
        else:
            assert texts == [["q0#0"], ["q2#0"], ["q4#0"]]
            assert seen == [2, 2, 1]
    target.shutdown(force=True)


def test_workers_write_straight_to_a_ray_replay_buffer(ray_cluster: Any) -> None:
    from torchrl.data import RayReplayBuffer

    buffer = RayReplayBuffer(
        storage=functools.partial(LazyStackStorage, 100), batch_size=4, remote_config={"num_cpus": 0}
    )
    try:
        collector = LLMCollector(
            lambda: chat_env(length=2),
            chat_echo,
            steps_per_batch=4,
            total_steps=10,
            backend="ray",
            replay_buffer=buffer,
        )
        collector.start()
        assert collector.join(PATIENCE)
        rows = list(buffer[:].unbind(0))
        assert chats(rows) == [[f"q{i}"] + [f"Q{i}"] * turn for i in range(5) for turn in (1, 2)]
        assert fakes.ids(rows, "step") == [0, 1] * 5
        assert_settled(collector.stats())
        assert collector.stats()["turns"] == 10
    finally:
        buffer.shutdown() if hasattr(buffer, "shutdown") else buffer.close()


# Calls, handles, hooks


def test_a_call_goes_to_every_worker_also_while_they_collect(ray_cluster: Any) -> None:
    class Called(LLMCollector):
        def number(self, step: int, scale: Any, *, fail: bool = False) -> Any:
            env = next(iter(self._collection._rollout.slots)).env
            prefix = env.texts()[0][0]
            if fail and prefix == "b":
                raise ValueError(f"not {prefix}")
            return prefix, step * int(scale.sum())

    with Called(prefixed("ab"), echo, steps_per_batch=1, backend="ray", num_cpus=0.5) as collector:
        target: queue.Queue[Any] = queue.Queue(maxsize=1)
        collector.start(target)
        for _ in range(4):
            target.get(timeout=PATIENCE)
        weights = ray_cluster.put(torch.ones(3))
        assert collector.call_workers("number", 2, weights, timeout=PATIENCE) == {0: ("a", 6), 1: ("b", 6)}
        with pytest.raises(
            WorkerError, match=r"number failed on 1 of 2 workers: worker 1: ValueError: not b"
        ) as raised:
            collector.call_workers("number", 2, weights, fail=True)
        assert raised.value.results == {0: ("a", 6)}
        assert type(raised.value.failures[1]) is type(raised.value.__cause__) is ValueError
        with pytest.raises(WorkerError, match="nonsense failed on 2 of 2 workers: worker 0: AttributeError"):
            collector.call_workers("nonsense")


def test_a_call_that_is_not_answered_in_time_names_the_workers(ray_cluster: Any) -> None:
    class Slow(LLMCollector):
        def wait(self, seconds: float) -> None:
            time.sleep(seconds)

    with (
        Slow(ScriptedEnv, echo, steps_per_batch=1, backend="ray") as collector,
        pytest.raises(WorkerError, match=r"worker 0: TimeoutError: no answer within 0\.2 s"),
    ):
        collector.call_workers("wait", 5.0, timeout=0.2)


def test_every_worker_is_given_the_handle_and_is_ready_before_it_collects(ray_cluster: Any) -> None:
    class Prompts:
        def __init__(self) -> None:
            self.given = 0

        def next(self) -> str:
            self.given += 1
            return f"p{self.given - 1}"

    prompts = ray_cluster.remote(num_cpus=0)(Prompts).remote()

    def handle(worker: int, arguments: dict[str, Any]) -> dict[str, Any]:
        import ray

        make_env = arguments["env"]
        shared = iter(lambda: ray.get(prompts.next.remote()), None)
        return {**arguments, "env": lambda: make_env(shared)}

    launched = []
    hooks = WorkerHooks(handle, lambda worker, call: launched.append((worker, call("stats")["launched"])))
    with LLMCollector(
        ScriptedEnv, echo, num_workers=2, steps_per_batch=1, total_steps=10, backend="ray", hooks=hooks, num_cpus=0.5
    ) as collector:
        rows = [row for batch in collector for row in batch.unbind(0)]
        assert len(set(fakes.texts(rows))) == 10, "one source for all workers"
    assert sorted(launched) == [(0, 0), (1, 0)]
    ray_cluster.kill(prompts)


def test_a_constructor_may_hold_a_reference_to_a_large_object(ray_cluster: Any) -> None:
    ref = ray_cluster.put(["large0", "large1"])

    def make_env() -> ScriptedEnv:
        import ray

        return ScriptedEnv(ray.get(ref))

    batches = list(LLMCollector(make_env, echo, steps_per_batch=1, backend="ray"))
    assert [batch["text"] for batch in batches] == [["large0#0"], ["large1#0"]]


# Elasticity


def test_workers_are_added_and_removed_while_the_collector_runs(ray_cluster: Any) -> None:
    ready = []
    hooks = WorkerHooks(on_worker_ready=lambda worker, call: ready.append(worker))
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=2, backend="ray", hooks=hooks, num_cpus=0.5)
    target: queue.Queue[Any] = queue.Queue(maxsize=2)
    rows: list[Any] = []

    def read_until(happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 3 * PATIENCE  # workers have to start
        while not happened():
            assert time.monotonic() < deadline
            rows.extend(target.get(timeout=PATIENCE).unbind(0))

    with collector:
        collector.start(target)
        assert collector.add_workers(2) == [1, 2]
        read_until(lambda: set(fakes.ids(rows, "worker_id")) == {0, 1, 2})
        assert sorted(ready) == [0, 1, 2]
        reader = threading.Thread(
            target=lambda: [rows.extend(target.get(timeout=PATIENCE).unbind(0)) for _ in range(9)]
        )
        reader.start()
        assert collector.remove_workers(2) == [1, 2]
        reader.join(PATIENCE)
        states = {worker: figures["state"] for worker, figures in collector.stats()["workers"].items()}
        assert states == {0: "collecting", 1: "removed", 2: "removed"}
        assert_conserved(collector.stats())
        done = {worker: collector.stats()["workers"][worker]["turns"] for worker in (1, 2)}
        read_until(lambda: all(fakes.ids(rows, "worker_id").count(worker) == done[worker] for worker in (1, 2)))
        for worker in (1, 2):
            texts = [row["text"] for row in rows if row["collector", "worker_id"] == worker]
            assert texts == [f"q{i}#0" for i in range(len(texts))], "what it had finished is delivered, in order"
        with pytest.raises(ValueError, match="n=1 is not allowed: there are 1 workers, and one has to stay"):
            collector.remove_workers(1)
    stats = collector.stats()
    assert_settled(stats)
    assert stats["recorded_by_reason"].keys() <= {"worker_removed", "shutdown"}
    with pytest.raises(CollectorError, match="the collection is over"):
        collector.add_workers(1)


def test_workers_can_be_removed_while_nobody_reads(ray_cluster: Any) -> None:
    collector = LLMCollector(prefixed("ab"), echo, steps_per_batch=1, backend="ray", num_cpus=0.5, total_steps=50)
    rows = list(next(collector).unbind(0))
    assert collector.remove_workers(1) == [1]
    rows += [row for batch in collector for row in batch.unbind(0)]
    assert len(rows) == 50
    theirs = [row["text"] for row in rows if row["collector", "worker_id"] == 1]
    assert theirs == [f"b{i}#0" for i in range(len(theirs))]
    assert len(theirs) == collector.stats()["workers"][1]["turns"]


# Placement, and whose Ray it is


@pytest.mark.parametrize("placement", ["spread", "pack", "group"])
def test_workers_are_placed_and_our_placement_groups_are_removed(ray_cluster: Any, placement: str) -> None:
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    def groups() -> int:
        return sum(group["state"] != "REMOVED" for group in placement_group_table().values())

    given = placement_group([{"CPU": 1}]) if placement == "group" else placement
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=1, placement=given, backend="ray") as collector:
        next(collector)
        assert groups() == (placement != "spread")
    assert groups() == (placement == "group"), "what was given stays"
    if placement == "group":
        remove_placement_group(given)


def test_more_workers_than_the_cluster_can_hold_are_refused(ray_cluster: Any) -> None:
    with pytest.raises(
        ValueError, match=r"num_workers=3 need \{'CPU': 3\} in all, and the cluster has \{'CPU': 2\.0\}"
    ):
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, num_workers=3, backend="ray")
    with pytest.raises(ValueError, match=r"need \{'GPU': 1\} in all"):
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, num_gpus=1, backend="ray")


def test_a_ray_that_was_started_for_the_collector_is_shut_down_and_else_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, ray\n"
        "from tensordict import set_list_to_stack; set_list_to_stack(True).set()\n"
        "from cluster_settings import settings\n"
        "from fakes import ScriptedEnv, echo\n"
        "from torchrl_llm import LLMCollector\n"
        "if __name__ == '__main__':\n"
        "    arguments = dict(steps_per_batch=1, total_steps=1, backend='ray', num_cpus=0.5)\n"
        "    first = LLMCollector(ScriptedEnv, echo, ray_init_config=settings(1), **arguments)\n"
        "    second = LLMCollector(ScriptedEnv, echo, **arguments)\n"
        "    print(list(next(first)['text']))\n"
        "    first.shutdown(); print(ray.is_initialized())\n"
        "    print(list(next(second)['text']))\n"
        "    second.shutdown(); print(ray.is_initialized())\n"
    )
    done = run(script)
    assert done.stdout.split("\n")[:4] == ["['q0#0']", "True", "['q0#0']", "False"], done.stdout + done.stderr


def test_a_process_exits_with_a_running_collector_L84(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import queue\n"
        "from cluster_settings import settings\n"
        "from fakes import ScriptedEnv, echo\n"
        "from torchrl_llm import LLMCollector\n"
        "collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, backend='ray', ray_init_config=settings(1))\n"
        "target = queue.Queue(maxsize=2)\n"
        "collector.start(target)\n"
        "print(list(target.get(timeout=20)['text']))\n"
    )
    done = run(script)
    assert done.stdout.startswith("['q0#0']")
    assert "Warning" not in done.stderr


def run(script: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **cluster_settings.runtime_env()["env_vars"]}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


# torchrl's own


def test_the_properties_and_calls_of_the_collector_have_values_L43_L44(ray_cluster: Any) -> None:
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=2, total_steps=5, num_cpus=1, backend="ray") as collector:
        assert (collector.total_steps, collector.steps_per_batch, len(collector)) == (5, 2, 3)
        assert collector.policy_version == 0
        assert not collector.is_running()
        assert collector.set_seed(1) != 1 and collector.set_seed(1, static_seed=True) == 1
        assert next(collector)["text"] == ["q0#0", "q1#0"]
        state = collector.state_dict()
        assert (state["seed"], state["policy_version"], state["ledger"]["turns"]) == (1, 0, 2)
        with pytest.raises(TypeError, match="the policy is a function without weights that can be updated"):
            collector.update_policy_weights_({"weight": torch.zeros(1)})
        with pytest.raises(CollectorError, match=r"update_policy_weights_\(\)"):
            collector.increment_version()
        with pytest.raises(CollectorError, match="the collector has begun: load a state into a new one"):
            collector.load_state_dict(state)
        with pytest.raises(TypeError, match="cannot be pickled: pickle its constructors instead"):
            pickle.dumps(collector)


def test_a_loop_ends_and_ends_again_L45(ray_cluster: Any) -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=3, backend="ray")
    assert [batch["text"][0] for batch in collector] == ["q0#0", "q1#0", "q2#0"]
    assert list(collector) == []
    assert collector.next() is None


def test_an_env_that_fails_in_its_constructor_names_the_slot_of_the_users_list(ray_cluster: Any) -> None:
    def broken() -> Any:
        raise OSError("no sandbox")

    with pytest.raises(EnvError, match=r"broken failed: OSError: no sandbox") as raised:
        LLMCollector([ScriptedEnv, ScriptedEnv, broken], echo, steps_per_batch=1, num_workers=2, backend="ray")
    assert raised.value.slot == 2
    assert raised.value.worker_id == 0
