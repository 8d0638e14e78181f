"""Buffers and queues of every kind, with back-pressure and one end."""

from __future__ import annotations

import multiprocessing.resource_sharer
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import fakes
import pytest
import torch
from fakes import Policy, ScriptedEnv, assert_settled, chat_echo, chat_env, chats, echo
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer

from torchrl_llm import CollectorError, LLMCollector
from torchrl_llm.control import Control, Stopped
from torchrl_llm.sinks import BufferSink, QueueSink, make_sink


def batch(*texts: str) -> Any:
    return lazy_stack([TensorDict(text=text) for text in texts])


@pytest.fixture
def control() -> Control:
    return Control(wake=lambda: None)


# Queues


@pytest.mark.parametrize("kind", [queue.Queue, queue.LifoQueue, queue.SimpleQueue])
def test_any_queue_of_python_takes_batches_and_one_end(kind: Any, control: Control) -> None:
    target = kind()
    sink = QueueSink(target)
    sink.write(batch("a"), control)
    sink.end(control, deadline=None)
    items = [target.get_nowait() for _ in range(2)]
    assert target.empty()
    assert sum(item is None for item in items) == 1
    assert [item["text"] for item in items if item is not None] == [["a"]]


def test_a_queue_that_knows_only_put_and_timeout_is_enough(control: Control) -> None:
    class Minimal:
        def __init__(self) -> None:
            self.items: list[Any] = []

        def put(self, item: Any, timeout: float) -> None:
            assert timeout >= 0
            self.items.append(item)

    target = Minimal()
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=2, queue=target)
    collector.start()
    assert collector.join(fakes.PATIENCE)
    assert [None if item is None else list(item["text"]) for item in target.items] == [["q0#0"], ["q1#0"], None]


def test_a_full_queue_takes_the_end_beyond_its_size_so_that_nobody_waits_for_it(control: Control) -> None:
    target: queue.Queue[Any] = queue.Queue(maxsize=1)
    target.put("full")
    QueueSink(target).end(control, deadline=None)
    assert [target.get_nowait(), target.get_nowait()] == ["full", None]
    target.task_done()
    target.task_done()
    target.join()


def test_the_end_wakes_a_reader_that_waits(control: Control) -> None:
    target: queue.Queue[Any] = queue.Queue()
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.append(target.get(timeout=fakes.PATIENCE)))
    reader.start()
    QueueSink(target).end(control, deadline=None)
    reader.join(fakes.PATIENCE)
    assert got == [None]


def test_a_write_into_a_full_queue_waits_for_room(control: Control) -> None:
    target: queue.Queue[Any] = queue.Queue(maxsize=1)
    sink = QueueSink(target)
    sink.write(batch("a"), control)
    writer = threading.Thread(target=lambda: sink.write(batch("b"), control))
    writer.start()
    writer.join(0.25)
    assert writer.is_alive()
    assert target.get()["text"] == ["a"]
    writer.join(fakes.PATIENCE)
    assert target.get_nowait()["text"] == ["b"]


def test_a_stop_ends_a_write_into_a_full_queue(control: Control) -> None:
    target: queue.Queue[Any] = queue.Queue(maxsize=1)
    target.put("full")
    stopped = threading.Event()

    def write() -> None:
        with pytest.raises(Stopped):
            QueueSink(target).write(batch("b"), control)
        stopped.set()

    writer = threading.Thread(target=write)
    writer.start()
    control.stop()
    assert stopped.wait(fakes.PATIENCE)
    writer.join()
    assert target.qsize() == 1


def test_the_last_write_waits_no_longer_than_its_deadline(control: Control) -> None:
    target: queue.Queue[Any] = queue.Queue(maxsize=1)
    sink = QueueSink(target)
    assert sink.write_last(batch("a"), time.monotonic()) is True
    began = time.monotonic()
    assert sink.write_last(batch("b"), began + 0.1) is False
    assert 0.05 < time.monotonic() - began < 5
    assert target.get_nowait()["text"] == ["a"]


def test_a_slow_consumer_gets_everything_in_order_and_slows_the_collector() -> None:
    policy = Policy()
    collector = LLMCollector(ScriptedEnv, policy, steps_per_batch=1, total_steps=20)
    target: queue.Queue[Any] = queue.Queue(maxsize=2)
    collector.start(target)
    got = []
    for item in iter(target.get, None):
        got += item["text"]
        assert len(policy.calls) <= len(got) + 2 + 1  # in the queue, and on its way into it
    assert got == [f"q{i}#0" for i in range(20)]
    assert collector.join(fakes.PATIENCE)
    assert_settled(collector.stats())


@pytest.fixture
def process_queue() -> Iterator[Any]:
    target = multiprocessing.get_context("spawn").Queue(2)
    yield target
    target.close()
    target.join_thread()
    multiprocessing.resource_sharer.stop()


