"""``PromptSource``: one stream of prompts for all slots; each prompt is handed out as a group of ``repeats`` members.

:class:`PromptLine` is the state machine: which member comes next, which are handed out and not yet done with. It holds
no lock and does no I/O but reading the data. :class:`PromptSource` is the same behind a lock, for any thread; where
several processes share one stream, one of them owns the ``PromptSource`` and the others hold a proxy with the methods
of :class:`Prompts`.

Invariants: members come in the order of their groups, and within a group by their index, but what was returned comes
first; a member is in exactly one of three places: not handed out yet, held (handed out), or done; a state holds every
member that is not done, so that nothing is lost by saving and loading.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torchrl.envs import EnvBase

from torchrl_llm.data import make_reader, split_datum


@dataclass(frozen=True)
class Member:
    """One of the ``repeats`` trajectories that a prompt is handed out for.

    Args:
        group_id: unique per source, from 0.
        index: number within the group, from 0.
        epoch: pass over the data, from 0.
        repeats: members of the group.
        prompt: a string, a list of messages, a ``History``, or a tensor of token ids.
        name: the field of the datum that it was in; ``"query"`` if the datum is the prompt.
        fields: the datum's other fields.
    """

    group_id: int
    index: int
    epoch: int
    repeats: int
    prompt: Any = field(repr=False)
    name: str = field(default="query", repr=False)
    fields: dict[str, Any] = field(default_factory=dict, repr=False)


class Prompts(Protocol):
    """What a collector needs of a source; a :class:`PromptSource`, or a proxy of one in another process."""

    repeats: int

    def take(self, count: int) -> list[Member]:
        """Hands out the next members; fewer if there are no more for now."""

    def delivered(self, group_id: int, index: int) -> None:
        """A member is done with: delivered, or dropped for good."""

    def returned(self, group_id: int, index: int) -> None:
        """A member comes back; it is handed out again before any other."""

    def withdraw(self, group_id: int) -> None:
        """All members of a group are done with, also those not handed out."""

    def peek(self) -> Member | None:
        """The next member, which is not handed out by that."""

    def reseed(self, seed: int) -> bool:
        """Sets the seed of the order, if the user gave none and nothing was handed out."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state."""


@dataclass
class _Group:
    """A prompt that is not done with."""

    id: int
    epoch: int
    item: int | None
    datum: Any
    undone: set[int]
    next: int = 0


