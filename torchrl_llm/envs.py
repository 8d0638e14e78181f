"""Environment slots: an environment instance, its rows, and the prompts that it may still take.

A :class:`Slot` is one environment with its current observations; an environment of batch size ``(B,)`` is one slot of
B rows that step together, ``()`` and ``(1,)`` are one row. A row holds one trajectory at a time.

Invariants: an environment is called by one thread at a time; building a slot takes no prompt; no prompt that the
environment's data hand out is lost when they run out in the middle of a batch of rows.

A slot belongs to the thread that drives the rollout. :meth:`Slot.reset` and :meth:`Slot.step` may be lent to one
environment thread, during which the rollout does not touch the slot.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, TensorDictBase, is_non_tensor, lazy_stack
from torchrl.envs import EnvBase
from torchrl.envs.llm import DataLoadingPrimer

from torchrl_llm.batches import Trajectory
from torchrl_llm.binding import PromptFeed, find_feed
from torchrl_llm.bridge import KeyBridge, merge_entry, shallow_copy
from torchrl_llm.env_threads import Call
from torchrl_llm.errors import EnvError, PromptsExhausted
from torchrl_llm.policies.runner import Response, Ticket
from torchrl_llm.prompt_line import Prompts
from torchrl_llm.streaks import FailuresInRow

EnvConstructor = Callable[[], EnvBase]


@dataclass
class Row:
    """One row of an environment: its trajectory, what it observes, and the policy's answer to that."""

    trajectory: Trajectory | None = None
    observation: TensorDictBase | None = None
    response: TensorDictBase | None = None
    request: Any = None
    ticket: Ticket | None = None
    answer: Response | None = None
    carry: Any = None
    abandoned: str | None = None
    timed_out: bool = False
    due: float = math.inf
    held: float = 0.0

    def clear(self) -> None:
        """Makes the row free for a new trajectory."""
        self.trajectory = self.observation = self.response = self.request = None
        self.ticket = self.answer = self.carry = self.abandoned = None
        self.timed_out = False