def test_a_process_queue_carries_chats_with_back_pressure(process_queue: Any) -> None:
    collector = LLMCollector(lambda: chat_env(length=2), chat_echo, steps_per_batch=2, total_steps=8)
    collector.start(process_queue)
    rows = [row for item in iter(lambda: process_queue.get(timeout=fakes.PATIENCE), None) for row in item.unbind(0)]
    assert collector.join(fakes.PATIENCE)
    assert chats(rows) == [[f"q{i}"] + [f"Q{i}"] * turn for i in range(4) for turn in (1, 2)]
    assert fakes.ids(rows, "step") == [0, 1] * 4
    assert_settled(collector.stats())


def consume(target: Any, answers: Any) -> None:
    """Runs in a process of its own."""
    from tensordict import set_list_to_stack

    set_list_to_stack(True).set()
    answers.put([row["text"] for item in iter(target.get, None) for row in item.unbind(0)])


def test_a_consumer_in_another_process_gets_every_turn(process_queue: Any) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    consumer = context.Process(target=consume, args=(process_queue, answers))
    consumer.start()
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=2, total_steps=6)
    collector.start(process_queue)
    assert answers.get() == [f"q{i}#0" for i in range(6)]
    assert collector.join(fakes.PATIENCE)
    consumer.join(fakes.PATIENCE)
    assert consumer.exitcode == 0
    answers.close()


@pytest.mark.slow
def test_a_ray_queue_carries_turns_with_back_pressure_and_one_end() -> None:
    ray = pytest.importorskip("ray")
    from ray.util.queue import Queue

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        target = Queue(maxsize=2)
        collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=1, total_steps=8)
        collector.start(target)
        while not target.full():
            assert collector.is_running()
        got = [list(item["text"]) for item in iter(lambda: target.get(timeout=fakes.PATIENCE), None)]
        assert got == [[f"q{i}#0"] for i in range(8)]
        assert collector.join(fakes.PATIENCE)
        assert target.empty()
        assert_settled(collector.stats())
        target.shutdown()
    finally:
        ray.shutdown()


# Buffers


@pytest.mark.parametrize("storage", [LazyStackStorage, ListStorage])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_buffer_of_torchrl_takes_chats_of_unequal_length(storage: Any, kind: Any) -> None:
    buffer = kind(storage=storage(100), batch_size=3)
    collector = LLMCollector(
        lambda: chat_env(length=lambda prompt: 1 + int(prompt[1:]) % 3),
        chat_echo,
        trajectories_per_batch=2,
        total_steps=12,
    )
    collector.start(buffer)
    assert collector.join(fakes.PATIENCE)
    assert len(buffer) == collector.stats()["turns"] == 12
    stored = [buffer[i] for i in range(12)]
    expected = [[f"q{prompt}"] + [f"Q{prompt}"] * turn for prompt in range(6) for turn in range(1, 2 + prompt % 3)]
    assert chats(stored) == expected
    sampled = buffer.sample()
    assert all(chat in expected for chat in chats(sampled.unbind(0)))


def test_a_buffer_that_drops_old_rows_keeps_the_newest() -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=1)
    collector = LLMCollector(ScriptedEnv, echo, steps_per_batch=2, total_steps=10)
    collector.start(buffer)
    assert collector.join(fakes.PATIENCE)
    assert sorted(fakes.texts(buffer[:].unbind(0))) == [f"q{i}#0" for i in range(6, 10)]


@pytest.mark.parametrize("write", ["write", "write_last"])
def test_a_buffer_that_refuses_a_batch_is_an_error_with_a_hint(write: str, control: Control) -> None:
    class Fixed:
        def extend(self, item: Any) -> None:
            raise RuntimeError("batch size")

    argument = control if write == "write" else time.monotonic()
    with pytest.raises(CollectorError, match=r"RuntimeError: batch size.*storage=LazyStackStorage") as raised:
        getattr(BufferSink(Fixed()), write)(batch("a"), argument)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_buffer_gets_no_end(control: Control) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=1)
    sink = BufferSink(buffer)
    assert sink.write_last(batch("a", "b"), time.monotonic()) is True
    sink.end(control, deadline=None)
    assert len(buffer) == 2


@pytest.mark.parametrize("call", ["write", "write_last", "end"])
def test_a_queue_that_refuses_an_item_is_an_error(call: str, control: Control) -> None:
    class Gone:
        def put(self, item: Any, timeout: float) -> None:
            raise ConnectionError("gone")

    arguments = {
        "write": (batch("a"), control),
        "write_last": (batch("a"), time.monotonic()),
        "end": (control, None),
    }[call]
    with pytest.raises(CollectorError, match=r"the queue does not take the .*ConnectionError: gone"):
        getattr(QueueSink(Gone()), call)(*arguments)


def test_the_sink_follows_from_the_target() -> None:
    assert make_sink(None, None) is None
    assert isinstance(make_sink(ReplayBuffer(), None), BufferSink)
    assert isinstance(make_sink(None, queue.Queue()), QueueSink)
    assert torch.is_grad_enabled()
