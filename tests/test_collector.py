"""The front: what the collector's methods give, take and refuse."""

from __future__ import annotations

import pickle
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from fakes import WAYS, Gate, Policy, ScriptedEnv, assert_conserved, assert_settled, chat_echo, chat_env, chats, echo
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer

import torchrl_llm
from torchrl_llm import CollectorError, LLMCollector, PolicyError


def q(*numbers: int) -> list[str]:
    return [f"q{number}#0" for number in numbers]


# The four ways to read


@pytest.mark.parametrize("way", WAYS)
def test_the_four_ways_to_read_give_the_same_turns(way: str) -> None:
    collector = LLMCollector(lambda: chat_env(length=2), chat_echo, steps_per_batch=2, total_steps=5)
    outcome = fakes.read_to_the_end(collector, way)
    assert outcome.error is None
    assert chats(outcome.rows) == [
        ["q0", "Q0"],
        ["q0", "Q0", "Q0"],
        ["q1", "Q1"],
        ["q1", "Q1", "Q1"],
        ["q2", "Q2"],
    ]
    assert fakes.ids(outcome.rows, "traj_ids") == [0, 0, 1, 1, 2]
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["turns"], stats["batches"]) == (5, 3)


def test_a_loop_that_was_left_goes_on_where_it_was() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=3)
    for batch in collector:
        assert batch["text"] == q(0)
        break
    assert [batch["text"] for batch in collector] == [q(1), q(2)]
    assert list(collector) == []


def test_next_gives_batches_and_then_stops_L11() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=2, total_steps=3)
    assert iter(collector) is collector
    first = next(collector)
    assert isinstance(first, LazyStackedTensorDict)
    assert first.batch_size == torch.Size([2])
    assert first["text"] == q(0, 1)
    assert next(collector)["text"] == q(2)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(collector)


def test_the_end_and_a_written_batch_can_be_told_apart_L12() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=2)
    assert [collector.next() is None for _ in range(4)] == [False, False, True, True]
    buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=1)
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=2, replay_buffer=buffer)
    assert [next(collector), next(collector)] == [None, None]
    with pytest.raises(StopIteration):
        next(collector)
    assert collector.stats()["batches"] == len(buffer) == 2


def test_a_loop_with_a_buffer_writes_and_yields_none() -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(100), batch_size=2)
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=2, total_steps=5, replay_buffer=buffer)
    written = []
    for batch in collector:
        assert batch is None
        written.append(len(buffer))
    assert written == [2, 4, 5]
    assert fakes.texts(buffer[:].unbind(0)) == q(0, 1, 2, 3, 4)


def test_a_loop_with_a_queue_writes_and_yields_none() -> None:
    target: queue.Queue[Any] = queue.Queue()
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=2, total_steps=5, queue=target)
    assert list(collector) == [None] * 3
    assert [batch["text"] for batch in iter(target.get_nowait, None)] == [q(0, 1), q(2, 3), q(4)]
    assert target.empty()


@pytest.mark.parametrize("where", ["constructor", "start"])
@pytest.mark.parametrize("kind", ["buffer", "queue"])
def test_start_takes_its_target_or_the_constructors(where: str, kind: str) -> None:
    target: Any = ReplayBuffer(storage=LazyStackStorage(10), batch_size=1) if kind == "buffer" else queue.Queue()
    names = {"buffer": "replay_buffer", "queue": "queue"}
    given = {names[kind]: target} if where == "constructor" else {}
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=3, **given)
    collector.start(*([] if where == "constructor" else [target]))
    assert collector.join(fakes.PATIENCE)
    rows = target[:].unbind(0) if kind == "buffer" else [batch[0] for batch in iter(target.get_nowait, None)]
    assert fakes.texts(rows) == q(0, 1, 2)
    assert not collector.is_running()


def test_what_was_read_before_start_is_not_collected_again() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=4)
    assert next(collector)["text"] == q(0)
    target: queue.Queue[Any] = queue.Queue()
    collector.start(target)
    assert [batch["text"] for batch in iter(target.get, None)] == [q(1), q(2), q(3)]
    collector.join()