class Slot:
    """One environment of the collector.

    Args:
        env_id: index of the slot, ``("collector", "env_id")``.
        env: the environment.
        constructor: how to build it anew after an error; ``None`` for an instance that the user passed.
    """

    def __init__(self, env_id: int, env: EnvBase, constructor: EnvConstructor | None) -> None:
        self.env_id = env_id
        self.constructor = constructor
        self.rows = [Row() for _ in range(check_env(env, env_id))]
        self.bridges: dict[int, KeyBridge] = {}
        self.awaited = 0
        self.in_call = False
        self.begun = 0
        self.failures_in_row = FailuresInRow()
        self.prompts_skipped_in_row = 0
        self.exhausted = False
        self.out_of_use = False
        self.begun_trajectories = 0
        self.call: Call | None = None
        # A seed that the environment gets before its next reset.
        self.new_seed: int | None = None
        # Places that were taken for the reset that is under way, see torchrl_llm.launches.
        self.reserved: list[Any] = []
        self._adopt(env)
        self._in_call = threading.Lock()
        self._closed = False
        self._ended = False

    def _adopt(self, env: EnvBase) -> None:
        self.env = env
        self.feed: PromptFeed | None = find_feed(env)
        self.primers = _take_over_primers(env)
        self._rewards = frozenset(env.reward_keys)

    @property
    def source(self) -> Prompts | None:
        """The prompt source that the environment is bound to."""
        return None if self.feed is None else self.feed.source

    @property
    def policy_id(self) -> int | None:
        """The policy of the trajectories that run in the slot; ``None`` while none does."""
        for row in self.rows:
            if row.trajectory is not None:
                return row.trajectory.policy_id
        return None

    def rebuild(self) -> None:
        """Replaces the environment by a new one from its constructor. Raises what the constructor raises."""
        assert self.constructor is not None
        self._close_env()
        self.env = self.constructor()
        self._closed = False
        if check_env(self.env, self.env_id) != len(self.rows):
            raise ValueError(f"the constructor of env {self.env_id} now gives another batch size")
        self._adopt(self.env)

    def close(self) -> None:
        """Closes the environment if we built it; one that is in a call on a thread is closed when that returns."""
        self._ended = True
        if self._in_call.acquire(blocking=False):
            try:
                self._close_env()
            finally:
                self._in_call.release()

    def leave_env(self) -> None:
        """Leaves the environment to the thread that is stuck in it, which closes it, and builds another.

        Raises what the constructor raises. An environment that was passed as an instance cannot be replaced: the slot
        is out of use.
        """
        if self.constructor is None:
            self.exhausted = self.out_of_use = True
            return
        self._in_call = threading.Lock()
        self._closed = True
        self.rebuild()

    def _close_env(self) -> None:
        if self.constructor is None or self._closed:
            return
        self._closed = True
        self._close(self.env)

    def _close(self, env: EnvBase) -> None:
        # TorchRL calls most environments closed from the beginning, so that is_closed says nothing.
        options = {"raise_if_closed": False} if "raise_if_closed" in signature(env.close).parameters else {}
        try:
            env.close(**options)
        except Exception as error:
            # It is being given up anyway, and the others must still be closed.
            warnings.warn(
                f"env {self.env_id} could not be closed: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2
            )

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Held during a call of the environment."""
        env = self.env
        try:
            with self._in_call:
                yield
        finally:
            if env is not self.env:
                self._close(env)  # It was left meanwhile.
            elif self._ended:
                self.close()

    def reset(self) -> list[tuple[int, TensorDictBase]]:
        """Resets the rows without a trajectory; returns (row, observation) for those that got a prompt.

        Fewer rows than asked for, or none, mean that the environment's data have run out.
        """
        with self._calling():
            if self.new_seed is not None:
                self.env.set_seed(self.new_seed % 2**31)
                self.new_seed = None
            return self._reset_free_rows()

    def _reset_free_rows(self) -> list[tuple[int, TensorDictBase]]:
        free = [index for index, row in enumerate(self.rows) if row.trajectory is None]
        granted = self._reserve_prompts(len(free))
        if granted == 0:
            return []
        try:
            observations = self._reset_env(free)
        except (PromptsExhausted, StopIteration):
            return []
        return [(index, observations[index]) for index in free[:granted]]

    def _reset_env(self, free: list[int]) -> list[TensorDictBase]:
        if len(free) == len(self.rows):
            return _unstack(self.env.reset(), self.env)
        mask = torch.zeros(len(self.rows), 1, dtype=torch.bool)
        mask[free] = True
        observations = [row.observation for row in self.rows]
        filler = next(obs for obs in observations if obs is not None)
        stack = lazy_stack([(obs if obs is not None else filler).copy() for obs in observations])
        stack.set("_reset", mask)
        return _unstack(self.env.reset(stack), self.env)

    def _reserve_prompts(self, wanted: int) -> int:
        """How many of ``wanted`` prompts the data still hold; missing ones are padded so that a reset works."""
        if self.feed is not None:
            members = [reservation.member for reservation in self.reserved]
            self.feed.give(members + members[-1:] * (wanted - len(members)))
            return len(members)
        granted = wanted
        for primer in self.primers:
            loaded: list[TensorDictBase] = []
            try:
                while len(loaded) < wanted:
                    loaded.append(primer._load_from_dataloader())
            except PromptsExhausted:
                granted = min(granted, len(loaded))
            if loaded:
                loaded += [loaded[-1].clone() for _ in range(wanted - len(loaded))]
            primer._queue.extendleft(reversed(loaded))
        return granted

    def step(self, bridge: KeyBridge) -> list[TensorDictBase]:
        """Steps the environment with the rows' responses; returns one stepped row (with ``"next"``) per row."""
        inputs: list[TensorDictBase | None] = []
        for row in self.rows:
            if row.response is None or row.observation is None:
                inputs.append(None)
            else:
                inputs.append(bridge.env_input(row.observation, row.response))
        # A row without a trajectory steps along with another row's action; nobody reads what it makes.
        filler = next(row for row in inputs if row is not None)
        rows = [filler.copy() if row is None else row for row in inputs]
        try:
            with self._calling():
                stepped = self.env.step(rows[0] if not self.env.batch_size else lazy_stack(rows))
        except (PromptsExhausted, StopIteration) as error:
            raise RuntimeError(f"step raised {error!r}; only reset may say that the data have run out") from error
        return _unstack(stepped, self.env)

    def next_observation(self, row: Row, stepped: TensorDictBase) -> TensorDictBase:
        """What the row observes after ``stepped``: ``"next"`` without rewards, and what only reset makes."""
        following = stepped.get("next")
        assert row.observation is not None
        observation = shallow_copy(row.observation)
        for key in following.keys():
            if key not in self._rewards:
                merge_entry(observation, key, _own_container(following.get(key)))
        return observation


