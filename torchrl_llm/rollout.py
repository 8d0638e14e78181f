"""The rollout loop: slots, events, turns. One place where the order of things is decided.

The loop takes events from one queue: a policy's response, an environment's outcome, a wake-up. A finished response
steps its slot's environment; the finished turn goes to the batcher at once, *before* the environment is asked for its
next prompt, so that no turn is held up or lost by a reset that fails, blocks or finds no more data; then the slot
submits its next request.

The loop knows nothing of vLLM, Ray or sinks. All its state belongs to the thread that drives it by
:meth:`Rollout.next_batch`; runners and environment threads only post events, and other threads only use
:class:`~torchrl_llm.control.Control` and read the :class:`~torchrl_llm.ledger.Ledger`.
"""

from __future__ import annotations

import contextlib
import queue
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from torchrl_llm.batches import Batcher, Turn
from torchrl_llm.bridge import show
from torchrl_llm.control import Control
from torchrl_llm.deadlines import Limits
from torchrl_llm.env_threads import Done, EnvEvent, EnvThreads, Job
from torchrl_llm.envs import Row, Slot
from torchrl_llm.errors import CollectorError, PromptTooLong
from torchrl_llm.failures import Failures
from torchrl_llm.lag import Lag
from torchrl_llm.launches import Launches
from torchrl_llm.ledger import Ledger
from torchrl_llm.policies.pool import PolicyPool
from torchrl_llm.policies.runner import Response, Ticket
from torchrl_llm.stale import Stale
from torchrl_llm.timeouts import Timeouts, mark_end


