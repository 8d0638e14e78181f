"""Launches: which trajectory may begin, with which prompt, and what becomes of the prompt of one that did not get far.

A slot *reserves* places for its free rows before it is reset: with a prompt source, members of groups; always, a place
in the order of delivery. A row that the reset gave an observation then begins its trajectory; other places go back.

Invariants: a trajectory is launched at most once, with an id of its own, and is in the books from that moment on; a
member that was taken from a source is handed back to it, or told to be done with, exactly once per taking, at the
latest when the collection ends; a group is
completed or given up whole. What was begun may always be completed: neither the window nor ``total_steps`` nor the
limit of groups under way holds back the missing members of a group.

Owned by the rollout, and used only by the thread that drives it.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torchrl_llm.batches import Batcher, Trajectory, Turn, ended_trajectories
from torchrl_llm.budget import Budget
from torchrl_llm.envs import Slot
from torchrl_llm.lag import Lag
from torchrl_llm.ledger import Ledger
from torchrl_llm.plan import BatchPlan, check_whole
from torchrl_llm.policies.pool import PolicyPool
from torchrl_llm.prompt_line import Member
from torchrl_llm.routing import Route, pick_policy
from torchrl_llm.seeds import ENV, OF_GROUP, OF_SLOT, PROMPTS, derive, seed_loaders
from torchrl_llm.takers import Taker
from torchrl_llm.units import UnitBatcher

logger = logging.getLogger("torchrl_llm")

# How often a member of a group is tried before its group is given up.
MAX_TRIES = 3
# A filter that drops so many groups in a row is worth a warning, and again at every doubling.
FILTERED_IN_ROW = 100
# What ends a trajectory without fault of its prompt, which is then handed out again; failures are counted as tries.
_TRIED = ("failed", "timed_out")
_AGAIN = (*_TRIED, "stale", "surplus")
# What ends the trajectories of a group of which a member failed for good.
_GIVEN_UP = "group_failed"


@dataclass
class Reservation:
    """A place in the order of delivery, and the member of a group that takes it."""

    unit: int
    source: int = -1
    member: Member | None = None


class Launches:
    """Decides who may begin, and begins it.

    Args:
        slots: the environments; some or all may be bound to prompt sources.
        pool: the policies, whose loads are kept here.
        route: which policy gets a new trajectory.
        budget: how many turns in all.
        ledger: the books.
        batcher: where finished turns go.
        plan: what a batch is.
        lag: how far what is delivered may lie behind the weights; ``None`` for no limit.
    """

    def __init__(
        self,
        slots: list[Slot],
        pool: PolicyPool,
        route: Route,
        budget: Budget,
        ledger: Ledger,
        batcher: Batcher,
        plan: BatchPlan,
        lag: Lag | None = None,
    ) -> None:
        self._lag = lag
        self._pool = pool
        self._route = route
        self._budget = budget
        self._ledger = ledger
        self._units = batcher if isinstance(batcher, UnitBatcher) else None
        self._plan = plan
        self._window = plan.window_for(sum(len(slot.rows) for slot in slots))
        self._slots = slots
        self.seed: int | None = None
        self._next_id = 0
        self._next_unit = 0
        known = {id(slot.source): slot.source for slot in slots if slot.source is not None}
        self.sources = [Taker(source, plan.groups) for source in known.values()]
        self._index = {key: index for index, key in enumerate(known)}
        self._dry: set[int] = set()
        self._tries: Counter[tuple[int, int]] = Counter()
        self._suspects: set[tuple[int, int]] = set()
        self._to_end: dict[int, str] = {}
        self._warn_at = FILTERED_IN_ROW

    def set_seed(self, seed: int) -> None:
        """Sets the seed of all that is launched from now on; of orders of prompts that have not begun."""
        begun = self._next_unit > 0 or self._next_id > 0
        self.seed = seed
        for index, source in enumerate(self.sources):
            source.source.reseed(derive(seed, PROMPTS, index))
        for slot in self._slots:
            slot.new_seed = derive(seed, ENV, slot.env_id)
            if not begun:
                seed_loaders(slot.primers, slot.new_seed)

    def look_again(self) -> None:
        """Prompts have come back to sources that had none."""
        self._dry.clear()

    def left(self) -> int | None:
        """Turns that may still be delivered; ``None`` for no end."""
        return self._budget.left(self._ledger.turns_delivered)

    # Before a trajectory

    def may_begin(self, begun: int, new: bool, slot: Slot, unparked: int = 0) -> bool:
        """Whether another turn may begin.

        Args:
            begun: turns in flight.
            new: whether it would be the first of its trajectory.
            slot: where.
            unparked: how many others have just got leave, and have not begun yet.
        """
        within = self._budget.may_begin(self._ledger.turns_kept, begun + unparked, new)
        if not new:
            return within and self._in_time(begun, new, unparked)
        source = None if slot.source is None else self.sources[self._source_of(slot)]
        if source is not None and source.owed:
            return True  # A group that was begun may always be completed.
        if not within or (source is not None and self._source_of(slot) in self._dry and not source.pending):
            return False
        return self._has_room() and self._in_time(begun, new, unparked)

    def _in_time(self, begun: int, new: bool, unparked: int = 0) -> bool:
        """Whether what begins now need not come too late."""
        if self._lag is None:
            return True
        on_their_way = self._ledger.turns_pending + begun if self._units is None else self._units.under_way
        return self._lag.may_begin(on_their_way + unparked, new)

    def refused(self, begun: int, new: bool) -> None:
        """Notes that a slot was refused, and counts it if that was for what would come too late."""
        if not self._in_time(begun, new):
            self._ledger.hold_for_lag()

    def _has_room(self) -> bool:
        """Whether a new unit may be opened."""
        units = self._units
        if units is None:
            return True
        if self._window is not None and units.waiting >= self._window:
            return False
        return self._plan.under_way is None or units.under_way < self._plan.under_way

    def reserve(self, slot: Slot, begun: int) -> bool:
        """Takes places, and prompts if a source has them, for the slot's free rows; returns whether there are any."""
        if not self.may_begin(begun, True, slot):
            return False
        free = sum(row.trajectory is None for row in slot.rows)
        if slot.source is None:
            slot.reserved = [Reservation(self._open_unit()) for _ in range(free)]
            return True
        slot.reserved = []
        index = self._source_of(slot)
        source = self.sources[index]
        while len(slot.reserved) < free:
            if slot.reserved and not self.may_begin(begun + len(slot.reserved), True, slot):
                break
            taken = source.take(min(free - len(slot.reserved), source.owed or 1))
            if not taken:
                self._dry.add(index)
                break
            slot.reserved += [self._placed(index, member) for member in taken]
        if self.seed is not None and slot.reserved and free == len(slot.rows):
            # What an environment draws at random belongs to the trajectory, not to the slot that it happens to get.
            slot.new_seed = derive(self.seed, ENV, *(self._identity(slot.reserved[0]) or ()))
        return bool(slot.reserved)

    def _placed(self, index: int, member: Member) -> Reservation:
        if not self._plan.groups:
            return Reservation(self._open_unit(), index, member)
        unit = self._group_id(index, member)
        assert self._units is not None
        if not self._units.is_open(unit):
            self._units.open(unit, member.repeats)
        return Reservation(unit, index, member)

    def _open_unit(self) -> int:
        unit = self._next_unit
        self._next_unit += 1
        if self._units is not None:
            self._units.open(unit, size=1)
        return unit

    def _source_of(self, slot: Slot) -> int:
        return -1 if slot.source is None else self._index[id(slot.source)]

    def _group_id(self, index: int, member: Member) -> int:
        """A group's id in the collector: the source's own, if there is one source."""
        return member.group_id * len(self.sources) + index

    def release(self, reservations: list[Reservation], reason: str) -> None:
        """Takes places back that no trajectory begins from, for ``reason``."""
        for reservation in reservations:
            self._lost(reservation.unit, reservation.source, reservation.member, reason)

    # A trajectory

    def begin(self, slot: Slot, reservation: Reservation) -> Trajectory | None:
        """Launches a trajectory in ``slot``; ``None`` if its group was given up meanwhile.

        Raises:
            CollectorError: if the route fails, or gives no policy.
        """
        if self._units is not None and not self._units.is_open(reservation.unit):
            self.release([reservation], "surplus")
            return None
        policy_id = slot.policy_id
        if policy_id is None:
            policy_id = pick_policy(self._route, slot.env_id, tuple(self._pool.loads))
        trajectory = Trajectory(self._next_id, slot.env_id, policy_id, unit=reservation.unit)
        if reservation.member is not None:
            trajectory.source, trajectory.member = reservation.source, reservation.member
            trajectory.group_id = self._group_id(reservation.source, reservation.member)
            trajectory.group_index, trajectory.epoch = reservation.member.index, reservation.member.epoch
        trajectory.identity = self._identity(reservation) or (OF_SLOT, slot.env_id, slot.begun_trajectories)
        slot.begun_trajectories += 1
        self._next_id += 1
        self._ledger.launch(trajectory.id)
        self._pool.loads[policy_id] += 1
        return trajectory

    def _identity(self, reservation: Reservation) -> tuple[int, ...] | None:
        """What a member of a group is, whatever slot it gets."""
        member = reservation.member
        return None if member is None else (OF_GROUP, self._group_id(reservation.source, member), member.index)

    def identities(self, reservations: list[Reservation]) -> list[tuple[int, ...]]:
        """The identities of the members that were to begin."""
        return [identity for reservation in reservations if (identity := self._identity(reservation)) is not None]

    def is_suspect(self, trajectory: Trajectory) -> bool:
        """Whether its member failed together with others, so that it is not known whose fault it was."""
        return (trajectory.group_id, trajectory.group_index) in self._suspects

    # After a trajectory

    def lost(self, trajectory: Trajectory, reason: str, tried: bool = True, in_company: bool = False) -> None:
        """A trajectory has ended without being delivered: its prompt is tried again, or given up.

        ``tried``: a failure may be its own, and counts. ``in_company``: or that of another one in the same call.
        """
        if in_company and tried and trajectory.member is not None:
            self._suspects.add((trajectory.group_id, trajectory.group_index))
        self._lost(trajectory.unit, trajectory.source, trajectory.member, reason, tried)

    def _lost(self, unit: int, index: int, member: Member | None, reason: str, tried: bool = True) -> None:
        if self._units is not None and not self._plan.groups:
            self._units.close(unit)
        if member is None:
            return
        source, key = self.sources[index], (self._group_id(index, member), member.index)
        if tried and reason in _TRIED:
            self._tries[key] += 1
        if reason in _AGAIN and self._tries.get(key, 0) < MAX_TRIES:
            source.returned(member.group_id, member.index)
            return
        self._forget(key)
        if not self._plan.groups:
            source.dropped(member.group_id, member.index)
        elif self._give_up(unit, f"its member {member.index}: {reason}"):
            source.withdraw(member.group_id)

    def _give_up(self, unit: int, why: str) -> bool:
        """A group is to be ended as failed; ``False`` if it is over, or given up already."""
        if self._units is None or not self._units.is_open(unit) or self._to_end.get(unit) == _GIVEN_UP:
            return False
        logger.warning("gave up group %d: %s", unit, why)
        self._ledger.group("failed")
        self._to_end[unit] = _GIVEN_UP
        return True

    def unblock(self) -> bool:
        """Gives up the groups that no slot can complete, when nothing is under way; returns whether there are any."""
        hopeless = [] if self._units is None else self._units.open_units()
        for unit in hopeless:
            self._give_up(unit, "no environment is left that could complete it")
        return bool(hopeless)

    def units_to_end(self) -> list[tuple[int, str]]:
        """The units that are to be ended, with the reason; each is then to be ended by :meth:`end_unit`."""
        return list(self._to_end.items())

    def end_unit(self, unit: int, reason: str) -> None:
        """Gives a unit up whose running trajectories have been ended."""
        assert self._units is not None
        del self._to_end[unit]
        turns = self._units.close(unit)
        self._ledger.drop(len(turns), ended_trajectories(turns), reason)
        for turn in turns:
            if turn.done:
                self.lost(turn.trajectory, reason)

    def settle(self) -> None:
        """Books the groups that the filter did not want."""
        if self._units is None:
            return
        for turns in self._units.take_unwanted():
            self._ledger.drop(len(turns), ended_trajectories(turns), "filtered")
            self._ledger.group("filtered")
            for source, member in self._members(turns):
                source.dropped(member.group_id, member.index)
        if self._units.unwanted_in_row >= self._warn_at:
            logger.warning("group_filter has dropped %d groups in a row, none was kept", self._warn_at)
            self._warn_at *= 2
        elif not self._units.unwanted_in_row:
            self._warn_at = FILTERED_IN_ROW

    def _end_surplus(self) -> None:
        """What is under way beyond a batch that was delivered is to be ended."""
        if self._units is not None and not self._plan.keep_surplus:
            for unit in self._units.open_units():
                if unit not in self._to_end:
                    self._ledger.group("surplus")
                    self._to_end[unit] = "surplus"

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on in another process, as plain data."""
        return {
            "next_id": self._next_id,
            "seed": self.seed,
            "slots": [slot.begun_trajectories for slot in self._slots],
            "sources": [source.source.state_dict() for source in self.sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state.

        Raises:
            ValueError: if the collector has other sources than the one that was saved, or cannot complete its groups.
        """
        if len(state["sources"]) != len(self.sources):
            raise ValueError(
                f"the state has {len(state['sources'])} prompt sources and the collector {len(self.sources)}: build it "
                "like the one that was saved"
            )
        for saved in state["sources"] if self._plan.groups else ():
            check_whole(saved)
        for source, saved in zip(self.sources, state["sources"], strict=True):
            source.source.load_state_dict(saved)
        self._next_id, self.seed = state["next_id"], state["seed"]
        for slot, begun in zip(self._slots, state["slots"], strict=False):
            slot.begun_trajectories = begun
            if self.seed is not None:
                slot.new_seed = derive(self.seed, ENV, slot.env_id, begun)

    def give_back(self) -> None:
        """The collection has ended: what was taken and not delivered goes back to its sources."""
        for source in self.sources:
            source.give_back()

    def stats(self) -> dict[str, float]:
        """How long units waited for older ones; safe from any thread."""
        units = self._units
        return {
            "longest_wait_seconds": 0.0 if units is None else units.longest_wait_seconds,
            "most_overtaken": 0 if units is None else units.most_overtaken,
        }

    def delivered(self, turns: list[Turn]) -> None:
        """Turns have reached the reader: the sources need not keep their prompts."""
        for source, member in self._members(turns):
            source.delivered(member.group_id, member.index)
        if self._plan.groups:
            self._ledger.group("delivered", len({turn.trajectory.unit for turn in turns}))
            self._end_surplus()

    def _members(self, turns: list[Turn]) -> list[tuple[Taker, Member]]:
        """The members whose trajectories end in ``turns``, with their sources; their tries are forgotten."""
        found = []
        for turn in turns:
            trajectory = turn.trajectory
            if turn.done and trajectory.member is not None:
                self._forget((trajectory.group_id, trajectory.group_index))
                found.append((self.sources[trajectory.source], trajectory.member))
        return found

    def _forget(self, key: tuple[int, int]) -> None:
        self._tries.pop(key, None)
        self._suspects.discard(key)