def check_env(env: Any, env_id: int) -> int:
    """The number of rows of an environment.

    Raises:
        EnvError: if it is no environment, or has more than one batch dimension.
    """
    if not isinstance(env, EnvBase):
        raise EnvError(f"the env constructor returned {type(env).__name__}, an EnvBase is needed", slot=env_id)
    if len(env.batch_size) > 1:
        raise EnvError(f"the env has batch_size={tuple(env.batch_size)}; allowed are (), (1,) and (B,)", slot=env_id)
    if env.batch_size and env.batch_size[0] < 1:
        raise EnvError(f"the env has batch_size={tuple(env.batch_size)}; it must have a row", slot=env_id)
    return env.batch_size.numel()


def _unstack(td: TensorDictBase, env: EnvBase) -> list[TensorDictBase]:
    if not env.batch_size:
        return [td]
    return list(td.tensordicts if isinstance(td, LazyStackedTensorDict) and td.stack_dim == 0 else td.unbind(0))


def _own_container(value: Any) -> Any:
    """A container of its own with the very entries of ``value``: a reader may set entries of a delivered turn."""
    if type(value) is TensorDict:
        return shallow_copy(value)
    if isinstance(value, TensorClass) and type(value._tensordict) is TensorDict and not is_non_tensor(value):
        return type(value)._from_tensordict(shallow_copy(value._tensordict), dict(value._non_tensordict))
    return value


def _take_over_primers(env: EnvBase) -> list[DataLoadingPrimer]:
    """Finds the environment's data primers and lets each end when its data do.

    TorchRL's ``DataLoadingPrimer`` starts a loader over for ever; on one that cannot start over (a generator) it spins
    without end. A loader that is its own iterator is thus read once, any other again and again, as in TorchRL.
    """
    primers = [module for module in env.modules() if isinstance(module, DataLoadingPrimer)]
    for primer in primers:
        if not isinstance(primer.endless_dataloader, (_Data, PromptFeed)):
            primer.endless_dataloader = _Data(primer.dataloader, primer.endless_dataloader)
    return primers


class _Data:
    """Iterates over a loader, as often as it can be started over; then :class:`PromptsExhausted`.

    Args:
        loader: the primer's loader.
        started: the primer's own endless generator over it, which may be in the middle of a pass.
    """

    def __init__(self, loader: Iterable[Any], started: Any) -> None:
        self._loader = loader
        # The pass that TorchRL's `yield from` has begun goes on here, so that no item is skipped or repeated. The
        # generator is kept: its end would close a generator that it reads.
        self._started = started
        under_way = getattr(started, "gi_yieldfrom", None)
        self._pass: Iterator[Any] = iter(loader) if under_way is None else under_way
        self.epoch = 0

    def start_over(self) -> None:
        """Begins a pass anew."""
        self._pass = iter(self._loader)

    def __iter__(self) -> _Data:
        return self

    def __next__(self) -> Any:
        for item in self._pass:
            return item
        self.epoch += 1
        self._pass = iter(self._loader)
        for item in self._pass:
            return item
        raise PromptsExhausted("the environment's data have run out")
