"""How turns travel between processes: columns of tensors, and plans of what they hang in.

:func:`pack` takes turns apart. Their tensors lie end to end in flat columns, one per dtype; what is no tensor (strings,
numbers, anything a user puts in) goes into one buffer; and what is left, the nesting of TensorDicts and tensorclasses,
is a *plan*, which turns of the same make share and which is sent once. :func:`unpack` builds turns from these that
equal those that were packed, key by key, types included.

Invariants: what ``unpack`` gives is writable and owns its memory, tensor by tensor: Ray's object store, which holds the
columns in shared memory, is mapped read-only, where a write in place would end the process; and a turn that stays in a
replay buffer keeps no other turn's memory. What a plan cannot describe (sparse, nested and quantised tensors, locked or
memory-mapped TensorDicts, subclasses) is pickled as it is. Tensors on another device arrive on the CPU.

Pure functions without I/O; any thread may call them.
"""

from __future__ import annotations

import ctypes
import pickle
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_llm.ray.plans import DTYPES, Different, Plan, Taker, builder, describe, taker

# How many different plans a batch is likely to alternate between: turns of a conversation differ in their messages.
RECENT_PLANS = 8

# Their type hints know only the variants with out=.
_unbind_copy: Any = torch.unbind_copy
_split_copy: Any = torch.split_with_sizes_copy


class Column(NamedTuple):
    """The tensors of one dtype, one after the other.

    Attributes:
        dtype: name of the dtype.
        scalar: whether they are all zero-dimensional.
        values: flat, as bytes.
        sizes: elements in each tensor.
        shapes: of those that are neither zero- nor one-dimensional, by their place in the column.
    """

    dtype: str
    scalar: bool
    values: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any]
    shapes: dict[int, tuple[int, ...]]


class Packed(NamedTuple):
    """Turns on their way.

    Attributes:
        plans: pickled list of the different plans.
        plan_of: for each turn its plan.
        columns: the tensors, in the order in which the plans name them.
        objects: pickled list of what is no tensor, in that order.
    """

    plans: bytes
    plan_of: np.ndarray[Any, Any]
    columns: list[Column]
    objects: np.ndarray[Any, Any]

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        arrays = [self.plan_of, self.objects]
        for column in self.columns:
            arrays += [column.values, column.sizes]
        return len(self.plans) + sum(array.nbytes for array in arrays)


def pack(turns: Sequence[TensorDictBase]) -> Packed:
    """Takes turns apart for their journey.

    Examples:
        >>> from tensordict import TensorDict
        >>> turn = TensorDict(ids=torch.arange(3), text="a")
        >>> packed = pack([turn, turn.clone()])
        >>> [(row["ids"].tolist(), row["text"]) for row in unpack(packed)]
        [([0, 1, 2], 'a'), ([0, 1, 2], 'a')]
    """
    try:
        return _pack(turns, RECENT_PLANS)
    except Different:
        # A tensor that its dtype alone did not tell from others, such as a sparse one: look at each of them.
        return _pack(turns, 0)


def _pack(turns: Sequence[TensorDictBase], recent_plans: int) -> Packed:
    plans: dict[Plan, int] = {}
    recent: list[tuple[int, Taker]] = []
    plan_of: list[int] = []
    columns: defaultdict[tuple[str, bool], list[torch.Tensor]] = defaultdict(list)
    objects: list[Any] = []
    for turn in turns:
        for place, (index, take) in enumerate(recent):
            marks, mark = {key: len(tensors) for key, tensors in columns.items()}, len(objects)
            try:
                take(turn, columns, objects)
            except Different:
                for key, tensors in columns.items():
                    del tensors[marks.get(key, 0) :]
                del objects[mark:]
                continue
            if place:
                recent.insert(0, recent.pop(place))
            plan_of.append(index)
            break
        else:
            plan = describe(turn)
            index, take = plans.setdefault(plan, len(plans)), taker(plan)
            take(turn, columns, objects)
            plan_of.append(index)
            recent = [(index, take), *recent][:recent_plans]
    return Packed(
        _pickled(list(plans)),
        np.array(plan_of, np.int32),
        [_column(*key, tensors) for key, tensors in columns.items() if tensors],
        np.frombuffer(_pickled(objects), np.uint8),
    )


def unpack(packed: Packed) -> list[TensorDictBase]:
    """The turns that :func:`pack` was given, built anew."""
    streams = {(column.dtype, column.scalar): iter(_tensors(column)).__next__ for column in packed.columns}
    objects = iter(pickle.loads(packed.objects.data))
    builders = [builder(plan) for plan in pickle.loads(packed.plans)]
    return [builders[index](streams, objects) for index in packed.plan_of.tolist()]


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        # Classes and functions that no module has by name, such as those of a script's.
        return cloudpickle.dumps(value, protocol=5)


# Columns


def _column(name: str, scalar: bool, tensors: list[torch.Tensor]) -> Column:
    dims = [tensor.dim() for tensor in tensors]
    if any(tensor.requires_grad for tensor in tensors) or (any(dims) if scalar else not all(dims)):
        raise Different
    sizes = np.array([tensor.numel() for tensor in tensors], np.int64)
    shapes = {place: tuple(tensors[place].shape) for place, dim in enumerate(dims) if dim > 1}
    try:
        flat = torch.stack(tensors) if scalar else torch.cat([t.reshape(-1) if t.dim() > 1 else t for t in tensors])
    except (RuntimeError, NotImplementedError) as error:
        raise Different from error
    if flat.layout is not torch.strided or flat.is_nested:
        raise Different
    return Column(name, scalar, flat.cpu().view(torch.uint8).numpy(), sizes, shapes)


def _tensors(column: Column) -> Sequence[torch.Tensor]:
    """The column's tensors, each with memory of its own."""
    dtype, values = DTYPES[column.dtype], column.values
    if values.nbytes:
        # By its address: torch warns of memory that is mapped read-only, and here it is read only.
        flat = torch.frombuffer((ctypes.c_char * values.nbytes).from_address(values.ctypes.data), dtype=dtype)
    else:
        flat = torch.empty(0, dtype=dtype)
    if column.scalar:
        return list(_unbind_copy(flat))
    tensors: list[torch.Tensor] = list(_split_copy(flat, column.sizes.tolist()))
    for place, shape in column.shapes.items():
        tensors[place] = tensors[place].view(shape)
    return tensors
