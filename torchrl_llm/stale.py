"""Work that has become too old for ``max_policy_lag``: given up while it is made, and dropped before it is delivered.

After an update all that is on its way is looked at: a trajectory (with turns as the unit: a turn) that began with a too
old version is abandoned at once, with the reason ``"stale"``, and what is finished and waits for delivery is taken out
of the batcher. New launches take their place. :meth:`Stale.fresh` is the last look, at the moment of delivery.

Owned by the rollout, and used only by the thread that drives it.
"""

from __future__ import annotations

from collections.abc import Callable

from torchrl_llm.batches import Batcher, Turn, ended_trajectories
from torchrl_llm.envs import Row, Slot
from torchrl_llm.lag import Lag
from torchrl_llm.ledger import Ledger

REASON = "stale"


class Stale:
    """Finds and drops what is too old.

    Args:
        lag: what is too old; ``None`` if nothing ever is.
        slots: where trajectories are made.
        batcher: where finished turns wait.
        ledger: the books.
        abandon: ends a row's trajectory.
    """

    def __init__(
        self,
        lag: Lag | None,
        slots: list[Slot],
        batcher: Batcher,
        ledger: Ledger,
        abandon: Callable[[Slot, Row, str], None],
    ) -> None:
        self._lag = lag
        self._slots = slots
        self._batcher = batcher
        self._ledger = ledger
        self._abandon = abandon
        self._seen: int | None = None

    def drop(self) -> None:
        """Drops what has become too old since the last call."""
        if self._lag is None or self._lag.current() == self._seen:
            return
        self._seen = self._lag.current()
        for slot in self._slots:
            for row in slot.rows:
                begun_with = self._begun_with(row)
                if begun_with is not None and self._lag.too_old(begun_with):
                    self._abandon(slot, row, REASON)
        old = self._batcher.expel(self._lag.too_old)
        if old:
            self._ledger.drop(len(old), ended_trajectories(old), REASON)

    def finished(self, turn: Turn) -> None:
        """Looks at a turn that has just been given to the batcher: its answer may have come after an update."""
        if self._lag is not None and self._lag.too_old(turn.version):
            self._seen = None

    def fresh(self, turns: list[Turn]) -> bool:
        """Whether a batch may still be delivered; if not, it is put back for :meth:`drop`."""
        lag = self._lag
        if lag is None or not any(lag.too_old(_age(turn, lag.whole_trajectories)) for turn in turns):
            return True
        self._batcher.put_back(turns)
        self._seen = None
        return False

    def _begun_with(self, row: Row) -> int | None:
        """The version with which a row's unit began; ``None`` if it has not, or not before the newest version."""
        if row.trajectory is None:
            return None
        assert self._lag is not None
        if self._lag.whole_trajectories and row.trajectory.version is not None:
            return row.trajectory.version
        if row.ticket is not None:
            assert row.ticket.runner is not None
            return row.ticket.runner.began(row.ticket)
        return row.answer.policy_version if row.answer is not None and row.response is not None else None


def _age(turn: Turn, whole_trajectories: bool) -> int:
    begun_with = turn.trajectory.version
    return begun_with if whole_trajectories and begun_with is not None else turn.version
