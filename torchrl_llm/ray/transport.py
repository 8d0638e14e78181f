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
import functools
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensorclass

Plan = tuple[Any, ...]
Builder = Callable[[Iterator[torch.Tensor], Iterator[Any]], Any]

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float64, torch.float32,
        torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    )
}  # fmt: skip
# Their type hints know only the variants with out=.
_unbind_copy: Any = torch.unbind_copy
_split_copy: Any = torch.split_with_sizes_copy
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Column(NamedTuple):
    """The tensors of one dtype, one after the other.

    Attributes:
        dtype: name of the dtype.
        scalar: whether they are all zero-dimensional.
        values: flat, as bytes.
        sizes: elements in each tensor.
        numbers: each tensor's number in the order of the walk.
        shapes: of those that are neither zero- nor one-dimensional, by their place in the column.
    """

    dtype: str
    scalar: bool
    values: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any]
    numbers: np.ndarray[Any, Any]
    shapes: dict[int, tuple[int, ...]]


class Packed(NamedTuple):
    """Turns on their way.

    Attributes:
        plans: pickled list of the different plans.
        plan_of: for each turn its plan.
        columns: the tensors.
        occurrences: the numbers of the tensors in the order in which the plans name them.
        objects: pickled list of what is no tensor, in that order.
    """

    plans: bytes
    plan_of: np.ndarray[Any, Any]
    columns: list[Column]
    occurrences: np.ndarray[Any, Any]
    objects: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.plan_of)

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        arrays = [self.plan_of, self.occurrences, self.objects]
        for column in self.columns:
            arrays += [column.values, column.sizes, column.numbers]
        return len(self.plans) + sum(array.nbytes for array in arrays)


def pack(turns: Sequence[TensorDictBase]) -> Packed:
    """Takes turns apart for their journey.

    Examples:
        >>> turn = TensorDict(ids=torch.arange(3), text="a")
        >>> packed = pack([turn, turn.clone()])
        >>> [(row["ids"].tolist(), row["text"]) for row in unpack(packed)]
        [([0, 1, 2], 'a'), ([0, 1, 2], 'a')]
    """
    walk = _Walk()
    plans: dict[Plan, int] = {}
    plan_of = [plans.setdefault(walk(turn), len(plans)) for turn in turns]
    return Packed(
        _pickled(list(plans)),
        np.array(plan_of, np.int32),
        [_column(*key, entries) for key, entries in walk.columns.items()],
        np.array(walk.occurrences, np.int32),
        np.frombuffer(_pickled(walk.objects), np.uint8),
    )


def unpack(packed: Packed) -> list[TensorDictBase]:
    """The turns that :func:`pack` was given, built anew."""
    by_number: list[Any] = [None] * sum(len(column.numbers) for column in packed.columns)
    for column in packed.columns:
        for number, tensor in zip(column.numbers.tolist(), _tensors(column), strict=True):
            by_number[number] = tensor
    tensors = iter([by_number[number] for number in packed.occurrences.tolist()])
    objects = iter(pickle.loads(packed.objects.data))
    builders = [_builder(plan) for plan in pickle.loads(packed.plans)]
    return [builders[index](tensors, objects) for index in packed.plan_of.tolist()]


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        # Classes and functions that no module has by name, such as those of a script's.
        return cloudpickle.dumps(value, protocol=5)


# Columns


def _column(dtype: torch.dtype, scalar: bool, entries: list[tuple[int, torch.Tensor]]) -> Column:
    numbers = np.array([number for number, _ in entries], np.int32)
    tensors = [tensor for _, tensor in entries]
    shapes: dict[int, tuple[int, ...]] = {}
    if scalar:
        flat, sizes = torch.stack(tensors), np.ones(len(tensors), np.int64)
    else:
        for place, tensor in enumerate(tensors):
            if tensor.dim() != 1:
                shapes[place] = tuple(tensor.shape)
                tensors[place] = tensor.reshape(-1)
        flat, sizes = torch.cat(tensors), np.array([len(tensor) for tensor in tensors], np.int64)
    return Column(_DTYPE_NAMES[dtype], scalar, flat.view(torch.uint8).numpy(), sizes, numbers, shapes)