def test_start_without_a_target_says_what_is_missing() -> None:
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=1) as collector:
        with pytest.raises(TypeError, match=r"start\(\) needs a target: pass a replay buffer or a queue"):
            collector.start()
        with pytest.raises(TypeError, match=r"has no put\(item, timeout=\) method"):
            collector.start(object())
        assert next(collector)["text"] == q(0)


def test_a_refused_start_changes_no_target() -> None:
    gate, first = Gate(), queue.Queue()
    collector = LLMCollector(
        ScriptedEnv, Policy(lambda call, texts: gate() if call == 1 else None), steps_per_batch=1, total_steps=2
    )
    collector.start(first)
    gate.wait()
    second: queue.Queue[Any] = queue.Queue()
    with pytest.raises(CollectorError):
        collector.start(second)
    gate.open()
    collector.join()
    assert second.empty()
    assert [batch["text"] for batch in iter(first.get_nowait, None)] == [q(0), q(1)]


@pytest.mark.parametrize("storage", [LazyStackStorage, ListStorage])
def test_sampled_rows_are_the_stored_rows_whatever_their_length_L71(storage: Any) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        for row in td.unbind(0):
            number = int(row["text"].split("#")[0][1:])
            row["tokens"] = torch.arange(1 + number % 4) + 10 * number
            row["answer"] = "x" * (1 + number % 4)
        return td

    buffer = ReplayBuffer(storage=storage(32), batch_size=4)
    collector = LLMCollector(ScriptedEnv, policy, steps_per_batch=4, total_steps=16)
    collector.start(buffer)
    assert collector.join(fakes.PATIENCE)
    assert len(buffer) == 16
    for _ in range(8):
        for row in buffer.sample().unbind(0):
            number = int(row["text"].split("#")[0][1:])
            assert row["tokens"].tolist() == [10 * number + i for i in range(1 + number % 4)]
            assert len(row["answer"]) == row["tokens"].numel() == int(row["next", "reward"])


# What was delivered is the reader's


def test_the_collector_never_writes_what_it_has_delivered_L74() -> None:
    collector = LLMCollector(lambda: chat_env(length=3), chat_echo, steps_per_batch=1, total_steps=6)
    batches, seen = [], []
    for batch in collector:
        batches.append(batch)
        seen.append((chats(batch.unbind(0)), fakes.ids(batch.unbind(0), "step"), sorted(map(str, batch.keys(True)))))
    for batch, before in zip(batches, seen, strict=True):
        after = (chats(batch.unbind(0)), fakes.ids(batch.unbind(0), "step"), sorted(map(str, batch.keys(True))))
        assert after == before
    assert seen[2][0] == [["q0", "Q0", "Q0", "Q0"]]


def test_what_the_reader_sets_in_a_batch_does_not_reach_the_next_turn_L74() -> None:
    collector = LLMCollector(lambda: ScriptedEnv(length=3), echo, steps_per_batch=1, total_steps=3)
    texts = []
    for batch in collector:
        texts += batch["text"]
        row = batch[0]
        row["next", "text"] = row["text"] = "CHANGED"
        row["next", "reward"] = torch.full((1,), -7.0)
        row["next"].set("more", torch.zeros(1))
        del row["answer"]
    assert texts == ["q0#0", "q0#1", "q0#2"]


def test_a_chat_that_the_reader_changes_does_not_change_the_chat_that_goes_on_L74() -> None:
    collector = LLMCollector(lambda: chat_env(length=3), chat_echo, steps_per_batch=1, total_steps=3)
    seen = []
    for batch in collector:
        seen += chats(batch.unbind(0))
        row = batch[0]
        row["next", "history"].prompt = row["history"].prompt
        row["history"].full = row["history"].prompt
        row["next", "history"] = row["history"]
    assert seen == [["q0", "Q0"], ["q0", "Q0", "Q0"], ["q0", "Q0", "Q0", "Q0"]]


