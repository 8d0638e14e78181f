"""One prompt source for all workers: an actor owns it, each worker takes from it through a proxy.

Threads: the actor answers one call at a time. A :class:`SharedPrompts` belongs to the thread that drives its worker's
rollout, like a slot. :class:`ClusterPrompts` is the driver's side, used by the thread that drives the collection, and
at a worker's loss by the one that holds the fleet's lock. Its lock makes each message one with what it says of what has
arrived; calls of one handle are carried out in their order, so that a state holds what was said before.
"""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from torchrl_llm.binding import BoundEnv
from torchrl_llm.prompt_line import Member
from torchrl_llm.prompts import PromptSource
from torchrl_llm.ray.prompt_owner import Key, PromptOwner


class SharedPrompts:
    """A worker's proxy of the shared source; has the methods of :class:`~torchrl_llm.prompt_line.Prompts`.

    What was taken and not handed out, or came back, waits here: a group that is kept on one worker is taken at once,
    and a retry stays where it failed.

    Args:
        actor: handle of the owner.
        life: number of the process that takes.
        repeats: members of a group.
        whole_groups: whether groups are kept on one worker.
    """

    def __init__(self, actor: Any, life: int, repeats: int, whole_groups: bool) -> None:
        self.repeats = repeats
        self._actor = actor
        self._life = life
        self._whole_groups = whole_groups
        self._members: dict[Key, Member] = {}
        self._waiting: list[Key] = []

    @property
    def pending(self) -> int:
        """See :meth:`~torchrl_llm.prompt_line.Prompts.pending`."""
        return len(self._waiting)

    def take(self, count: int = 1) -> list[Member]:
        """See :meth:`~torchrl_llm.prompt_line.Prompts.take`."""
        taken: list[Member] = []
        while len(taken) < count:
            if not self._waiting and not self._fetch(count - len(taken)):
                break
            taken.append(self._members[heapq.heappop(self._waiting)])
        return taken

    def take_group(self) -> list[Member]:
        """See :meth:`~torchrl_llm.prompt_line.Prompts.take_group`; where groups are spread, what is here of one."""
        taken = self.take(1)
        while taken and self._waiting and self._waiting[0][0] == taken[0].group_id:
            taken += self.take(1)
        return taken

    def _fetch(self, count: int) -> bool:
        members: list[Member] = ray.get(self._actor.take.remote(self._life, count))
        for member in members:
            key = (member.group_id, member.index)
            self._members[key] = member
            heapq.heappush(self._waiting, key)
        return bool(members)

    def delivered(self, group_id: int, index: int) -> None:
        """The worker is done with a member; the driver says when it has reached the reader."""
        self._members.pop((group_id, index), None)

    def dropped(self, group_id: int, index: int) -> None:
        """See :meth:`~torchrl_llm.prompt_line.Prompts.dropped`."""
        self._forget([(group_id, index)])
        # Waited for, so that the owner knows it before the driver hears that this worker is done.
        ray.get(self._actor.dropped.remote(self._life, group_id, index))

    def returned(self, group_id: int, index: int) -> None:
        """See :meth:`~torchrl_llm.prompt_line.Prompts.returned`."""
        key = (group_id, index)
        if key in self._members and key not in self._waiting:
            heapq.heappush(self._waiting, key)

    def give_back(self, keys: list[Key]) -> None:
        """Not the worker's to say: the driver has handed out again what a worker held that has ended."""

    def withdraw(self, group_id: int) -> None:
        """See :meth:`~torchrl_llm.prompt_line.Prompts.withdraw`."""
        self._forget([key for key in self._members if key[0] == group_id])
        ray.get(self._actor.withdraw.remote(self._life, group_id))

    def _forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._members.pop(key, None)
            if key in self._waiting:
                self._waiting.remove(key)
                heapq.heapify(self._waiting)

    def peek(self) -> Member | None:
        """See :meth:`~torchrl_llm.prompt_line.Prompts.peek`."""
        if self._waiting:
            return self._members[self._waiting[0]]
        member: Member | None = ray.get(self._actor.peek.remote())
        return member

    def reseed(self, seed: int) -> bool:
        """See :meth:`~torchrl_llm.prompt_line.Prompts.reseed`."""
        return bool(ray.get(self._actor.reseed.remote(seed)))

    def state_dict(self) -> dict[str, Any]:
        """The state is the driver's: ``RayCollector.state_dict``."""
        raise NotImplementedError("a worker's part of a shared source has no state of its own: ask the RayCollector")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The state is the driver's: ``RayCollector.load_state_dict``."""
        raise NotImplementedError("a worker's part of a shared source has no state of its own: ask the RayCollector")


