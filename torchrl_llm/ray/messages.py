"""What workers and the driver tell each other.

A batch travels in two parts, a :class:`Header`, which the driver reads, and its turns, which go to whoever reads them:
the driver, or the actor of a queue or a replay buffer without a way through the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_llm.ray.errors import WireError
from torchrl_llm.ray.transport import Packed, unpack

# Trajectories of one life of a worker: their ids lie under those of the next life.
LIFE = 1 << 32


class TurnHead(NamedTuple):
    """A turn's ids and version, the version that its trajectory began with, and whether that ends with it."""

    traj_id: int
    step: int
    env_id: int
    policy_id: int
    group_id: int
    group_index: int
    policy_version: int
    began_with: int
    done: bool

    @property
    def member(self) -> tuple[int, int]:
        """Which member of which group it is."""
        return self.group_id, self.group_index


@dataclass(frozen=True)
class Header:
    """What the driver knows of a batch before its turns.

    Attributes:
        number: of the worker's messages, from 0 in each life.
        heads: one per turn.
        report: the worker's books at that moment.
        end: whether the worker will send no more.
        error: what ended it, if it did not come to its end by itself.
    """

    number: int
    heads: list[TurnHead] = field(default_factory=list)
    report: Mapping[str, Any] = field(default_factory=dict)
    end: bool = False
    error: WireError | None = None


class Parcel:
    """The turns of a batch; whoever unpickles it has it as it is.

    Args:
        packed: the turns.
        opened_by: how many receivers will read it: the last one gets the batch instead of the parcel. 0 is for
            :meth:`open`; 1 for a replay buffer's actor, which extends by a batch; 2 for a queue, whose actor only
            keeps the parcel, so that the one who takes it from the queue gets the batch.
    """

    def __init__(self, packed: Packed, opened_by: int = 0) -> None:
        self.packed = packed
        self.opened_by = opened_by

    def open(self) -> TensorDictBase:
        """The batch: a one-dimensional lazy stack of turns."""
        return open_parcel(self.packed)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.opened_by == 0:
            return Parcel, (self.packed, 0)
        if self.opened_by == 1:
            return open_parcel, (self.packed,)
        return Parcel, (self.packed, self.opened_by - 1)


def open_parcel(packed: Packed) -> LazyStackedTensorDict:
    """The turns as a batch."""
    return LazyStackedTensorDict(*unpack(packed), stack_dim=0)