def test_a_batch_can_be_pickled() -> None:
    with LLMCollector(lambda: chat_env(length=2), chat_echo, steps_per_batch=2) as collector:
        batch = next(collector)
    again = pickle.loads(pickle.dumps(batch))
    assert chats(again.unbind(0)) == chats(batch.unbind(0)) == [["q0", "Q0"], ["q0", "Q0", "Q0"]]
    assert again["collector", "step"].tolist() == [0, 1]


# Postproc


def test_postproc_sees_each_batch_and_its_result_is_delivered() -> None:
    def postproc(batch: TensorDictBase) -> TensorDictBase:
        assert batch.batch_size == torch.Size([2])
        return batch[:1]

    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=2, total_steps=4, postproc=postproc)
    assert [batch["text"] for batch in collector] == [q(0), q(2)]
    assert collector.stats()["turns"] == 4


def test_a_postproc_that_returns_something_else_is_an_error() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, postproc=lambda batch: [batch])
    with pytest.raises(CollectorError, match="postproc returned list; a TensorDict or None is needed"):
        next(collector)
    assert_settled(collector.stats())


def test_the_hooks_of_torchrl_are_called() -> None:
    seen = []
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=2)
    collector.post_collect_hook = lambda batch: seen.append(batch["text"])
    list(collector)
    assert seen == [q(0), q(1)]


# Lists


def test_lists_of_constructors_make_one_slot_and_one_policy_each_L82() -> None:
    envs = [lambda p=prefix: ScriptedEnv(fakes.numbered(p)) for prefix in "ab"]
    collector = LLMCollector(
        envs, [lambda: Policy(name="0"), lambda: Policy(name="1")], route="paired", steps_per_batch=1, total_steps=8
    )
    answers = {row["answer"][:3] for batch in collector for row in batch.unbind(0)}
    assert answers == {"0:a", "1:b"}


def test_one_policy_serves_a_list_of_envs_L82() -> None:
    envs = [lambda p=prefix: ScriptedEnv(fakes.numbered(p)) for prefix in "abc"]
    collector = LLMCollector(envs, [echo], steps_per_batch=3, total_steps=12)
    assert {row["text"][0] for batch in collector for row in batch.unbind(0)} == set("abc")


def test_lists_that_cannot_be_paired_are_refused_L82() -> None:
    with pytest.raises(ValueError, match="route='paired' needs as many policies as environments, got 2 and 3"):
        LLMCollector(ScriptedEnv, [Policy(), Policy()], num_envs=3, route="paired", steps_per_batch=1)


def test_a_constructor_is_called_once_per_slot_and_instances_are_taken_as_they_are() -> None:
    built = []

    def make_env() -> ScriptedEnv:
        built.append(ScriptedEnv())
        return built[-1]

    policy, given = Policy(), ScriptedEnv()
    with LLMCollector(make_env, policy, num_envs=3, steps_per_batch=3) as collector:
        next(collector)
    assert len(built) == 3
    with LLMCollector(given, policy, steps_per_batch=1) as collector:
        next(collector)
    assert len(policy.calls) >= 2


def test_a_policy_constructor_that_fails_is_named() -> None:
    def load_model() -> Any:
        raise FileNotFoundError("no weights")

    with pytest.raises(PolicyError, match=r"load_model failed: FileNotFoundError: no weights") as raised:
        LLMCollector(ScriptedEnv, load_model, steps_per_batch=1)
    assert isinstance(raised.value.__cause__, FileNotFoundError)


def test_a_policy_constructor_that_gives_no_policy_is_an_error() -> None:
    with pytest.raises(PolicyError, match="the constructor of policy 0 returned NoneType, not a callable"):
        LLMCollector(ScriptedEnv, lambda: None, steps_per_batch=1)


# Stats, length, representation


def test_stats_balance_at_every_moment_and_from_any_thread() -> None:
    collector = LLMCollector(
        lambda: ScriptedEnv(length=2, batch_size=(2,)), echo, num_envs=3, steps_per_batch=3, total_steps=300
    )
    looked = []

    def look() -> None:
        while not looked or collector.is_running():
            stats = collector.stats()
            assert_conserved(stats)
            looked.append(stats["turns"])

    collector.start(queue.Queue())
    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert collector.join(fakes.PATIENCE)
    for thread in threads:
        thread.join(fakes.PATIENCE)
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["turns"], stats["batches"], stats["errors"]) == (300, 100, 0)