class Connection:
    """Gives a worker's environments their proxy; travels to every worker, also to restarted and added ones.

    Args:
        actor: handle of the owner.
        repeats: members of a group.
        whole_groups: whether groups are kept on one worker.
    """

    def __init__(self, actor: Any, repeats: int, whole_groups: bool) -> None:
        self._actor = actor
        self._repeats = repeats
        self._whole_groups = whole_groups

    def connect(self, life: int, env: Any) -> Any:
        """The worker's ``env`` argument, with what is bound to the source bound to a proxy of it."""
        shared = SharedPrompts(self._actor, life, self._repeats, self._whole_groups)
        if isinstance(env, (list, tuple)):
            return [_bound_to(shared, item) for item in env]
        return _bound_to(shared, env)


def _bound_to(source: Any, env: Any) -> Any:
    return env.bound_to(source) if isinstance(env, BoundEnv) else env


class _Unconnected:
    """Stands for the source where constructors travel without it, see :class:`Connection`."""


class ClusterPrompts:
    """The driver's side of a shared source.

    Args:
        source: the source; the actor has a copy, the original is not used any more.
        whole_groups: whether groups are kept on one worker.

    Raises:
        TypeError: if the source's data cannot be sent.
    """

    def __init__(self, source: PromptSource, whole_groups: bool) -> None:
        self.repeats = source.repeats
        self._lock = threading.Lock()
        self._arrived: defaultdict[int, set[Key]] = defaultdict(set)
        self._last: dict[str, Any] | Exception | None = None
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # On the driver's node, so that no worker's node takes it along.
        make = ray.remote(PromptOwner).options(num_cpus=0, scheduling_strategy=here)
        try:
            self._actor = make.remote(source, whole_groups)
        except TypeError as error:
            raise TypeError(
                f"the PromptSource cannot be sent to its actor ({error}): pass a sequence or a dataset as its data, "
                "not an iterator"
            ) from error
        self.connection = Connection(self._actor, source.repeats, whole_groups)

    def arrived(self, life: int, keys: Iterable[Key]) -> None:
        """Members have arrived at the driver."""
        with self._lock:
            self._arrived[life].update(keys)

    def reached(self, keys: Sequence[Key]) -> None:
        """Members have reached the reader, or were dropped for good."""
        with self._lock:
            self._leave(keys)
            if keys:
                self._actor.reached.remote(list(keys))

    def come_back(self, keys: Sequence[Key]) -> None:
        """Members that had arrived are lost; they are handed out again."""
        with self._lock:
            self._leave(keys)
            if keys:
                self._actor.come_back.remote(list(keys))

    def _leave(self, keys: Sequence[Key]) -> None:
        for arrived in self._arrived.values():
            arrived.difference_update(keys)

    def lost(self, life: int) -> None:
        """A process is over; what it held and has not arrived is handed out again."""
        with self._lock:
            self._actor.lost.remote(life, list(self._arrived.pop(life, ())))

    def has_more(self) -> bool:
        """Whether there is a member to hand out now."""
        return bool(ray.get(self._actor.has_more.remote()))

    def failed_groups(self) -> list[int]:
        """The groups that were given up since the last call."""
        failed: list[int] = ray.get(self._actor.take_failed.remote())
        return failed

    def reseed(self, seed: int) -> bool:
        """See :meth:`~torchrl_llm.prompt_line.Prompts.reseed`."""
        return bool(ray.get(self._actor.reseed.remote(seed)))

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`~torchrl_llm.prompts.PromptSource.state_dict`."""
        if self._last is None:
            state: dict[str, Any] = ray.get(self._actor.state_dict.remote())
            return state
        if isinstance(self._last, Exception):
            raise self._last
        return self._last

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`~torchrl_llm.prompts.PromptSource.load_state_dict`."""
        ray.get(self._actor.load_state_dict.remote(state))

    def close(self) -> None:
        """Ends the actor; its last state is kept."""
        if self._last is None:
            try:
                self._last = self.state_dict()
            except Exception as error:
                self._last = error  # for whoever asks for the state
            ray.kill(self._actor)


def detach(env: Any) -> tuple[Any, PromptSource | None]:
    """The ``env`` argument without the source that it is bound to, ready to travel; and that source.

    Raises:
        ValueError: if there are several sources.
    """
    items = env if isinstance(env, (list, tuple)) else [env]
    sources: dict[int, Any] = {id(item.source): item.source for item in items if isinstance(item, BoundEnv)}
    if len(sources) > 1:
        raise ValueError(f"env has {len(sources)} PromptSources: on Ray all environments share one")
    if not sources:
        return env, None
    placeholder: Any = _Unconnected()
    bare = [_bound_to(placeholder, item) for item in items]
    return bare if isinstance(env, (list, tuple)) else bare[0], next(iter(sources.values()))
