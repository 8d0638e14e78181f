"""Launches: which trajectory may begin, and with what.

Invariant: a trajectory is launched at most once, with an id of its own, and is in the books from that moment on.

Owned by the rollout, and used only by the thread that drives it.
"""

from __future__ import annotations

from torchrl_llm.batches import Trajectory
from torchrl_llm.budget import Budget
from torchrl_llm.envs import Slot
from torchrl_llm.errors import CollectorError
from torchrl_llm.lag import Lag
from torchrl_llm.ledger import Ledger
from torchrl_llm.policies.pool import PolicyPool
from torchrl_llm.routing import Route


class Launches:
    """Decides who may begin, and begins it.

    Args:
        pool: the policies, whose loads are kept here.
        route: which policy gets a new trajectory.
        budget: how many turns in all.
        ledger: the books.
        lag: how far what is delivered may lie behind the weights; ``None`` for no limit.
    """

    def __init__(self, pool: PolicyPool, route: Route, budget: Budget, ledger: Ledger, lag: Lag | None = None) -> None:
        self._lag = lag
        self._expected = 0
        self._pool = pool
        self._route = route
        self._budget = budget
        self._ledger = ledger
        self._next_id = 0

    def left(self) -> int | None:
        """Turns that may still be delivered; ``None`` for no end."""
        return self._budget.left(self._ledger.turns_delivered)

    def may_begin(self, begun: int, new: bool, unparked: int = 0) -> bool:
        """Whether another turn may begin.

        Args:
            begun: turns in flight.
            new: whether it would be the first of its trajectory.
            unparked: how many others have just got leave, and have not begun yet.
        """
        within = self._budget.may_begin(self._ledger.turns_kept, begun + unparked, new)
        return within and self._in_time(begun, new, unparked)

    def _in_time(self, begun: int, new: bool, unparked: int) -> bool:
        if self._lag is None:
            return True
        if self._lag.whole_trajectories:
            return self._lag.may_begin(self._ledger.in_flight + self._expected + unparked, new)
        return self._lag.may_begin(self._ledger.turns_pending + begun + unparked, new)

    def refused(self, begun: int, new: bool) -> None:
        """Notes that a slot was refused, and counts it if only for what would come too late."""
        if not self._in_time(begun, new, 0):
            self._ledger.hold_for_lag()

    def expect(self, trajectories: int) -> None:
        """Notes how many trajectories a reset will begin (positive), or has begun or not (negative)."""
        self._expected += trajectories

    def begin(self, slot: Slot) -> Trajectory:
        """Launches a trajectory in ``slot``.

        Raises:
            CollectorError: if the route fails, or gives no policy.
        """
        policy_id = slot.policy_id if slot.policy_id is not None else self._pick_policy(slot)
        trajectory = Trajectory(self._next_id, slot.env_id, policy_id)
        self._next_id += 1
        self._ledger.launch(trajectory.id)
        self._pool.loads[policy_id] += 1
        return trajectory

    def _pick_policy(self, slot: Slot) -> int:
        loads = self._pool.loads
        try:
            policy_id = self._route(slot.env_id, tuple(loads))
        except Exception as error:
            raise CollectorError(f"route failed: {type(error).__name__}: {error}", slot=slot.env_id) from error
        if not isinstance(policy_id, int) or not 0 <= policy_id < len(loads):
            raise CollectorError(
                f"route returned {policy_id!r}; an int from 0 to {len(loads) - 1} is needed", slot=slot.env_id
            )
        return policy_id