def test_requests_in_flight_are_counted() -> None:
    gate = Gate()
    collector = LLMCollector(
        ScriptedEnv, Policy(lambda call, texts: gate()), num_envs=3, steps_per_batch=3, total_steps=3
    )
    collector.start(queue.Queue())
    gate.wait()
    while collector.stats()["requests_in_flight"] < 3:
        assert collector.is_running()
    stats = collector.stats()
    assert_conserved(stats)
    assert (stats["launched"], stats["in_flight"], stats["turns"]) == (3, 3, 0)
    gate.open()
    collector.join()
    assert_settled(collector.stats())


def test_a_length_needs_an_end() -> None:
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=4, total_steps=10) as collector:
        assert len(collector) == 3
    for arguments in ({"steps_per_batch": 4}, {"trajectories_per_batch": 4, "total_steps": 10}):
        with LLMCollector(ScriptedEnv, echo, **arguments) as collector:
            with pytest.raises(TypeError, match="has a length only with steps_per_batch and total_steps"):
                len(collector)
            assert next(iter(collector)) is not None


def test_the_representation_says_what_is_collected() -> None:
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=2, total_steps=4) as collector:
        assert repr(collector) == "LLMCollector(steps_per_batch=2, total_steps=4, turns=0, in_flight=0)"
        next(collector)
        assert repr(collector).startswith("LLMCollector(steps_per_batch=2, total_steps=4, turns=2, in_flight=")
    with LLMCollector(ScriptedEnv, echo, trajectories_per_batch=2) as collector:
        assert "trajectories_per_batch=2" in repr(collector)


def test_it_is_one_of_torchrls_collectors() -> None:
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=1) as collector:
        assert isinstance(collector, BaseCollector)
        assert collector.policy_version == 0
        iterator = collector.iterator()
        assert next(iterator)["text"] == q(0)


# What is refused


@pytest.mark.parametrize("state", ["fresh", "read", "running"])
def test_a_collector_cannot_be_pickled_and_says_what_to_pickle_L50(state: str) -> None:
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=1) as collector:
        if state == "read":
            next(collector)
        elif state == "running":
            collector.start(queue.Queue())
        with pytest.raises(TypeError, match="cannot be pickled: pickle its constructors instead"):
            pickle.dumps(collector)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.set_seed(1),
        lambda c: c.state_dict(),
        lambda c: c.load_state_dict({}),
    ],
    ids=["set_seed", "state_dict", "load_state_dict"],
)
def test_what_comes_later_says_so(call: Callable[[LLMCollector], Any]) -> None:
    with (
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1) as collector,
        pytest.raises(NotImplementedError, match="comes with a later release"),
    ):
        call(collector)


@pytest.mark.parametrize(("name", "value"), [("groups_per_batch", 2), ("seed", 0), ("backend", "ray")])
def test_arguments_that_come_later_say_so(name: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}={value!r} comes with a later release"):
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, **{name: value})


def test_wrong_arguments_fail_before_anything_is_built() -> None:
    def build() -> Any:
        raise AssertionError("it was built")

    for arguments, error in (
        ({"frames_per_batch": 1}, TypeError),
        ({"steps_per_batch": 0}, ValueError),
        ({"steps_per_batch": 1, "route": "random"}, ValueError),
        ({"steps_per_batch": 1, "on_error": "ignore"}, ValueError),
        ({"steps_per_batch": 1, "env_threads": -1}, ValueError),
        ({"steps_per_batch": 1, "total_steps": 0}, ValueError),
        ({"steps_per_batch": 1, "postproc": 3}, TypeError),
        ({"steps_per_batch": 1, "queue": []}, TypeError),
        ({"steps_per_batch": 1, "backend": "mpi"}, ValueError),
    ):
        with pytest.raises(error):
            LLMCollector(build, build, **arguments)