class Rollout:
    """Collects turns from slots and policies into batches.

    Args:
        slots: the environments.
        pool: the policies.
        launches: which trajectory may begin, and with what.
        batcher: what a batch is.
        ledger: the books.
        restart: whether a failed environment or policy is rebuilt, instead of ending the collection.
        env_threads: worker threads for environments.
        limits: how long things may take.
        events: the loop's queue; responses to its requests are posted there.
        control: stop and pause.
        lag: how far what is delivered may lie behind the weights; ``None`` for no limit.
    """

    def __init__(
        self,
        *,
        slots: list[Slot],
        pool: PolicyPool,
        launches: Launches,
        batcher: Batcher,
        ledger: Ledger,
        restart: bool,
        env_threads: int,
        limits: Limits,
        events: queue.SimpleQueue[Response | EnvEvent | None],
        control: Control,
        lag: Lag | None = None,
    ) -> None:
        self.slots = slots
        self.pool = pool
        self.threads = EnvThreads(env_threads, events.put)
        self.launches = launches
        self._batcher = batcher
        self._ledger = ledger
        self.failures = Failures(pool, batcher, ledger, restart, launches)
        self._timeouts = Timeouts(limits, ledger)
        self._stale = Stale(lag, slots, batcher, ledger, self.abandon, launches.lost)
        self._events = events
        self._control = control
        self._work: deque[Callable[[], None]] = deque()
        # Slots that wait for leave to begin a trajectory (by their source), or the next turn of one; each in order of
        # arrival.
        self._parked: defaultdict[tuple[bool, int], deque[Slot]] = defaultdict(deque)
        self._begun = 0
        for slot in slots:
            self.advance_later(slot)

    def next_batch(self) -> list[Turn] | None:
        """Runs until a batch is ready; ``None`` when there will be no more.

        What was finished before an error, or before the data ran out, is given first, as a short batch.

        Raises:
            CollectorError: what stopped the collection.
            Stopped: if another thread told the collection to stop.
        """
        deadlines = self._timeouts.deadlines
        while True:
            deadlines.rest()
            self._control.checkpoint()
            left = self.launches.left()
            if left == 0:
                return None
            self._stale.drop()
            batch = self._batcher.pop(left)
            if batch is not None:
                return batch
            if self.failures.fatal is not None:
                rest = self._batcher.flush()
                if rest:
                    return rest
                raise self.failures.fatal
            deadlines.resume()
            self._end_units()
            self._unpark()
            for late in deadlines.expired():
                self._guarded(lambda late=late: self._timeouts.expire(late, self))  # type: ignore[misc]
            if self._work:
                self._guarded(self._work.popleft())
            elif self._begun:
                with contextlib.suppress(queue.Empty):
                    event = self._events.get(timeout=deadlines.seconds_left())
                    self._guarded(lambda event=event: self._handle(event))  # type: ignore[misc]
            elif not self.launches.unblock():
                return self._batcher.flush() or None

    def flush(self, deadline: float) -> list[Turn]:
        """The finished turns that no batch was made of, when the collection stops; may be empty. It takes no time."""
        self._stale.drop()
        return self._batcher.flush()

    def fresh(self, turns: list[Turn]) -> bool:
        """Whether a batch may still be delivered; if not, it is taken back, and what is too old in it dropped."""
        return self._stale.fresh(turns)

    def close(self, deadline: float) -> list[str]:
        """Ends runners and environment threads, and what was built here; returns the names of threads still busy."""
        try:
            return self.pool.close(deadline) + self.threads.close(deadline)
        finally:
            self.launches.give_back()
            for slot in self.slots:
                slot.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Does some work; if that raises, the collection ends after what was finished is delivered."""
        try:
            work()
        except CollectorError as failure:
            self.failures.end_collection(failure)
        except Exception as error:
            message = f"the rollout failed: {type(error).__name__}: {error}"
            self.failures.end_collection(CollectorError(message), error)

    def _handle(self, event: Response | EnvEvent | None) -> None:
        if isinstance(event, Response):
            self._on_response(event)
        elif event is not None:
            event.done(event.value, event.error)

    # Slots: reset -> submit -> step -> turns -> (reset | submit)

    def advance_later(self, slot: Slot) -> None:
        """The slot is to get its next task."""
        self._work.append(lambda: self._advance(slot))

    def _advance(self, slot: Slot) -> None:
        """Gives a slot its next task: prompts for its free rows, or requests for what it observes."""
        if self.failures.fatal is not None:
            return
        free = sum(row.trajectory is None for row in slot.rows)
        idle = free == len(slot.rows)
        if idle and slot.exhausted:
            return
        if not self.launches.may_begin(self._begun, idle, slot):
            self.launches.refused(self._begun, idle)
            self._park(slot, idle)
        elif free and not slot.exhausted and self.launches.reserve(slot, self._begun):
            self._reserve(slot, len(slot.rows))
            self._call(slot, slot.reset, lambda value, error: self._on_reset(slot, value, error))
        elif idle:
            self._park(slot, idle)
        else:
            self._submit(slot)

    def _env_failed(self, slot: Slot, call: str, error: BaseException, resetting: Any = ()) -> None:
        if self.failures.env_failed(slot, call, error, resetting):
            self.advance_later(slot)

    def _call(self, slot: Slot, job: Job, done: Done) -> None:
        slot.in_call = True
        self._timeouts.called(slot)
        slot.call = self.threads.submit(job, done)

    def _reserve(self, slot: Slot, turns: int) -> None:
        """Notes how many turns of the slot have begun and are not finished."""
        self._begun += turns - slot.begun
        slot.begun = turns

    def returned(self, slot: Slot) -> None:
        """The environment's call has returned: what was abandoned meanwhile ends now."""
        self._reserve(slot, 0)
        slot.in_call = False
        self._timeouts.returned(slot)
        for row in slot.rows:
            if row.abandoned is not None:
                self.abandon(slot, row, row.abandoned)

    def _park(self, slot: Slot, new: bool) -> None:
        self._parked[new, id(slot.source)].append(slot)

    def _unpark(self) -> None:
        """Takes up parked slots that may begin now: a delivery, a failure or an update may have made room."""
        for (new, _), parked in self._parked.items():
            moved = 0
            while parked and self.launches.may_begin(self._begun, new, parked[0], moved):
                self.advance_later(parked.popleft())
                moved += 1

    def _on_reset(
        self, slot: Slot, observations: list[tuple[int, TensorDictBase]], error: BaseException | None
    ) -> None:
        self.returned(slot)
        reserved, slot.reserved = slot.reserved, []
        if error is not None:
            self.launches.release(reserved, "failed")
            self._env_failed(slot, "reset", error, self.launches.identities(reserved))
            return
        slot.exhausted = len(observations) < len(reserved)
        self.launches.release(reserved[len(observations) :], "surplus")
        for (index, observation), reservation in zip(observations, reserved, strict=False):
            row = slot.rows[index]
            row.trajectory = self.launches.begin(slot, reservation)
            if row.trajectory is None:
                continue
            row.observation = observation
            problem = self._prepare(slot, row, carry=None)
            if isinstance(problem, PromptTooLong):
                self.failures.prompt_too_long(slot, row, problem)
            elif problem is not None:
                self.failures.prompt_failed(slot, row, problem)
        if any(row.trajectory is None for row in slot.rows):
            self.advance_later(slot)
        else:
            self._submit(slot)

    def _prepare(self, slot: Slot, row: Row, carry: Any) -> Exception | None:
        """Makes the row's next request; returns why it cannot be made, if so."""
        trajectory = row.trajectory
        assert trajectory is not None and row.observation is not None
        bridge = slot.bridges[trajectory.policy_id]
        runner = self.pool.runners[trajectory.policy_id]
        try:
            row.request = runner.prepare(bridge.policy_input(row.observation), carry)
        except Exception as error:
            return error
        slot.prompts_skipped_in_row = 0
        return None

    def _submit(self, slot: Slot) -> None:
        if self.failures.fatal is not None:
            return
        rows = [(index, row) for index, row in enumerate(slot.rows) if row.trajectory is not None]
        self._reserve(slot, len(rows))
        slot.awaited = len(rows)
        for index, row in rows:
            trajectory = row.trajectory
            assert trajectory is not None
            runner = self.pool.runners[trajectory.policy_id]
            row.ticket = Ticket(
                slot.env_id, index, trajectory.policy_id, trajectory.id, trajectory.turns, self._events.put, runner
            )
            row.ticket.seed, row.ticket.identity = self.launches.seed, trajectory.identity
            row.ticket.alone, row.ticket.guest = self.launches.is_suspect(trajectory), self.pool.guest
            request, row.request, row.response = row.request, None, None
            self._ledger.request(+1)
            self._timeouts.requested(row)
            runner.submit(row.ticket, request)

    def _on_response(self, response: Response) -> None:
        ticket = response.ticket
        slot = self.slots[ticket.env_id]
        row = slot.rows[ticket.row]
        if row.ticket is not ticket:
            return  # Given up meanwhile.
        row.ticket = None
        self._timeouts.answered(ticket)
        self._ledger.request(-1)
        slot.awaited -= 1
        error = response.error
        if error is None:
            assert response.output is not None
            missing = slot.bridges[ticket.policy_id].missing_outputs(response.output)
            if missing:
                written = [k if isinstance(k, tuple) else (k,) for k in response.output.keys(True)]
                error = ValueError(f"the environment needs {show(missing)} of the policy, which wrote {show(written)}")
        if error is not None:
            self.failures.policy_failed(row, response, error)
        else:
            assert row.trajectory is not None
            if row.trajectory.version is None:
                row.trajectory.version = response.policy_version
            row.response, row.answer, row.carry = response.output, response, response.carry
            response.carry = None  # or each turn of a trajectory would keep its whole past
        if slot.awaited == 0:
            self._step(slot)

    def abandon(self, slot: Slot, row: Row, reason: str) -> None:
        """Ends a row's trajectory without delivering it, for ``reason``; the row is free for another.

        What the policy makes of its request is dropped. While the environment steps or resets, the trajectory is ended
        when that returns.
        """
        if row.trajectory is None:
            return
        if slot.in_call:
            row.abandoned = reason
            return
        if row.ticket is not None:
            assert row.ticket.runner is not None
            row.ticket.runner.abort(row.ticket)
            self._timeouts.answered(row.ticket)
            self._ledger.request(-1)
            slot.awaited -= 1
            self._reserve(slot, slot.begun - 1)
            if slot.awaited == 0:
                self._work.append(lambda: self._step(slot))
        self.failures.end_trajectory(row, reason)

    def _end_units(self) -> None:
        """Ends the groups that failed or are not wanted any more, with the trajectories that still run."""
        for unit, reason in self.launches.units_to_end():
            for slot in self.slots:
                for row in slot.rows:
                    if row.trajectory is not None and row.trajectory.unit == unit:
                        self.abandon(slot, row, reason)
            self.launches.end_unit(unit, reason)

    def delivered(self, turns: list[Turn]) -> None:
        """Turns have reached the reader, or whatever took them in his place."""
        self.launches.delivered(turns)
        self._end_units()

    def _step(self, slot: Slot) -> None:
        if self.failures.fatal is not None:
            return
        answered = [row for row in slot.rows if row.response is not None]
        if not answered:
            # Every row of the slot failed: begin again.
            self._reserve(slot, 0)
            self.advance_later(slot)
            return
        policy_id = slot.policy_id
        assert policy_id is not None
        bridge = slot.bridges[policy_id]
        self._reserve(slot, len(answered))
        self._call(slot, lambda: slot.step(bridge), lambda value, error: self._on_step(slot, policy_id, value, error))

    def _on_step(self, slot: Slot, policy_id: int, stepped: list[TensorDictBase], error: BaseException | None) -> None:
        self.returned(slot)
        if error is not None:
            self._env_failed(slot, "step", error)
            return
        bridge = slot.bridges[policy_id]
        for row, after in zip(slot.rows, stepped, strict=True):
            if row.response is not None:
                self.finish_turn(slot, row, bridge.turn(after, row.response))
        self.advance_later(slot)

    def finish_turn(self, slot: Slot, row: Row, data: TensorDictBase) -> None:
        """A turn is finished: it goes to the batcher, and its trajectory goes on or ends."""
        trajectory, answer = row.trajectory, row.answer
        assert trajectory is not None and answer is not None
        step = trajectory.turns
        trajectory.turns += 1
        done = bool(data.get(("next", "done")).any())
        row.response = None
        problem = None
        if not done and not row.timed_out:
            row.observation = slot.next_observation(row, data)
            problem = self._prepare(slot, row, carry=row.carry)
        truncated = row.timed_out or isinstance(problem, PromptTooLong)
        done = done or truncated
        mark_end(data, truncated)
        self._ledger.finish_turn(answer.prompt_tokens, answer.response_tokens)
        turn = Turn(trajectory, step, data, done, answer)
        self._batcher.add(turn)
        self._stale.finished(turn)
        self.launches.settle()
        if done or not self._batcher.whole_trajectories:
            self.failures.none_in_row(slot, trajectory.policy_id)
        if done:
            self.pool.loads[trajectory.policy_id] -= 1
            row.clear()
        elif problem is not None:
            self.failures.prompt_failed(slot, row, problem)
