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

import queue
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_llm.batches import Batcher, Turn
from torchrl_llm.bridge import show
from torchrl_llm.control import Control
from torchrl_llm.env_threads import EnvEvent, EnvThreads
from torchrl_llm.envs import Row, Slot
from torchrl_llm.errors import CollectorError, PromptTooLong
from torchrl_llm.failures import Failures
from torchrl_llm.lag import Lag
from torchrl_llm.launches import Launches
from torchrl_llm.ledger import Ledger
from torchrl_llm.policies.pool import PolicyPool
from torchrl_llm.policies.runner import Response, Ticket
from torchrl_llm.stale import Stale


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
        events: queue.SimpleQueue[Response | EnvEvent | None],
        control: Control,
        lag: Lag | None = None,
    ) -> None:
        self.slots = slots
        self.pool = pool
        self.threads = EnvThreads(env_threads, events.put)
        self._launches = launches
        self._batcher = batcher
        self._ledger = ledger
        self._failures = Failures(pool, batcher, ledger, restart)
        self._stale = Stale(lag, slots, batcher, ledger, self.abandon)
        self._events = events
        self._control = control
        self._work: deque[Callable[[], None]] = deque(self._advancing(slot) for slot in slots)
        # Slots that wait for leave to begin a trajectory, or the next turn of one; each in order of arrival.
        self._parked: dict[bool, deque[Slot]] = {False: deque(), True: deque()}
        self._begun = 0

    def next_batch(self) -> list[Turn] | None:
        """Runs until a batch is ready; ``None`` when there will be no more.

        What was finished before an error, or before the data ran out, is given first, as a short batch.

        Raises:
            CollectorError: what stopped the collection.
            Stopped: if another thread told the collection to stop.
        """
        while True:
            self._control.checkpoint()
            left = self._launches.left()
            if left == 0:
                return None
            self._stale.drop()
            batch = self._batcher.pop(left)
            if batch is not None:
                return batch
            if self._failures.fatal is not None:
                rest = self._batcher.flush()
                if rest:
                    return rest
                raise self._failures.fatal
            self._unpark()
            if self._work:
                self._guarded(self._work.popleft())
            elif self._begun:
                event = self._events.get()
                self._guarded(lambda event=event: self._handle(event))  # type: ignore[misc]
            else:
                return self._batcher.flush() or None

    def flush(self) -> list[Turn]:
        """The finished turns that no batch was made of, when the collection stops; may be empty."""
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
            for slot in self.slots:
                slot.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Does some work; if that raises, the collection ends after what was finished is delivered."""
        try:
            work()
        except CollectorError as failure:
            self._failures.end_collection(failure)
        except Exception as error:
            message = f"the rollout failed: {type(error).__name__}: {error}"
            self._failures.end_collection(CollectorError(message), error)

    def _handle(self, event: Response | EnvEvent | None) -> None:
        if isinstance(event, Response):
            self._on_response(event)
        elif event is not None:
            event.done(event.value, event.error)

    # Slots: reset -> submit -> step -> turns -> (reset | submit)

    def _advancing(self, slot: Slot) -> Callable[[], None]:
        return lambda: self._advance(slot)

    def _advance(self, slot: Slot) -> None:
        """Gives a slot its next task: prompts for its free rows, or requests for what it observes."""
        if self._failures.fatal is not None:
            return
        free = sum(row.trajectory is None for row in slot.rows)
        idle = free == len(slot.rows)
        if idle and slot.exhausted:
            return
        if not self._launches.may_begin(self._begun, new=idle):
            self._launches.refused(self._begun, new=idle)
            self._parked[idle].append(slot)
        elif free and not slot.exhausted and self._launches.may_begin(self._begun, new=True):
            self._reserve(slot, len(slot.rows))
            self._launches.expect(free)
            slot.in_call = True
            self.threads.submit(slot.reset, lambda value, error: self._on_reset(slot, value, error))
        else:
            self._submit(slot)

    def _env_failed(self, slot: Slot, call: str, error: BaseException) -> None:
        if self._failures.env_failed(slot, call, error):
            self._work.append(self._advancing(slot))

    def _reserve(self, slot: Slot, turns: int) -> None:
        """Notes how many turns of the slot have begun and are not finished."""
        self._begun += turns - slot.begun
        slot.begun = turns

    def _returned(self, slot: Slot) -> None:
        """The environment's call has returned: what was abandoned meanwhile ends now."""
        self._reserve(slot, 0)
        slot.in_call = False
        for row in slot.rows:
            if row.abandoned is not None:
                self.abandon(slot, row, row.abandoned)

    def _unpark(self) -> None:
        """Takes up parked slots that may begin now: a delivery, a failure or an update may have made room."""
        for new, parked in self._parked.items():
            moved = 0
            while parked and self._launches.may_begin(self._begun, new, moved):
                self._work.append(self._advancing(parked.popleft()))
                moved += 1

    def _on_reset(
        self, slot: Slot, observations: list[tuple[int, TensorDictBase]], error: BaseException | None
    ) -> None:
        asked = sum(row.trajectory is None for row in slot.rows)
        self._launches.expect(-asked)
        self._returned(slot)
        if error is not None:
            self._env_failed(slot, "reset", error)
            return
        slot.exhausted = len(observations) < asked
        for index, observation in observations:
            row = slot.rows[index]
            row.observation = observation
            row.trajectory = self._launches.begin(slot)
            problem = self._prepare(slot, row, carry=None)
            if isinstance(problem, PromptTooLong):
                self._failures.prompt_too_long(slot, row, problem)
            elif problem is not None:
                self._failures.prompt_failed(slot, row, problem)
        if any(row.trajectory is None for row in slot.rows):
            self._work.append(self._advancing(slot))
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
        if self._failures.fatal is not None:
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
            request, row.request, row.response = row.request, None, None
            self._ledger.request(+1)
            runner.submit(row.ticket, request)

    def _on_response(self, response: Response) -> None:
        ticket = response.ticket
        slot = self.slots[ticket.env_id]
        row = slot.rows[ticket.row]
        if row.ticket is not ticket:
            return  # Given up meanwhile.
        row.ticket = None
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
            self._failures.policy_failed(row, ticket, error)
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
            self._ledger.request(-1)
            slot.awaited -= 1
            self._reserve(slot, slot.begun - 1)
            if slot.awaited == 0:
                self._work.append(lambda: self._step(slot))
        self._failures.end_trajectory(row, reason)

    def _step(self, slot: Slot) -> None:
        if self._failures.fatal is not None:
            return
        answered = [row for row in slot.rows if row.response is not None]
        if not answered:
            # Every row of the slot failed: begin again.
            self._reserve(slot, 0)
            self._work.append(self._advancing(slot))
            return
        policy_id = slot.policy_id
        assert policy_id is not None
        bridge = slot.bridges[policy_id]
        self._reserve(slot, len(answered))
        slot.in_call = True
        self.threads.submit(
            lambda: slot.step(bridge), lambda value, error: self._on_step(slot, policy_id, value, error)
        )

    def _on_step(self, slot: Slot, policy_id: int, stepped: list[TensorDictBase], error: BaseException | None) -> None:
        self._returned(slot)
        if error is not None:
            self._env_failed(slot, "step", error)
            return
        bridge = slot.bridges[policy_id]
        for row, after in zip(slot.rows, stepped, strict=True):
            if row.response is not None:
                self._finish_turn(slot, row, bridge.turn(after, row.response))
        self._work.append(self._advancing(slot))

    def _finish_turn(self, slot: Slot, row: Row, data: TensorDictBase) -> None:
        trajectory, answer = row.trajectory, row.answer
        assert trajectory is not None and answer is not None
        step = trajectory.turns
        trajectory.turns += 1
        done = bool(data.get(("next", "done")).any())
        row.response = None
        problem = None
        if not done:
            row.observation = slot.next_observation(row, data)
            problem = self._prepare(slot, row, carry=row.carry)
        truncated = isinstance(problem, PromptTooLong)
        done = done or truncated
        _say_whether_truncated(data, truncated)
        self._ledger.finish_turn(answer.prompt_tokens, answer.response_tokens)
        turn = Turn(trajectory, step, data, done, answer)
        self._batcher.add(turn)
        self._stale.finished(turn)
        if done or not self._batcher.whole_trajectories:
            self._failures.none_in_row(slot, trajectory.policy_id)
        if done:
            self.pool.loads[trajectory.policy_id] -= 1
            row.clear()
        elif problem is not None:
            self._failures.prompt_failed(slot, row, problem)


def _say_whether_truncated(turn: TensorDictBase, truncated: bool) -> None:
    """Gives each turn ``("next", "truncated")``, and ends the trajectory of one whose next prompt is too long."""
    following: Any = turn.get("next")
    if truncated:
        following.set("done", torch.ones_like(following.get("done")))
        following.set("truncated", torch.ones_like(following.get("done")))
    elif following.get("truncated", None) is None:
        following.set("truncated", torch.zeros_like(following.get("done")))
