"""How far delivered data may lie behind the weights: the pure arithmetic of ``max_policy_lag``.

The unit is the batch's: turns, or whole trajectories, whose age is that of their first response. With ``k`` allowed and
``n`` units in a batch, something may begin while fewer than ``(k + 1) * n`` units are on their way (begun, and neither
delivered nor dropped). With one update per batch, and units delivered in the order in which they began, a unit then
sees at most ``k`` updates on its way. It never waits for an update, so that a reader who does not update goes on.

What comes too late all the same, because it was slow or the trainer fast, is dropped; see :mod:`torchrl_llm.stale`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchrl_llm.batches import Batcher


@dataclass(frozen=True)
class Lag:
    """The collector's ``max_policy_lag``.

    Args:
        allowed: versions that a delivered unit may lie behind.
        batch_size: units in a batch.
        whole_trajectories: whether the unit is a trajectory, and not a turn.
        current: the version of the weights in use.

    Examples:
        >>> lag = Lag(allowed=1, batch_size=4, whole_trajectories=False, current=lambda: 5)
        >>> lag.may_begin(on_their_way=7, new=False), lag.may_begin(on_their_way=8, new=False)
        (True, False)
        >>> lag.too_old(4), lag.too_old(3)
        (False, True)
    """

    allowed: int
    batch_size: int
    whole_trajectories: bool
    current: Callable[[], int]

    def may_begin(self, on_their_way: int, new: bool) -> bool:
        """Whether another turn may begin.

        Args:
            on_their_way: units that have begun, and are neither delivered nor dropped.
            new: whether it would be the first of its trajectory; with trajectories as the unit, later ones always may.
        """
        if self.whole_trajectories and not new:
            return True
        return on_their_way < (self.allowed + 1) * self.batch_size

    def too_old(self, begun_with: int) -> bool:
        """Whether what began with this version may not be delivered any more."""
        return self.current() - begun_with > self.allowed


def make_lag(allowed: int | None, batcher: Batcher, current: Callable[[], int]) -> Lag | None:
    """The collector's ``max_policy_lag``; ``None`` for no limit."""
    if allowed is None:
        return None
    return Lag(allowed, batcher.size, batcher.whole_trajectories, current)
