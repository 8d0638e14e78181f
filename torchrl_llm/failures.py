"""What a failure costs: a trajectory, an environment or a policy, or the whole collection.

With ``on_error="restart"`` a failure costs the trajectory, and the environment or policy is rebuilt; three failures of
one of them in a row end the collection. With ``"raise"`` the first one does. "In a row" means without a turn in between
that will be delivered, so that what fails again and again never looks like progress; a prompt that fails again counts
once, see :mod:`torchrl_llm.streaks`, since it is given up for itself.

Owned by the rollout, and used only by the thread that drives it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torchrl_llm.batches import Batcher, Trajectory
from torchrl_llm.envs import Row, Slot
from torchrl_llm.errors import CollectorError, EnvError, PolicyError, PromptTooLong
from torchrl_llm.launches import Launches
from torchrl_llm.ledger import Ledger
from torchrl_llm.policies.pool import PolicyPool
from torchrl_llm.policies.runner import Response

logger = logging.getLogger("torchrl_llm")

MAX_FAILURES_IN_ROW = 3
MAX_PROMPTS_SKIPPED_IN_ROW = 100


class Failures:
    """Books failures, rebuilds what failed, and keeps the one that ends the collection as :attr:`fatal`.

    Args:
        pool: the policies.
        batcher: holds the finished turns of trajectories that may fail.
        ledger: the books.
        restart: whether a failed environment or policy is rebuilt, instead of ending the collection.
        launches: is told of every trajectory that ends without being delivered.
    """

    def __init__(self, pool: PolicyPool, batcher: Batcher, ledger: Ledger, restart: bool, launches: Launches) -> None:
        self.fatal: CollectorError | None = None
        self._pool = pool
        self._batcher = batcher
        self._ledger = ledger
        self._restart = restart
        self._launches = launches

    def end_collection(self, failure: CollectorError, cause: BaseException | None = None) -> None:
        """Ends the collection; the first failure is the one that the reader gets."""
        if cause is not None:
            failure.__cause__ = cause
        if self.fatal is None:
            self.fatal = failure

    def none_in_row(self, slot: Slot, policy_id: int) -> None:
        """A turn that will be delivered: neither its environment nor its policy fails in a row."""
        slot.failures_in_row.clear()
        self._pool.failures_in_row[policy_id].clear()

    def prompt_too_long(self, slot: Slot, row: Row, overflow: PromptTooLong) -> None:
        """Ends a trajectory whose very first prompt does not fit: there is no turn to mark as truncated."""
        logger.warning("slot %d: skipped a prompt: %s", slot.env_id, overflow)
        trajectory = self.end_trajectory(row, "prompt_too_long")
        slot.prompts_skipped_in_row += 1
        if slot.prompts_skipped_in_row >= MAX_PROMPTS_SKIPPED_IN_ROW:
            message = f"{slot.prompts_skipped_in_row} prompts in a row are too long: {overflow}"
            self.end_collection(PolicyError(message, slot=slot.env_id, trajectory=trajectory.id, turn=0))

    def prompt_failed(self, slot: Slot, row: Row, cause: Exception) -> None:
        """Ends a trajectory whose prompt the policy cannot take."""
        self._ledger.error("policy")
        trajectory = self.end_trajectory(row, "failed")
        failure = PolicyError(
            f"policy {trajectory.policy_id} cannot take the prompt: {type(cause).__name__}: {cause}",
            slot=slot.env_id,
            trajectory=trajectory.id,
            turn=trajectory.turns,
        )
        in_row = slot.failures_in_row.add([trajectory.identity])
        if self._restart and in_row < MAX_FAILURES_IN_ROW:
            logger.warning("dropped a trajectory: %s", failure)
        else:
            self.end_collection(failure, cause)

    def policy_failed(self, row: Row, response: Response, error: BaseException) -> None:
        """Ends a trajectory that a policy did not answer; rebuilds the policy if it is broken."""
        ticket = response.ticket
        pool, policy_id = self._pool, ticket.policy_id
        suspects = [other for other in response.suspects or (ticket,) if other.guest == ticket.guest]
        self._ledger.error("policy")
        failure = PolicyError(
            f"policy {policy_id} failed: {type(error).__name__}: {error}",
            slot=ticket.env_id,
            trajectory=ticket.trajectory,
            turn=ticket.turn,
        )
        self.end_trajectory(row, "failed", tried=ticket in suspects, in_company=len(suspects) > 1)
        if not self._restart:
            self.end_collection(failure, error)
            return
        logger.warning("dropped a trajectory: %s", failure)
        if ticket.runner is not pool.runners[policy_id]:
            return  # One of the requests that were lost with a policy that has been replaced since.
        in_row = pool.failures_in_row[policy_id].add(other.identity for other in suspects)
        if in_row >= MAX_FAILURES_IN_ROW:
            self.end_collection(failure, error)
        elif pool.runners[policy_id].broken:
            try:
                pool.rebuild(policy_id)
            except Exception as again:
                message = f"policy {policy_id} cannot be rebuilt: {type(again).__name__}: {again}"
                self.end_collection(PolicyError(message), again)
            else:
                self._ledger.restart("policy")

    def env_failed(
        self, slot: Slot, call: str, error: BaseException, resetting: Iterable[tuple[int, ...]] = ()
    ) -> bool:
        """Ends the trajectories of an environment that raised; returns whether it was rebuilt and goes on.

        Args:
            slot: where.
            call: which call of the environment.
            error: what it raised.
            resetting: identities of those that were to begin by that call.
        """
        self._ledger.error("env")
        running = [row for row in slot.rows if row.trajectory is not None]
        first = running[0].trajectory if running else None
        failure = EnvError(
            f"env.{call} failed: {type(error).__name__}: {error}",
            slot=slot.env_id,
            trajectory=None if first is None else first.id,
            turn=None if first is None else first.turns,
        )
        suspects = [self.end_trajectory(row, "failed").identity for row in running]
        in_row = slot.failures_in_row.add([*suspects, *resetting])
        if not self._restart or in_row >= MAX_FAILURES_IN_ROW:
            self.end_collection(failure, error)
            return False
        logger.warning("rebuilding an environment: %s", failure)
        try:
            slot.rebuild()
        except Exception as again:
            message = f"the env cannot be rebuilt: {type(again).__name__}: {again}"
            self.end_collection(EnvError(message, slot=slot.env_id), again)
            return False
        self._ledger.restart("env")
        return True

    def env_stuck(self, slot: Slot, slots: list[Slot]) -> None:
        """Replaces an environment that does not come back; one that was passed as an instance is out of use."""
        try:
            slot.leave_env()
        except Exception as error:
            message = f"the env did not come back and cannot be rebuilt: {type(error).__name__}: {error}"
            self.end_collection(EnvError(message, slot=slot.env_id), error)
            return
        if not slot.out_of_use:
            self._ledger.restart("env")
        elif all(other.out_of_use for other in slots):
            message = "no environment is left: one that was passed as an instance cannot be rebuilt when it is stuck"
            self.end_collection(EnvError(message, slot=slot.env_id))

    def end_trajectory(self, row: Row, reason: str, tried: bool = True, in_company: bool = False) -> Trajectory:
        """Ends a row's trajectory without delivering it; see :meth:`Launches.lost`."""
        trajectory = row.trajectory
        assert trajectory is not None
        lost = self._batcher.drop(trajectory)
        self._ledger.record(trajectory.id, reason, turns_dropped=lost)
        self._pool.loads[trajectory.policy_id] -= 1
        self._launches.lost(trajectory, reason, tried, in_company)
        row.clear()
        return trajectory
