"""Environments and policies for tests of timing, routing and faults, and what several test modules check."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Composite, LazyStackStorage, NonTensor, ReplayBuffer, Unbounded
from torchrl.data.llm import History
from torchrl.envs import EnvBase, StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_llm import CollectorError, LLMCollector, PromptsExhausted

# No test waits longer than this for something that must happen; none waits for it if all is well.
PATIENCE = 20.0


def numbered(prefix: str = "q") -> Iterator[str]:
    """q0, q1, q2, ... for ever."""
    return (f"{prefix}{index}" for index in itertools.count())


# Environments


class ScriptedEnv(EnvBase):
    """Observes ``"text"`` ("q0#0": prompt and turn), takes ``"answer"``, and rewards its length.

    Args:
        prompts: one per trajectory; when they end, ``reset`` raises ``PromptsExhausted``.
        length: turns of a trajectory, by its prompt.
        batch_size: of the environment.
        on_step: called with the observed texts before each step; it may raise or block.
        on_reset: called before each reset.
        on_close: called at ``close``.
    """

    batch_locked = True

    def __init__(
        self,
        prompts: Iterable[str] | None = None,
        length: int | Callable[[str], int] = 1,
        batch_size: tuple[int, ...] = (),
        on_step: Callable[[list[str]], None] | None = None,
        on_reset: Callable[[], None] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size)
        self._source = iter(numbered() if prompts is None else prompts)
        self._length = length if callable(length) else lambda prompt: length
        self._on_step, self._on_reset, self._on_close = on_step, on_reset, on_close
        rows = self.batch_size.numel()
        self._prompt, self._turn = [""] * rows, [0] * rows
        text = NonTensor(shape=self.batch_size, example_data="q0#0")
        self.observation_spec = Composite(text=text, shape=self.batch_size)
        self.full_action_spec = Composite(answer=text.clone(), shape=self.batch_size)
        self.reward_spec = Unbounded(shape=(*self.batch_size, 1))

    def texts(self) -> list[str]:
        return [f"{prompt}#{turn}" for prompt, turn in zip(self._prompt, self._turn, strict=True)]

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if self._on_reset is not None:
            self._on_reset()
        mask = None if tensordict is None else tensordict.get("_reset", None)
        rows = range(len(self._turn)) if mask is None else mask.flatten().nonzero().flatten().tolist()
        for row in rows:
            try:
                self._prompt[row] = next(self._source)
            except StopIteration:
                raise PromptsExhausted from None
            self._turn[row] = 0
        return self._stack([TensorDict(text=text) for text in self.texts()])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._on_step is not None:
            self._on_step(self.texts())
        answers = [row["answer"] for row in (tensordict.unbind(0) if self.batch_size else [tensordict])]
        self._turn = [turn + 1 for turn in self._turn]
        rows = []
        for prompt, turn, text, answer in zip(self._prompt, self._turn, self.texts(), answers, strict=True):
            done = torch.tensor([turn >= self._length(prompt)])
            reward = torch.tensor([float(len(answer))])
            rows.append(TensorDict(text=text, done=done, terminated=done.clone(), reward=reward))
        return self._stack(rows)

    def _stack(self, rows: list[TensorDict]) -> TensorDictBase:
        return lazy_stack(rows) if self.batch_size else rows[0]

    def _set_seed(self, seed: int | None) -> None:
        pass

    def close(self, **kwargs: Any) -> None:
        if self._on_close is not None:
            self._on_close()
        super().close(**kwargs)


class EndAfter(Transform):
    """Ends a chat after so many answers, by its prompt."""

    def __init__(self, length: int | Callable[[str], int]) -> None:
        super().__init__()
        self._length = length if callable(length) else lambda prompt: length

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        done = []
        for row in next_tensordict["history"].prompt.unbind(0):
            messages = row.unbind(0)
            prompt = next(m.content for m in messages if m.role == "user")
            done.append([sum(m.role == "assistant" for m in messages) >= self._length(prompt)])
        next_tensordict["done"] = torch.tensor(done)
        next_tensordict["terminated"] = torch.tensor(done)
        return next_tensordict


def chat_env(
    prompts: Iterable[str] | None = None, length: int | Callable[[str], int] = 1, batch_size: int = 1
) -> EnvBase:
    """A ``ChatEnv.from_dataloader`` over prompts, whose chats have given lengths."""
    loader = ({"query": [prompt]} for prompt in (numbered() if prompts is None else prompts))
    env = ChatEnv.from_dataloader(loader, batch_size=(batch_size,))
    return TransformedEnv(env, EndAfter(length))


def repeating_chat_env(prompts: list[str], max_steps: int = 1, batch_size: int = 1) -> EnvBase:
    """A ``ChatEnv.from_dataloader`` that goes over its prompts again and again."""
    env = ChatEnv.from_dataloader([{"query": [prompt]} for prompt in prompts], batch_size=(batch_size,))
    return TransformedEnv(env, StepCounter(max_steps=max_steps))


# Policies


def echo(td: TensorDictBase) -> TensorDictBase:
    """Answers a ``ScriptedEnv``: "q0#0" -> "a:q0#0"."""
    for row in td.unbind(0):
        row["answer"] = "a:" + row["text"]
    return td


def chat_echo(td: TensorDictBase) -> TensorDictBase:
    """Answers a ``ChatEnv`` by the last message in capitals."""
    for row in td.unbind(0):
        history = row["history"].prompt
        answer = History(role="assistant", content=history[-1].content.upper())
        row["history"].full = history.append(answer, inplace=False, dim=-1)
    return td


@dataclass
class Policy:
    """``echo`` with a record of its calls, and faults.

    Args:
        on_call: called with the number of the call, from 0, and its texts; it may raise or block.
        name: what its answers begin with.
    """

    on_call: Callable[[int, list[str]], None] | None = None
    name: str = "a"
    calls: list[list[str]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        texts = [row["text"] for row in td.unbind(0)]
        self.calls.append(texts)
        self.threads.add(threading.get_ident())
        if self.on_call is not None:
            self.on_call(len(self.calls) - 1, texts)
        for row, text in zip(td.unbind(0), texts, strict=True):
            row["answer"] = f"{self.name}:{text}"
        return td


def raise_at(number: int, error: BaseException) -> Callable[..., None]:
    """A hook that raises at its ``number``-th call, from 0, and at each later one."""
    count = itertools.count()

    def hook(*args: Any) -> None:
        if next(count) >= number:
            raise error

    return hook


def raise_once_at(number: int, error: BaseException) -> Callable[..., None]:
    """A hook that raises at its ``number``-th call only."""
    count = itertools.count()

    def hook(*args: Any) -> None:
        if next(count) == number:
            raise error

    return hook


class Gate:
    """Lets a test hold a hook: the hook says that it is there, and waits to be let through."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, *args: Any) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE), "nobody opened the gate"

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE), "nobody came to the gate"

    def open(self) -> None:
        self.opened.set()


