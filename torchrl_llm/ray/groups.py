"""Prompts and groups at the driver: what becomes of the members whose trajectories have arrived.

A member is done with when its turn has reached the reader, not when a worker has sent it. Where groups are spread over
workers they are put together here, and are complete, filtered, or given up here.

Belongs to the thread that drives the collection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_llm.batches import Batcher, ended_trajectories
from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.prompt_owner import Key
from torchrl_llm.ray.prompts import ClusterPrompts
from torchrl_llm.units import UnitBatcher


class Groups:
    """The driver's part in the life of prompts.

    Args:
        prompts: the shared source.
        size: members of a group, if batches are made of groups.
        spread: whether groups are spread over workers.

    Attributes:
        size: members of a group.
        spread: whether groups are put together here.
    """

    def __init__(self, prompts: ClusterPrompts, size: int | None, spread: bool) -> None:
        self.size = size
        self._prompts = prompts
        self.spread = spread
        self._failed: set[int] = set()
        self._seen = 0

    def delivered(self, turns: Sequence[Any]) -> None:
        """Turns have reached the reader."""
        self._prompts.reached(_members(turns))

    def come_back(self, members: Sequence[Key]) -> None:
        """Members were lost at the driver, and are handed out again."""
        self._prompts.come_back(members)

    def has_failed(self, group_id: int) -> bool:
        """Whether a group was given up, so that what still arrives of it is not wanted."""
        return group_id in self._failed

    def settle(self, batcher: Batcher, books: ClusterBooks) -> None:
        """Books the groups that the filter did not want."""
        if not isinstance(batcher, UnitBatcher):
            return
        for turns in batcher.take_unwanted():
            books.drop(len(turns), ended_trajectories(turns), "filtered")
            books.group("filtered")
            self._prompts.reached(_members(turns))

    def end_failed(self, batcher: Batcher, books: ClusterBooks, last: bool) -> None:
        """Gives up the groups of which a worker has given up a member.

        Args:
            batcher: what they are taken from.
            books: the cluster's books.
            last: whether to ask for them although no report says that anything was given up.
        """
        if not self.spread or (not last and books.given_up == self._seen):
            return
        self._seen = books.given_up
        for group_id in self._prompts.failed_groups():
            self._failed.add(group_id)
            books.group("failed")
            if isinstance(batcher, UnitBatcher) and batcher.is_open(group_id):
                turns = batcher.close(group_id)
                books.drop(len(turns), ended_trajectories(turns), "group_failed")


def _members(turns: Sequence[Any]) -> list[Key]:
    """The members whose trajectories end in ``turns``."""
    return [(turn.trajectory.group_id, turn.trajectory.group_index) for turn in turns if turn.done]
