"""What becomes of a turn or a trajectory that takes too long.

A response that is being generated is cut: the environment steps with what there is of it, and the trajectory ends as
truncated. A call of an environment on a worker thread is given up: the turn is made without its outcome (reward 0), the
environment is left to the thread that is stuck in it, and its slot gets a new one from its constructor; one that was
passed as an instance is out of use. Such a thread cannot be interrupted: another takes its place.

Owned by the rollout, and used only by the thread that drives it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from torchrl_llm.bridge import KeyBridge, merge_entry, shallow_copy
from torchrl_llm.deadlines import Deadlines, Limits
from torchrl_llm.env_threads import Call
from torchrl_llm.envs import Row, Slot
from torchrl_llm.ledger import Ledger
from torchrl_llm.policies.runner import Ticket

if TYPE_CHECKING:
    from torchrl_llm.rollout import Rollout

# How often a request that is held is looked at again, at most.
HELD_POLL_SECONDS = 0.05
# The part of the limit that a call has for itself, when it has waited for a thread until it was nearly due.
OWN_SHARE = 0.1

logger = logging.getLogger("torchrl_llm")


class Timeouts:
    """Sets the deadlines of the rollout's requests and calls.

    Args:
        limits: how long what may take.
        ledger: the books.
    """

    def __init__(self, limits: Limits, ledger: Ledger) -> None:
        self.limits = limits
        self.deadlines = Deadlines()
        self._ledger = ledger

    def requested(self, row: Row) -> None:
        """A request is on its way; the turn begins."""
        if not self.limits.any or row.trajectory is None:
            return
        now = self.deadlines.now()
        if row.trajectory.turns == 0:
            row.trajectory.due = now + self.limits.trajectory
        row.due, row.held = min(now + self.limits.turn, row.trajectory.due), 0.0
        assert row.ticket is not None
        self.deadlines.set(row.ticket, row.due)

    def answered(self, ticket: Ticket) -> None:
        """A request is over."""
        self.deadlines.clear(ticket)

    def called(self, slot: Slot) -> None:
        """A call of the slot's environment is under way: a step for rows with a response, else a reset."""
        if not self.limits.any:
            return
        due = [row.due for row in slot.rows if row.response is not None]
        self.deadlines.set(slot, min(due) if due else self.deadlines.now() + self.limits.turn)

    def returned(self, slot: Slot) -> None:
        """The call is over."""
        self.deadlines.clear(slot)

    def expire(self, late: Slot | Ticket, rollout: Rollout) -> None:
        """Something takes too long: a request is cut or dropped, a call of an environment is given up."""
        if isinstance(late, Slot):
            self._give_up_call(late, rollout)
            return
        slot = rollout.slots[late.env_id]
        row = slot.rows[late.row]
        if row.ticket is not late or self._was_held(row, late):
            return
        self._ledger.timeout("generation")
        if self.limits.deliver:
            self._cut(row, late)
        else:
            rollout.abandon(slot, row, "timed_out")

    def _was_held(self, row: Row, ticket: Ticket) -> bool:
        """Gives a request back the time for which weights were switched or the engine slept; whether there was any."""
        assert ticket.runner is not None and row.trajectory is not None
        more = max(0.0, ticket.runner.held_seconds(ticket) - row.held)
        row.held += more
        row.due += more
        row.trajectory.due += more
        now = self.deadlines.now()
        if row.due <= now:
            return False
        self.deadlines.set(ticket, max(row.due, now + HELD_POLL_SECONDS))
        return True

    def _cut(self, row: Row, ticket: Ticket) -> None:
        assert ticket.runner is not None
        row.timed_out = True
        # The environment's step with what there is gets as much time again.
        row.due = self.deadlines.now() + self.limits.shortest
        if not ticket.runner.cut(ticket):
            logger.warning("slot %d: a response takes too long and cannot be cut: it is waited for", ticket.env_id)

    def _has_just_begun(self, slot: Slot, call: Call, rollout: Rollout) -> bool:
        """Whether a call came late to its thread, so that it may not be stuck; it then has a little more time."""
        seconds = rollout.threads.seconds_in(call)
        left = 0.0 if seconds is None else OWN_SHARE * self.limits.shortest - seconds
        if left <= 0:
            return False
        self.deadlines.set(slot, self.deadlines.now() + left)
        return True

    def _give_up_call(self, slot: Slot, rollout: Rollout) -> None:
        if slot.call is None or self._has_just_begun(slot, slot.call, rollout):
            return
        stuck = rollout.threads.give_up(slot.call)
        if stuck is None:
            return  # Its outcome is on its way.
        stepping = any(row.response is not None for row in slot.rows)
        seconds = self.limits.shortest
        call = "step" if stepping else "reset"
        logger.warning("slot %d: env.%s takes longer than %g s and is given up", slot.env_id, call, seconds)
        self._ledger.timeout("env")
        rollout.returned(slot)
        reserved, slot.reserved = slot.reserved, []
        rollout.launches.release(reserved, "timed_out")
        for row in slot.rows:
            if row.trajectory is None:
                continue
            if row.response is not None and self.limits.deliver:
                row.timed_out = True
                bridge = slot.bridges[row.trajectory.policy_id]
                rollout.finish_turn(slot, row, bridge.turn(_turn_without_outcome(slot, row, bridge), row.response))
            elif stuck or row.response is not None:
                rollout.failures.end_trajectory(row, "timed_out")
        if stuck:
            rollout.failures.env_stuck(slot, rollout.slots)
        rollout.advance_later(slot)


def _turn_without_outcome(slot: Slot, row: Row, bridge: KeyBridge) -> TensorDictBase:
    """The turn of a row whose environment did not come back: what it observed, the response, and no reward."""
    assert row.observation is not None and row.response is not None
    env = slot.env
    after = bridge.env_input(row.observation, row.response)
    following = shallow_copy(row.observation)
    for spec in (env.full_reward_spec, env.full_done_spec):
        zeros = spec.zero()[0] if env.batch_size else spec.zero()
        for key in zeros.keys():
            merge_entry(following, key, zeros.get(key))
    for key in ("done", "truncated"):
        following.set(key, torch.ones_like(following.get("done")))
    after.set("next", following)
    return after


def mark_end(turn: TensorDictBase, truncated: bool) -> None:
    """Gives each turn ``("next", "truncated")``, and ends the trajectory of one whose next prompt is too long."""
    following: Any = turn.get("next")
    if truncated:
        following.set("done", torch.ones_like(following.get("done")))
        following.set("truncated", torch.ones_like(following.get("done")))
    elif following.get("truncated", None) is None:
        following.set("truncated", torch.zeros_like(following.get("done")))
