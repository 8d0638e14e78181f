"""Which of the user's environments and policies each worker gets. Pure.

Invariants: a list is dealt out like cards, item i to worker ``i % workers``, so that shares differ by at most one; a
list that is shorter than there are workers goes round, so that nobody is left without. What is no list is given to each
worker. A worker that is added later gets the share of the worker that has its number modulo their first count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Share:
    """A worker's part of an argument.

    Attributes:
        value: what its collector is given: a list, or what is given to each.
        indices: the places in the user's list of what is in ``value``; ``None`` if that is no list.
    """

    value: Any
    indices: tuple[int, ...] | None

    def index(self, local: int) -> int:
        """The place in the user's list of what the worker counts as ``local``."""
        return local if self.indices is None else self.indices[local]


def default_workers(env: Any, policy: Any) -> int:
    """The length of the longer of the two lists, else 1.

    Examples:
        >>> default_workers(["a", "b"], ["c"]), default_workers("a", "b")
        (2, 1)
    """
    return max([len(argument) for argument in (env, policy) if isinstance(argument, (list, tuple))], default=1)


def share_of(argument: Any, worker: int, workers: int) -> Share:
    """What ``worker`` of ``workers`` gets of an argument.

    Examples:
        >>> [share_of(list("abcde"), worker, 2).value for worker in range(3)]
        [['a', 'c', 'e'], ['b', 'd'], ['a', 'c', 'e']]
        >>> [share_of(["a", "b"], worker, 3).value for worker in range(3)]
        [['a'], ['b'], ['a']]
        >>> share_of("a", 1, 3)
        Share(value='a', indices=None)
    """
    if not isinstance(argument, (list, tuple)):
        return Share(argument, None)
    worker %= workers
    indices = tuple(range(worker, len(argument), workers)) or (worker % len(argument),)
    return Share([argument[index] for index in indices], indices)
