"""The state of a prompt source: a line of prompts, each handed out as a group of ``repeats`` members.

A pure state machine, but for reading the user's data: which member comes next, which are handed out and not done with.
It holds no lock; the :class:`~torchrl_llm.prompts.PromptSource` that owns it does.

Invariants: members come in the order of their groups, and within a group by their index, but what was returned comes
first; a member is not handed out yet, or held (handed out), or done; a state holds every member that is not done, so
that nothing is lost by saving and loading.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torchrl_llm.data import make_reader, split_datum
from torchrl_llm.encoding import plain, restored


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

    @property
    def pending(self) -> int:
        """Members that come before any new prompt: of groups that were begun, for the first time or again."""

    def take(self, count: int) -> list[Member]:
        """Hands out the next members; fewer if there are no more for now."""

    def delivered(self, group_id: int, index: int) -> None:
        """A member is done with: its trajectory was delivered."""

    def dropped(self, group_id: int, index: int) -> None:
        """A member is done with without having been delivered: it was filtered out, or given up."""

    def take_group(self) -> list[Member]:
        """Hands out the next member and all others of its group that are not handed out; none if there are no more."""

    def returned(self, group_id: int, index: int) -> None:
        """A member comes back; it is handed out again before any other."""

    def give_back(self, keys: list[tuple[int, int]]) -> None:
        """Members, by group id and index, come back at once from a taker that has ended."""

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

    @property
    def pending(self) -> int:
        """See :meth:`Prompts.pending`."""
        return len(self._returned) + (0 if self._current is None else self.repeats - self._current.next)

    def take(self, count: int) -> list[Member]:
        """See :meth:`Prompts.take`."""
        members: list[Member] = []
        while len(members) < count:
            group, index = self._next()
            if group is None:
                break
            members.append(self._member(group, index))
        return members

    def take_group(self) -> list[Member]:
        """See :meth:`Prompts.take_group`."""
        members = self.take(1)
        while members and self._following() == members[0].group_id:
            members += self.take(1)
        return members

    def _following(self) -> int | None:
        """The group of the next member, if it is of one that was begun."""
        if self._returned:
            return self._returned[0][0]
        return None if self._current is None else self._current.id

    def _next(self) -> tuple[_Group | None, int]:
        if self._returned:
            group_id, index = heapq.heappop(self._returned)
            return self._groups[group_id], index
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
        if self._returned:
            group_id, index = self._returned[0]
            return self._member(self._groups[group_id], index)
        if self._current is not None:
            return self._member(self._current, self._current.next)
        group = self._read_ahead()
        return None if group is None else self._member(replace(group, id=self._next_group), 0)

    def delivered(self, group_id: int, index: int) -> None:
        """See :meth:`Prompts.delivered`."""
        group = self._groups.get(group_id)
        if group is not None:
            group.undone.discard(index)
            if (group_id, index) in self._returned:
                self._returned.remove((group_id, index))
                heapq.heapify(self._returned)
            if not group.undone:
                del self._groups[group_id]

    def returned(self, group_id: int, index: int) -> None:
        """See :meth:`Prompts.returned`."""
        group = self._groups.get(group_id)
        if group is not None and index in group.undone and (group_id, index) not in self._returned:
            heapq.heappush(self._returned, (group_id, index))

    def withdraw(self, group_id: int) -> None:
        """See :meth:`Prompts.withdraw`."""
        self._groups.pop(group_id, None)
        self._returned = [entry for entry in self._returned if entry[0] != group_id]
        heapq.heapify(self._returned)
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
                entry["datum"] = _kept(group.datum)
            held.append(entry)
        return {
            "repeats": self.repeats,
            "shuffle": self._shuffle,
            "seed": self.seed,
            "epoch": self._epoch,
            "position": self._position,
            "next_group": self._next_group,
            "length": self._reader.length,
            "order_length": self._reader.order_length(self._epoch),
            "held": held,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`PromptSource.load_state_dict`."""
        for name, own in (("repeats", self.repeats), ("shuffle", self._shuffle)):
            if state[name] != own:
                raise ValueError(f"the state has {name}={state[name]!r} and the source {name}={own!r}: they must agree")
        if self.begun:
            raise RuntimeError("the source has handed out prompts already: load a state into a new one")
        groups = self._held_groups(state)
        self.reseed(state["seed"])
        if (state["epoch"], state["position"]) != (self._epoch, self._position):
            self._ahead = None  # At the same place it stays: it was read from a stream, which does not give it again.
        self._epoch, self._position = state["epoch"], state["position"]
        if state.get("order_length") is not None:
            self._reader.begin(self._epoch, state["order_length"])
        self._next_group = state["next_group"]
        self._current, self._groups = None, groups
        self._returned = [(group.id, index) for group in groups.values() for index in group.undone]
        heapq.heapify(self._returned)

    def _held_groups(self, state: dict[str, Any]) -> dict[int, _Group]:
        """The prompts of a state that are not done with; raises ValueError if it was saved with other data."""
        length, before = self._reader.length, state.get("length")  # Older states do not have it.
        last = max((entry["item"] for entry in state["held"] if entry["item"] is not None), default=-1)
        if last >= 0 and not self._reader.indexed:
            raise ValueError("the state keeps its prompts by their index, and data has no indices: pass the same data")
        if length is not None and (before not in (None, length) or last >= length):
            raise ValueError(
                f"data has {length} items, the state was saved with {before or f'at least {last + 1}'}: a source goes "
                "on with the same data only"
            )
        groups = {}
        for entry in state["held"]:
            item = entry["item"]
            datum = restored(entry["datum"]) if item is None else self._reader.at(item)
            undone = set(entry["undone"])
            groups[entry["group_id"]] = _Group(
                entry["group_id"], entry["epoch"], item, datum, undone, next=self.repeats
            )
        return groups


def _kept(datum: Any) -> Any:
    try:
        return plain(datum)
    except TypeError as error:
        raise TypeError(
            f"a prompt, or a field beside it: {error}; data with indices are saved by their index"
        ) from None