def _tensors(column: Column) -> Sequence[torch.Tensor]:
    """The column's tensors, each with memory of its own."""
    dtype, values = _DTYPES[column.dtype], column.values
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


# Taking apart


class _Walk:
    """Goes through turns, gives their plans, and keeps their tensors and objects in the order of its way."""

    def __init__(self) -> None:
        self.columns: defaultdict[tuple[torch.dtype, bool], list[tuple[int, torch.Tensor]]] = defaultdict(list)
        self.occurrences: list[int] = []
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._by_type: dict[type, Callable[[Any], Plan]] = {
            torch.Tensor: self._tensor,
            TensorDict: self._tensordict,
            LazyStackedTensorDict: self._stack,
            NonTensorStack: self._stack,
            NonTensorData: self._non_tensor,
            type(None): lambda value: _NONE,
        }

    def __call__(self, value: Any) -> Plan:
        kind = type(value)
        handler = self._by_type.get(kind)
        if handler is None:
            handler = self._tensorclass if is_tensorclass(kind) and kind.__getstate__ is _GETSTATE else self._object
            self._by_type[kind] = handler
        return handler(value)

    def _object(self, value: Any) -> Plan:
        self.objects.append(value)
        return _OBJECT

    def _tensor(self, value: torch.Tensor) -> Plan:
        number = self._numbers.get(id(value))
        if number is None:
            dtype = value.dtype
            if dtype not in _DTYPE_NAMES or value.layout is not torch.strided or value.requires_grad or value.is_nested:
                return self._object(value)
            number = self._numbers[id(value)] = len(self._numbers)
            if not value.is_cpu:
                value = value.cpu()
            if dtype.is_complex:
                value = value.resolve_conj()
            if value.is_neg():
                value = value.resolve_neg()
            self.columns[dtype, value.dim() == 0].append((number, value))
        # A tensor that is in two places is sent once, and stays one.
        self.occurrences.append(number)
        return _TENSOR

    def _tensordict(self, value: TensorDict) -> Plan:
        state = value.__dict__
        if not state.keys() <= _TENSORDICT_STATE or state.get("_is_locked"):
            return self._object(value)
        entries = state["_tensordict"]
        return (
            "tensordict",
            state["_batch_size"],
            _device(state["_device"]),
            _names(state["_td_dim_names"]),
            tuple(entries),
            tuple([self(entry) for entry in entries.values()]),
        )

    def _stack(self, value: LazyStackedTensorDict) -> Plan:
        state = value.__dict__
        if not state.keys() <= _STACK_STATE or state["_is_locked"] or state["hook_out"] or state["hook_in"]:
            return self._object(value)
        rows = tuple([self(row) for row in state["tensordicts"]])
        return "stack", type(value), state["stack_dim"], state["_batch_size"], state.get("_td_dim_name"), rows

    def _non_tensor(self, value: NonTensorData) -> Plan:
        state = value.__dict__["_non_tensordict"]
        held = value.__dict__["_tensordict"]
        # The common case, with a plan of its own: there are dozens of them in a conversation.
        if type(held) is TensorDict and len(state) == 3 and state["_metadata"] is None and state["_is_non_tensor"]:
            plain = held.__dict__
            bare = plain.keys() == _BARE_TENSORDICT_STATE and not plain["_tensordict"]
            if bare and plain["_device"] is None and plain["_td_dim_names"] is None:
                self.objects.append(state["data"])
                return "non_tensor", plain["_batch_size"]
        return self._tensorclass(value)

    def _tensorclass(self, value: Any) -> Plan:
        state = value.__dict__
        if not state.keys() <= _TENSORCLASS_STATE:
            return self._object(value)
        others = state["_non_tensordict"]
        # The TensorDict first: its entries are built before the others.
        held = self(state["_tensordict"])
        return "tensorclass", type(value), held, tuple(others), tuple([self(other) for other in others.values()])


