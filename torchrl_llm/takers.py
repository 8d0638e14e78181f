"""What one collector has taken of a prompt source, and is not done with.

Several collectors may take from one source, at once or one after the other. So each remembers its own: what it holds
when it ends goes back for the next, and one of groups takes a group as a whole, so that no other has a part of it.

Invariants: a member is held from the moment it is taken until it is delivered, dropped, withdrawn or back at the
source; what waits is held. Belongs to the thread that drives the rollout.
"""

from __future__ import annotations

import heapq

from torchrl_llm.prompt_line import Member, Prompts

Key = tuple[int, int]


class Taker:
    """A collector's way to a prompt source.

    Args:
        source: the source, which others may take from as well.
        whole_groups: whether to take all members of a group at once; those that are not asked for yet, and those that
            come back, wait here.

    Examples:
        >>> from torchrl_llm import PromptSource
        >>> source = PromptSource(["a", "b"], repeats=2, epochs=1)
        >>> one, other = Taker(source, whole_groups=True), Taker(source, whole_groups=True)
        >>> [(member.prompt, member.index) for taker in (one, other, one) for member in taker.take(1)]
        [('a', 0), ('b', 0), ('a', 1)]
        >>> one.delivered(0, 0)
        >>> one.give_back()
        >>> [(member.prompt, member.index) for member in other.take(3)]
        [('b', 1), ('a', 1)]
    """

    def __init__(self, source: Prompts, whole_groups: bool) -> None:
        self.source = source
        self._whole_groups = whole_groups
        self._held: dict[Key, Member] = {}
        self._waiting: list[Key] = []

    @property
    def owed(self) -> int:
        """Members that wait here: of groups that are begun, and are to be completed."""
        return len(self._waiting)

    @property
    def pending(self) -> int:
        """Members that come before any new prompt."""
        return self.owed + self.source.pending

    def take(self, count: int) -> list[Member]:
        """Takes the next members; fewer if there are no more for now."""
        if not self._whole_groups:
            return self._hold(self.source.take(count))
        taken: list[Member] = []
        while len(taken) < count:
            if not self._waiting:
                self._waiting = sorted((m.group_id, m.index) for m in self._hold(self.source.take_group()))
                if not self._waiting:
                    break
            taken.append(self._held[heapq.heappop(self._waiting)])
        return taken

    def _hold(self, members: list[Member]) -> list[Member]:
        self._held.update(((member.group_id, member.index), member) for member in members)
        return members

    def delivered(self, group_id: int, index: int) -> None:
        """A member is done with: its trajectory was delivered."""
        self._held.pop((group_id, index), None)
        self.source.delivered(group_id, index)

    def dropped(self, group_id: int, index: int) -> None:
        """A member is done with without having been delivered."""
        self._held.pop((group_id, index), None)
        self.source.dropped(group_id, index)

    def returned(self, group_id: int, index: int) -> None:
        """A member is to be handed out again: by this collector, if it takes whole groups."""
        key = (group_id, index)
        if not self._whole_groups:
            self._held.pop(key, None)
            self.source.returned(group_id, index)
        elif key in self._held and key not in self._waiting:
            heapq.heappush(self._waiting, key)

    def withdraw(self, group_id: int) -> None:
        """All members of a group are done with."""
        self._held = {key: member for key, member in self._held.items() if key[0] != group_id}
        self._waiting = sorted(key for key in self._waiting if key[0] != group_id)
        self.source.withdraw(group_id)

    def give_back(self) -> None:
        """The collector has ended: what it holds is handed out again, to whoever comes next."""
        keys = sorted(self._held)
        self._held.clear()
        self._waiting.clear()
        self.source.give_back(keys)