class PromptLine:
    """The state of a source: a line of prompts that are handed out member by member.

    Args:
        data: see :class:`PromptSource`.
        repeats: see :class:`PromptSource`.
        shuffle: see :class:`PromptSource`.
        seed: of the order.
        epochs: see :class:`PromptSource`.
        key: see :class:`PromptSource`.
    """

    def __init__(self, data: Any, repeats: int, shuffle: bool, seed: int, epochs: int | None, key: str | None) -> None:
        self.repeats = repeats
        self.seed = seed
        self._data = data
        self._shuffle = shuffle
        self._epochs = epochs
        self._key = key
        self._reader = make_reader(data, shuffle, seed)
        self._epoch = 0
        self._position = 0
        self._next_group = 0
        self._ahead: _Group | None = None
        self._groups: dict[int, _Group] = {}
        self._current: _Group | None = None
        self._returned: list[tuple[int, int]] = []
        if self._reader.one_shot and epochs is not None and epochs > 1:
            raise ValueError(f"epochs={epochs} is not allowed with data that can be read only once: pass a sequence")
        if self._reader.indexed:
            split_datum(self._reader.at(0), key)

    @property
    def begun(self) -> bool:
        """Whether any member was handed out."""
        return self._next_group > 0

    def take(self, count: int) -> list[Member]:
        """See :meth:`Prompts.take`."""
        members = []
        while len(members) < count:
            group, index = self._next()
            if group is None:
                break
            members.append(self._member(group, index))
        return members

    def _next(self) -> tuple[_Group | None, int]:
        while self._returned:
            group_id, index = heapq.heappop(self._returned)
            group = self._groups.get(group_id)
            if group is not None:
                return group, index
        if self._current is None:
            group = self._read_ahead()
            self._ahead = None
            if group is None:
                return None, 0
            group.id = self._next_group
            self._next_group += 1
            self._position += 1
            self._groups[group.id] = self._current = group
        group, index = self._current, self._current.next
        group.next += 1
        if group.next == self.repeats:
            self._current = None
        return group, index

    def _read_ahead(self) -> _Group | None:
        """The next prompt of the data, without a group id yet; ``None`` at the end of the last epoch."""
        while self._ahead is None:
            if self._epochs is not None and self._epoch >= self._epochs:
                return None
            try:
                item, datum = self._reader.read(self._epoch, self._position)
            except StopIteration:
                if self._position == 0 or (self._reader.one_shot):
                    return None
                self._epoch += 1
                self._position = 0
                continue
            self._ahead = _Group(-1, self._epoch, item, datum, set(range(self.repeats)))
        return self._ahead

    def _member(self, group: _Group, index: int) -> Member:
        prompt, name, fields = split_datum(group.datum, self._key)
        return Member(group.id, index, group.epoch, self.repeats, prompt, name, fields)

    def peek(self) -> Member | None:
        """See :meth:`Prompts.peek`."""
        for group_id, index in sorted(self._returned):
            if group_id in self._groups:
                return self._member(self._groups[group_id], index)
        group = self._current or self._read_ahead()
        return None if group is None else self._member(group, group.next)

    def delivered(self, group_id: int, index: int) -> None:
        """See :meth:`Prompts.delivered`."""
        group = self._groups.get(group_id)
        if group is not None:
            group.undone.discard(index)
            if not group.undone:
                del self._groups[group_id]

    def returned(self, group_id: int, index: int) -> None:
        """See :meth:`Prompts.returned`."""
        group = self._groups.get(group_id)
        if group is not None and index in group.undone:
            heapq.heappush(self._returned, (group_id, index))

    def withdraw(self, group_id: int) -> None:
        """See :meth:`Prompts.withdraw`."""
        self._groups.pop(group_id, None)
        if self._current is not None and self._current.id == group_id:
            self._current = None

    def reseed(self, seed: int) -> None:
        """Another order, from the beginning; only before anything was handed out."""
        assert not self.begun
        self.seed = seed
        self._ahead = None if self._reader.indexed else self._ahead
        if self._reader.indexed:
            self._reader = make_reader(self._data, self._shuffle, seed)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`PromptSource.state_dict`."""
        held = []
        for group in sorted(self._groups.values(), key=lambda group: group.id):
            entry = {"group_id": group.id, "epoch": group.epoch, "undone": sorted(group.undone), "item": group.item}
            if group.item is None:
                entry["datum"] = plain(group.datum)
            held.append(entry)
        return {
            "repeats": self.repeats,
            "shuffle": self._shuffle,
            "seed": self.seed,
            "epoch": self._epoch,
            "position": self._position,
            "next_group": self._next_group,
            "held": held,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`PromptSource.load_state_dict`."""
        for name, own in (("repeats", self.repeats), ("shuffle", self._shuffle)):
            if state[name] != own:
                raise ValueError(f"the state has {name}={state[name]!r} and the source {name}={own!r}: they must agree")
        if self.begun:
            raise RuntimeError("the source has handed out prompts already: load a state into a new one")
        self.reseed(state["seed"])
        self._ahead = None
        self._epoch, self._position = state["epoch"], state["position"]
        self._next_group = state["next_group"]
        self._current, self._groups, self._returned = None, {}, []
        for entry in state["held"]:
            item, undone = entry["item"], set(entry["undone"])
            datum = entry["datum"] if item is None else self._reader.at(item)
            self._groups[entry["group_id"]] = _Group(
                entry["group_id"], entry["epoch"], item, datum, undone, next=self.repeats
            )
            self._returned += [(entry["group_id"], index) for index in sorted(undone)]
        heapq.heapify(self._returned)


