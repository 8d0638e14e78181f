"""How many more turns may begin: the pure arithmetic of ``total_steps``.

Invariant: with whole turns as the unit, finished plus begun turns never pass ``total_steps``, so that no engine works
on what nobody will read. With whole trajectories as the unit a trajectory is never cut, and the last one may pass it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """The collector's ``total_steps``.

    Args:
        total_steps: turns to deliver in the collector's life; -1 for no end.
        whole_trajectories: whether trajectories are delivered whole.

    Examples:
        >>> budget = Budget(total_steps=4, whole_trajectories=False)
        >>> budget.may_begin(kept=2, begun=1, new=True), budget.may_begin(kept=3, begun=1, new=True)
        (True, False)
    """

    total_steps: int
    whole_trajectories: bool

    def may_begin(self, kept: int, begun: int, new: bool) -> bool:
        """Whether another turn may begin.

        Args:
            kept: turns finished and not dropped, with those of unfinished trajectories.
            begun: turns in flight.
            new: whether it would be the first of its trajectory.
        """
        if self.total_steps < 0 or (self.whole_trajectories and not new):
            return True
        return kept + begun < self.total_steps

    def left(self, delivered: int) -> int | None:
        """Turns that may still be delivered; ``None`` for no end."""
        return None if self.total_steps < 0 else max(0, self.total_steps - delivered)