_TENSOR: Plan = ("tensor",)
_OBJECT: Plan = ("object",)
_NONE: Plan = ("none",)
_TENSORDICT_STATE = {
    "_tensordict", "_batch_size", "_device", "_td_dim_names", "_is_locked", "_cache", "_last_op", "_is_shared",
    "_is_memmap", "_lock_parents_weakrefs",
}  # fmt: skip
_BARE_TENSORDICT_STATE = {"_tensordict", "_batch_size", "_device", "_td_dim_names"}
_STACK_STATE = {
    "tensordicts", "stack_dim", "hook_out", "hook_in", "_batch_size", "_device", "_td_dim_name", "_is_locked", "_cache",
    "_last_op", "_is_shared", "_is_memmap", "_lock_parents_weakrefs",
}  # fmt: skip
_TENSORCLASS_STATE = {"_tensordict", "_non_tensordict", "_is_initialized"}
_GETSTATE = NonTensorData.__getstate__


def _device(device: torch.device | None) -> str | None:
    return None if device is None else "cpu"


def _names(names: Any) -> tuple[Any, ...] | None:
    return None if names is None else tuple(names)


# Building


@functools.lru_cache(maxsize=4096)
def _builder(plan: Plan) -> Builder:
    """The function that builds what a plan describes from the tensors and objects that follow in order."""
    return _BUILDERS[plan[0]](*plan[1:])


def _build_tensordict(
    batch_size: torch.Size, device: str | None, names: Any, keys: tuple[str, ...], plans: tuple[Plan, ...]
) -> Builder:
    items = [(key, _builder(plan)) for key, plan in zip(keys, plans, strict=True)]
    at = None if device is None else torch.device(device)

    def build(tensors: Iterator[torch.Tensor], objects: Iterator[Any]) -> TensorDict:
        value = TensorDict.__new__(TensorDict)
        state = value.__dict__
        state["_device"] = at
        state["_tensordict"] = {key: build_entry(tensors, objects) for key, build_entry in items}
        state["_batch_size"] = batch_size
        state["_td_dim_names"] = None if names is None else list(names)
        return value

    return build


def _build_stack(
    kind: Any, stack_dim: int, batch_size: torch.Size, name: str | None, plans: tuple[Plan, ...]
) -> Builder:
    rows = [_builder(plan) for plan in plans]

    def build(tensors: Iterator[torch.Tensor], objects: Iterator[Any]) -> Any:
        value = kind.__new__(kind)
        state = value.__dict__
        state["_is_locked"] = None
        state["stack_dim"] = stack_dim
        state["_batch_size"] = batch_size
        state["tensordicts"] = [build_row(tensors, objects) for build_row in rows]
        state["hook_out"] = state["hook_in"] = None
        if name is not None:
            state["_td_dim_name"] = name
        return value

    return build


def _build_non_tensor(batch_size: torch.Size) -> Builder:
    def build(tensors: Iterator[torch.Tensor], objects: Iterator[Any]) -> NonTensorData:
        held = TensorDict.__new__(TensorDict)
        state = held.__dict__
        state["_device"] = None
        state["_tensordict"] = {}
        state["_batch_size"] = batch_size
        state["_td_dim_names"] = None
        value = NonTensorData.__new__(NonTensorData)
        state = value.__dict__
        state["_tensordict"] = held
        state["_non_tensordict"] = {"data": next(objects), "_is_non_tensor": True, "_metadata": None}
        return value

    return build


def _build_tensorclass(kind: Any, held: Plan, names: tuple[str, ...], plans: tuple[Plan, ...]) -> Builder:
    build_held = _builder(held)
    others = [(name, _builder(plan)) for name, plan in zip(names, plans, strict=True)]

    def build(tensors: Iterator[torch.Tensor], objects: Iterator[Any]) -> Any:
        value = kind.__new__(kind)
        state = value.__dict__
        state["_tensordict"] = build_held(tensors, objects)
        state["_non_tensordict"] = {name: build_other(tensors, objects) for name, build_other in others}
        return value

    return build


_BUILDERS: dict[str, Callable[..., Builder]] = {
    "tensor": lambda: lambda tensors, objects: next(tensors),
    "object": lambda: lambda tensors, objects: next(objects),
    "none": lambda: lambda tensors, objects: None,
    "tensordict": _build_tensordict,
    "stack": _build_stack,
    "non_tensor": _build_non_tensor,
    "tensorclass": _build_tensorclass,
}