# Reading


@dataclass
class Outcome:
    """What came of reading a collector to its end."""

    batches: list[TensorDictBase]
    error: CollectorError | None = None

    @property
    def rows(self) -> list[TensorDictBase]:
        return [row for batch in self.batches for row in batch.unbind(0)]

    @property
    def texts(self) -> list[str]:
        return texts(self.rows)


WAYS = ("loop", "pull", "buffer", "queue")


def read_to_the_end(collector: LLMCollector, way: str) -> Outcome:
    """Reads in one of the four ways, until the end or the error."""
    outcome = Outcome([])
    try:
        if way == "loop":
            for batch in collector:
                outcome.batches.append(batch)
        elif way == "pull":
            while True:
                try:
                    outcome.batches.append(next(collector))
                except StopIteration:
                    break
        elif way == "buffer":
            buffer = ReplayBuffer(storage=LazyStackStorage(1000), batch_size=1)
            try:
                collector.start(buffer)
                assert collector.join(PATIENCE), "the collector did not end"
            finally:
                if len(buffer):
                    outcome.batches.append(buffer[:])
        elif way == "queue":
            target: queue.Queue[Any] = queue.Queue()
            collector.start(target)
            outcome.batches += iter(lambda: target.get(timeout=PATIENCE), None)
            assert target.empty(), "something came after the None"
            assert collector.join(PATIENCE), "the collector did not end"
    except CollectorError as error:
        outcome.error = error
    return outcome


def texts(rows: Iterable[TensorDictBase]) -> list[str]:
    return [row["text"] for row in rows]


def chats(rows: Iterable[TensorDictBase]) -> list[list[str]]:
    """The messages of each row's chat, with the answer."""
    return [[message.content for message in row["history"].full.unbind(0)] for row in rows]


def ids(rows: Iterable[TensorDictBase], key: str) -> list[int]:
    return [int(row["collector", key]) for row in rows]


def assert_conserved(stats: dict[str, Any]) -> None:
    """The collector's law, at any moment."""
    assert stats["launched"] == stats["delivered"] + stats["recorded"] + stats["in_flight"], stats
    assert stats["turns_finished"] == stats["turns"] + stats["turns_dropped"] + stats["turns_pending"], stats
    assert sum(stats["recorded_by_reason"].values()) == stats["recorded"], stats
    assert stats["errors"] == stats["env_errors"] + stats["policy_errors"], stats
    assert all(value >= 0 for value in stats.values() if isinstance(value, int)), stats


def assert_settled(stats: dict[str, Any]) -> None:
    """The law after the end: nothing is in flight or waits any more."""
    assert_conserved(stats)
    assert stats["in_flight"] == stats["turns_pending"] == stats["requests_in_flight"] == 0, stats


# Threads


def in_background(call: Callable[[], Any]) -> Future[Any]:
    """What becomes of a call in a thread of its own, which a test that fails leaves behind."""
    result: Future[Any] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return result