# Pause


def test_nothing_is_delivered_or_asked_for_during_a_pause() -> None:
    policy = Policy()
    collector = LLMCollector(ScriptedEnv, policy, steps_per_batch=1)
    target: queue.Queue[Any] = queue.Queue()
    collector.start(target)
    for _ in range(5):
        target.get(timeout=fakes.PATIENCE)
        with collector.pause():
            stats, calls, size = collector.stats(), len(policy.calls), target.qsize()
            for _ in range(50):
                threading.Event().wait(0.001)
                now = collector.stats()
                assert now["turns"] == stats["turns"]
                assert target.qsize() == size
                assert len(policy.calls) <= calls + 1, "only what was in flight goes on"
            assert_conserved(now)
        assert target.get(timeout=fakes.PATIENCE) is not None
    collector.shutdown()
    assert_settled(collector.stats())


def test_a_collector_that_nobody_reads_pauses_at_once() -> None:
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=1) as collector:
        with collector.pause(), collector.pause():
            pass
        assert next(collector)["text"] == q(0)


def test_reading_inside_ones_own_pause_is_refused() -> None:
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=1) as collector:
        with collector.pause(), pytest.raises(CollectorError, match=r"inside `with collector.pause\(\)`"):
            next(collector)
        assert next(collector)["text"] == q(0)


def test_a_reader_waits_for_the_pause_of_another_thread() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1)
    got: list[Any] = []
    with collector.pause():
        reader = threading.Thread(target=lambda: got.append(next(collector)))
        reader.start()
        reader.join(0.1)
        assert not got
    reader.join(fakes.PATIENCE)
    assert got[0]["text"] == q(0)
    collector.shutdown()


def test_shutdown_ends_a_pause() -> None:
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1)
    target: queue.Queue[Any] = queue.Queue()
    collector.start(target)
    target.get(timeout=fakes.PATIENCE)
    with collector.pause():
        collector.shutdown()
    assert not collector.is_running()
    assert list(iter(target.get_nowait, None)) is not None


# Import


def test_the_import_brings_neither_vllm_nor_ray_L10() -> None:
    code = (
        "import sys; sys.modules['ray'] = None; sys.modules['vllm'] = None\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parent.parent)!r}]\n"
        "from tensordict import set_list_to_stack; set_list_to_stack(True).set()\n"
        "import queue, torchrl_llm\n"
        "from fakes import ScriptedEnv, echo\n"
        "q = queue.Queue()\n"
        "c = torchrl_llm.LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=2, queue=q)\n"
        "c.start(); print([list(b['text']) for b in iter(q.get, None)]); c.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[['q0#0'], ['q1#0']]")


def test_a_queue_as_a_buffer_and_a_buffer_as_a_queue_get_a_hint_L10() -> None:
    with pytest.raises(TypeError, match=r"has no extend\(\) method; pass it as queue="):
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, replay_buffer=queue.Queue())
    with pytest.raises(TypeError, match=r"has no put\(item, timeout=\) method; pass it as replay_buffer="):
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, queue=ReplayBuffer())


def test_the_public_names_are_the_documented_ones() -> None:
    for name in torchrl_llm.__all__:
        assert getattr(torchrl_llm, name).__doc__
    assert {"LLMCollector", "split_trajectories", "CollectorError", "EnvError", "PolicyError"} <= set(
        torchrl_llm.__all__
    )


def test_a_quiet_run_gives_no_warning_and_leaves_gradients_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = torch.ones(1, requires_grad=True)

        def policy(td: TensorDictBase) -> TensorDictBase:
            assert not torch.is_grad_enabled()
            for row in td.unbind(0):
                row["answer"], row["value"] = "x", weight * 2
            return td

        with LLMCollector(ScriptedEnv, policy, steps_per_batch=1) as collector:
            batch = next(collector)
    assert not batch["value"].requires_grad
    assert torch.is_grad_enabled()
    assert isinstance(TensorDict(), TensorDictBase)
