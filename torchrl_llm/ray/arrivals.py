"""What workers have sent: it is counted, its prompts are taken note of, and it is put in line for the reader.

Guarded by the fleet's lock.
"""

from __future__ import annotations

from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.member import Arrival, Member
from torchrl_llm.ray.prompts import ClusterPrompts
from torchrl_llm.ray.schedule import Schedule


class Arrivals:
    """Takes what workers send.

    Args:
        books: the cluster's books.
        schedule: says what is next.
        prompts: the shared prompt source, if there is one.
    """

    def __init__(self, books: ClusterBooks, schedule: Schedule[Arrival], prompts: ClusterPrompts | None) -> None:
        self._books = books
        self._schedule = schedule
        self._prompts = prompts

    def arrive(self, member: Member, arrival: Arrival) -> None:
        """A worker's batch has come."""
        heads = arrival.header.heads
        self._books.arrive(member.life, len(heads), sum(head.done for head in heads))
        if self._prompts is not None:
            self._prompts.arrived(member.life, [head.member for head in heads if head.done])
        self._schedule.arrive(member.worker, arrival)

    def leave(self, member: Member) -> None:
        """A worker will send no more."""
        self._schedule.leave(member.worker)

    def give_back(self, member: Member) -> None:
        """A process is over: the prompts that it held and whose turns have not come are handed out again."""
        if self._prompts is not None:
            self._prompts.lost(member.life)

    def more_prompts(self) -> bool:
        """Whether the shared source has prompts that nobody holds."""
        return self._prompts is not None and self._prompts.has_more()
