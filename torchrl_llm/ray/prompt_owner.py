"""Which process of a worker holds which prompt: a prompt source that many workers take from.

Pure but for the source, which reads data. Owned by the actor of :mod:`torchrl_llm.ray.prompts`; calls come one at a
time.

Invariants: a member that is not done with is with one *life* (a process of a worker, from a start to its end), or at
the driver, or waits to be handed out; it is done with when the driver says that it reached the reader, or when a worker
dropped it for good. What a life held when it ended, and has not reached the driver, is handed out again before anything
else; a life that is over gets nothing more, and has no say any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchrl_llm.prompt_line import Member
from torchrl_llm.prompts import PromptSource

Key = tuple[int, int]


class PromptOwner:
    """A source, and who holds its members.

    Args:
        source: the source.
        whole_groups: whether all members of a group go to the life that asks first.

    Examples:
        >>> owner = PromptOwner(PromptSource(["a", "b"], repeats=2, epochs=1), whole_groups=True)
        >>> [(member.group_id, member.index) for member in owner.take(life=0, count=1)]
        [(0, 0), (0, 1)]
        >>> owner.lost(life=0, arrived=[(0, 0)])
        >>> [(member.group_id, member.index) for member in owner.take(life=1, count=1)]
        [(0, 1)]
    """

    def __init__(self, source: PromptSource, whole_groups: bool) -> None:
        self._source = source
        self._whole_groups = whole_groups
        self._holders: dict[Key, int] = {}
        self._over: set[int] = set()
        self._failed: list[int] = []

    def take(self, life: int, count: int) -> list[Member]:
        """Hands the next ``count`` members to ``life``, or a whole group; fewer, or none, if there are no more now."""
        if life in self._over:
            return []  # It asked before it ended.
        members = self._source.take_group() if self._whole_groups else self._source.take(count)
        self._holders.update(((member.group_id, member.index), life) for member in members)
        return members

    def dropped(self, life: int, group_id: int, index: int) -> None:
        """A worker gives a member up for good. Where groups are spread, its group is given up with it."""
        if self._holders.get((group_id, index)) != life:
            return  # It was taken for lost, and somebody else has its prompts.
        if self._whole_groups:
            del self._holders[group_id, index]
            self._source.delivered(group_id, index)
        else:
            self._withdraw(group_id)
            self._failed.append(group_id)

    def withdraw(self, life: int, group_id: int) -> None:
        """A worker gives a whole group up for good."""
        if life not in self._over:
            self._withdraw(group_id)

    def _withdraw(self, group_id: int) -> None:
        self._source.withdraw(group_id)
        self._holders = {key: life for key, life in self._holders.items() if key[0] != group_id}

    def reached(self, keys: Iterable[Key]) -> None:
        """Members have reached the reader, or were dropped for good on the driver."""
        for group_id, index in keys:
            self._holders.pop((group_id, index), None)
            self._source.delivered(group_id, index)

    def lost(self, life: int, arrived: Iterable[Key]) -> None:
        """A life is over; what it held and has not arrived at the driver is handed out again."""
        self._over.add(life)
        at_driver = set(arrived)
        for key in [key for key, holder in self._holders.items() if holder == life]:
            del self._holders[key]
            if key not in at_driver:
                self._source.returned(*key)

    def come_back(self, keys: Iterable[Key]) -> None:
        """Members that had arrived at the driver were lost there; they are handed out again."""
        for key in keys:
            self._holders.pop(key, None)
            self._source.returned(*key)

    def has_more(self) -> bool:
        """Whether there is a member to hand out now."""
        return self._source.peek() is not None

    def take_failed(self) -> list[int]:
        """The groups that were given up since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def peek(self) -> Member | None:
        """See :meth:`~torchrl_llm.prompt_line.Prompts.peek`."""
        return self._source.peek()

    def reseed(self, seed: int) -> bool:
        """See :meth:`~torchrl_llm.prompt_line.Prompts.reseed`."""
        return self._source.reseed(seed)

    def state_dict(self) -> dict[str, Any]:
        """The source's state: whatever has not reached the reader is handed out again by whoever loads it."""
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`~torchrl_llm.prompts.PromptSource.load_state_dict`."""
        self._source.load_state_dict(state)
