"""Failures in a row: how many different prompts it takes to explain them.

A prompt that always fails comes again until it is given up, and must not be taken for a broken environment or policy.
So failures are not counted one by one: one that a prompt explains which failed just before adds nothing.

A pure state machine, used by the thread that drives the rollout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchrl_llm.seeds import OF_GROUP


class FailuresInRow:
    """The failures of one environment or policy since its last success.

    Invariant: the sets of prompts that are kept are disjoint; each explains one or more of the failures.

    Examples:
        >>> row = FailuresInRow()
        >>> a, b, c = (OF_GROUP, 0, 0), (OF_GROUP, 1, 0), (OF_GROUP, 1, 1)
        >>> row.add([a, b])  # a call of two prompts: either may be the reason
        1
        >>> row.add([a]), row.add([a]), row.add([b]), row.add([c])
        (1, 1, 2, 2)
        >>> row.add([])  # no prompt is known that it could be due to
        3
    """

    def __init__(self) -> None:
        self._causes: list[frozenset[Any]] = []

    def add(self, identities: Iterable[tuple[int, ...]]) -> int:
        """Counts a failure.

        Args:
            identities: of the trajectories that it may be due to, see :class:`~torchrl_llm.batches.Trajectory`.

        Returns:
            The number of different causes in a row, this one included.
        """
        suspects: frozenset[Any] = frozenset(_prompt(identity) for identity in identities) or frozenset({object()})
        for index, cause in enumerate(self._causes):
            if cause & suspects:
                self._causes[index] = cause & suspects
                break
        else:
            self._causes.append(suspects)
        return len(self._causes)

    def clear(self) -> None:
        """A success: the row is over."""
        self._causes.clear()


def _prompt(identity: tuple[int, ...]) -> tuple[int, ...]:
    """A prompt of a source is the same for all members of its group; without a source each trajectory has its own."""
    return identity[:2] if identity[:1] == (OF_GROUP,) else identity
