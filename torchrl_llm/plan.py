"""What a batch is: the collector's arguments about units, order and groups, checked and put together.

Pure. Made by the constructor's thread before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from torchrl_llm.batches import Batcher, StepBatcher, Turn, stack_turns
from torchrl_llm.errors import CollectorError
from torchrl_llm.units import UnitBatcher

GroupFilter = Callable[[TensorDictBase], bool]
UNITS = ("steps_per_batch", "trajectories_per_batch", "groups_per_batch")


@dataclass(frozen=True)
class BatchPlan:
    """What a batch is.

    Args:
        unit: the argument that gives the size of a batch, one of :data:`UNITS`.
        size: that size.
        order: ``"launch"`` or ``"completion"``.
        window: how many ended trajectories may wait for an older one; ``None`` for as many as there are rows.
        group_filter: which groups are delivered.
        oversample: groups under way beyond those of one batch; ``None`` for no limit.
        keep_surplus: whether groups that are under way when a batch is full go into the next.
    """

    unit: str = "steps_per_batch"
    size: int = 1
    order: str = "completion"
    window: int | None = None
    group_filter: GroupFilter | None = None
    oversample: int | None = None
    keep_surplus: bool = True

    @property
    def groups(self) -> bool:
        """Whether batches are made of groups."""
        return self.unit == "groups_per_batch"

    @property
    def under_way(self) -> int | None:
        """How many groups may be under way at a time; ``None`` for no limit."""
        return None if self.oversample is None else self.size + self.oversample

    def window_for(self, rows: int) -> int | None:
        """How many ended trajectories may wait for an older one; ``None`` where nothing waits for another."""
        if self.order == "completion":
            return None
        return rows if self.window is None else self.window

    def batcher(self) -> Batcher:
        """The batcher of the plan."""
        if self.unit == "steps_per_batch":
            return StepBatcher(self.size)
        return UnitBatcher(self.size, self.order, None if self.group_filter is None else self._wanted)

    def _wanted(self, turns: list[Turn]) -> bool:
        assert self.group_filter is not None
        try:
            return bool(self.group_filter(stack_turns(turns)))
        except Exception as error:
            raise CollectorError(f"group_filter failed: {type(error).__name__}: {error}") from error


def make_plan(
    *,
    steps_per_batch: Any = None,
    trajectories_per_batch: Any = None,
    groups_per_batch: Any = None,
    order: Any = None,
    window: Any = None,
    group_filter: Any = None,
    oversample: Any = None,
    keep_surplus: Any = True,
) -> BatchPlan:
    """The plan for a collector's arguments.

    Raises:
        ValueError: if not exactly one size is given, or a value is not allowed or contradicts another.
        TypeError: if a value is of the wrong type.

    Examples:
        >>> make_plan(groups_per_batch=4).order, make_plan(groups_per_batch=4, oversample=1).order
        ('launch', 'completion')
    """
    unit, size = _unit(dict(zip(UNITS, (steps_per_batch, trajectories_per_batch, groups_per_batch), strict=True)))
    if order not in (None, "launch", "completion"):
        raise ValueError(f"order={order!r} is not allowed: pass 'launch' or 'completion'")
    if unit == "steps_per_batch" and order == "launch":
        raise ValueError("order='launch' is not allowed with steps_per_batch, whose turns come as they end")
    if not isinstance(keep_surplus, bool):
        raise TypeError(f"keep_surplus={keep_surplus!r} is not allowed: pass True or False")
    if group_filter is not None and not callable(group_filter):
        raise TypeError(f"group_filter={group_filter!r} is not allowed: pass a callable group -> bool, or None")
    for name, value in (("group_filter", group_filter), ("oversample", oversample)):
        if value is not None and unit != "groups_per_batch":
            raise ValueError(f"{name} is not allowed with {unit}: it is about groups, use groups_per_batch")
    if not keep_surplus and oversample is None:
        raise ValueError("keep_surplus=False is not allowed without oversample: there is no surplus")
    if oversample is not None:
        check_int("oversample", oversample, "an int of at least 0, or None", minimum=0)
        if order == "launch":
            raise ValueError(
                "order='launch' is not allowed with oversample, which delivers the groups that are complete first"
            )
    order = order or ("completion" if unit == "steps_per_batch" or oversample is not None else "launch")
    if window is not None:
        check_int("window", window, "an int of at least 1, or None for the number of slots", minimum=1)
        if order == "completion":
            raise ValueError(f"window={window} is not allowed with order='completion', where nothing waits")
    return BatchPlan(unit, size, order, window, group_filter, oversample, keep_surplus)


def _unit(units: dict[str, Any]) -> tuple[str, int]:
    given = {name: value for name, value in units.items() if value is not None}
    if len(given) != 1:
        passed = ", ".join(f"{name}={value!r}" for name, value in given.items()) or "none of them"
        raise ValueError(
            "pass exactly one of steps_per_batch, trajectories_per_batch and groups_per_batch, an int of at least 1; "
            f"got {passed}"
        )
    [(name, value)] = given.items()
    return name, check_int(name, value, "an int of at least 1", minimum=1)


def check_whole(source: Mapping[str, Any]) -> None:
    """Refuses the state of a prompt source for a collector of groups, if it has some that cannot be whole any more.

    Raises:
        ValueError: if members of a group were delivered, and others not.
    """
    if any(len(group["undone"]) < source["repeats"] for group in source["held"]):
        raise ValueError(
            "the state has groups of which some members were delivered, and this collector delivers groups "
            "whole: go on with steps_per_batch or trajectories_per_batch, as before"
        )


def check_int(name: str, value: Any, allowed: str, *, minimum: int, or_: int | None = None) -> int:
    """``value`` if it is an int of at least ``minimum``, or exactly ``or_``.

    Raises:
        TypeError: if it is no int.
        ValueError: if it is out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not allowed: pass {allowed}")
    if value < minimum and value != or_:
        raise ValueError(f"{name}={value!r} is not allowed: pass {allowed}")
    return value