class PromptSource:
    """One stream of prompts, shared by all environments of a collector.

    Each prompt is handed out ``repeats`` times, to whichever slots are free, with a group id of its own: turns carry
    ``("collector", "group_id")``, ``"group_index"`` (0 to ``repeats - 1``) and ``"epoch"``. Bind environments to it by
    :meth:`env`.

    Args:
        data: a sequence, an iterable, a torch ``Dataset`` or ``DataLoader`` (its batches are taken apart), or a Hugging
            Face dataset, of prompts. A prompt is a string, a chat (a list of mappings with ``"role"`` and
            ``"content"``), or a mapping with one of these in a field; the other fields go to the environment and into
            the turns as they are (numbers and booleans as tensors, as TensorDict has them).

    Keyword Args:
        repeats: members of a group. Defaults to 1.
        shuffle: whether to hand the data out in an order shuffled anew for each epoch; for data with indices only.
        seed: of that order. By default the collector's ``seed``, or one drawn at random.
        epochs: passes over the data; ``None`` (default) for ever. An iterator is read once.
        key: the field of a mapping that holds the prompt. Defaults to the first of ``"query"``, ``"prompt"``,
            ``"messages"``, ``"question"`` and ``"text"`` that it has.

    Raises:
        TypeError: for data that cannot be read one after another, or are no prompts.
        KeyError: if a mapping has no prompt field.
        ValueError: for empty data, ``shuffle=True`` without indices, or several epochs of an iterator.

    Examples:
        >>> source = PromptSource([{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}], repeats=2)
        >>> [(member.group_id, member.index, member.prompt) for member in source.take(3)]
        [(0, 0, '1+1?'), (0, 1, '1+1?'), (1, 0, '2+2?')]
        >>> source.returned(0, 1)
        >>> source.take(1)[0]
        Member(group_id=0, index=1, epoch=0, repeats=2)
    """

    def __init__(
        self,
        data: Any,
        *,
        repeats: int = 1,
        shuffle: bool = False,
        seed: int | None = None,
        epochs: int | None = None,
        key: str | None = None,
    ) -> None:
        for name, value in (("repeats", repeats), ("epochs", epochs)):
            if value is None and name == "epochs":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r} is not allowed: pass an int of at least 1")
            if value < 1:
                raise ValueError(f"{name}={value!r} is not allowed: pass an int of at least 1")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise TypeError(f"seed={seed!r} is not allowed: pass an int, or None")
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle={shuffle!r} is not allowed: pass True or False")
        if key is not None and not isinstance(key, str):
            raise TypeError(f"key={key!r} is not allowed: pass the name of a field, or None")
        self.repeats = repeats
        self._seeded = seed is not None
        drawn = seed if seed is not None else int(torch.empty((), dtype=torch.int64).random_()) % 2**31
        self._line = PromptLine(data, repeats, shuffle, drawn, epochs, key)
        self._lock = threading.Lock()

    def env(self, make_env: Callable[[], EnvBase]) -> Callable[[], EnvBase]:
        """An environment constructor whose environments take their prompts from this source.

        Args:
            make_env: builds an environment: a ``ChatEnv``, ``LLMEnv``, one of torchrl's data set environments (which
                then does not load its own data set), or any environment that reads its prompt from the TensorDict
                that it is reset with. A loader that the environment has is not used any more.

        Raises:
            TypeError: if ``make_env`` is no constructor.

        Examples:
            >>> from torchrl.envs.llm import ChatEnv
            >>> source = PromptSource([[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]])
            >>> env = source.env(lambda: ChatEnv(batch_size=(1,)))()
            >>> list(env.reset()["history"].prompt[0].role)
            ['system', 'user']
        """
        from torchrl_llm.binding import BoundEnv

        return BoundEnv(self, make_env)

    def take(self, count: int = 1) -> list[Member]:
        """Hands out the next ``count`` members; fewer, or none, if there are no more (for now: some may come back)."""
        with self._lock:
            return self._line.take(count)

    def delivered(self, group_id: int, index: int) -> None:
        """A member is done with: its trajectory was delivered, or dropped for good."""
        with self._lock:
            self._line.delivered(group_id, index)

    def returned(self, group_id: int, index: int) -> None:
        """A member comes back without having been delivered; it is handed out again before any other."""
        with self._lock:
            self._line.returned(group_id, index)

    def withdraw(self, group_id: int) -> None:
        """All members of a group are done with, also those that were not handed out yet."""
        with self._lock:
            self._line.withdraw(group_id)

    def peek(self) -> Member | None:
        """The next member, which stays the next one; ``None`` at the end of the data."""
        with self._lock:
            return self._line.peek()

    def reseed(self, seed: int) -> bool:
        """Sets the seed of the order, unless the user gave one or prompts were handed out; returns whether it did."""
        with self._lock:
            if self._seeded or self._line.begun:
                return False
            self._line.reseed(seed)
            return True

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data: order and position, group ids, and every prompt that is not done with.

        Prompts of data with indices are kept by their index, others with their content. ``torch.save`` and
        ``torch.load(weights_only=True)`` take it.

        Raises:
            TypeError: if a prompt that must be kept by its content is not plain data.
        """
        with self._lock:
            return self._line.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state: what was handed out and not delivered comes first, under its old group id and index.

        The source must have the same data in the same order; an iterable is read and skipped up to the position.

        Raises:
            ValueError: if the state is of a source with other ``repeats`` or ``shuffle``.
            RuntimeError: if prompts were handed out already.
        """
        with self._lock:
            self._line.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"PromptSource(repeats={self.repeats})"


def plain(value: Any) -> Any:
    """``value``, if it is made of what ``torch.load(weights_only=True)`` takes; mappings become dicts.

    Raises:
        TypeError: if it is not.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.Tensor)):
        return value
    if hasattr(value, "items"):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value) if type(value) in (list, tuple) else [plain(i) for i in value]
    raise TypeError(
        f"a prompt with a value of type {type(value).__name__} cannot be saved: a state takes strings, numbers, tensors, "
        "lists and dicts; data with indices are saved by their index"
    )
