"""What turns consist of beside their tensors: plans, and the functions that take turns apart and build them by one.

A plan is a nested tuple that can be hashed and pickled: the kinds, keys, batch sizes and dtypes of a turn, without its
values. :func:`describe` makes it; :func:`taker` gives the function that puts a turn's tensors into columns and its
other values into a list, and raises :class:`Different` if the turn is not what the plan describes; :func:`builder`
gives the one that builds such a turn from them. Both go the same way: a TensorDict's own tensors first, then the rest.

Invariant: what a builder gives equals what the taker of the same plan was given, types included. What a plan cannot
describe is an *object*, which is pickled as it is. Pure functions; the compiled ones are kept for the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, MetaData, NonTensorData, NonTensorStack, TensorDict, is_tensorclass

Plan = tuple[Any, ...]
Streams = dict[tuple[str, bool], Any]
Taker = Callable[[Any, dict[tuple[str, bool], list[torch.Tensor]], list[Any]], None]
Builder = Callable[[Streams, Iterator[Any]], Any]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float64, torch.float32,
        torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Different(Exception):
    """A turn is not what the plan describes."""


# Describing


_TENSORDICT_STATE = {
    "_tensordict", "_batch_size", "_device", "_td_dim_names", "_is_locked", "_cache", "_last_op", "_is_shared",
    "_is_memmap", "_lock_parents_weakrefs",
}  # fmt: skip
_STACK_STATE = {
    "tensordicts", "stack_dim", "hook_out", "hook_in", "_batch_size", "_device", "_td_dim_name", "_is_locked", "_cache",
    "_last_op", "_is_shared", "_is_memmap", "_lock_parents_weakrefs",
}  # fmt: skip
_TENSORCLASS_STATE = {"_tensordict", "_non_tensordict", "_is_initialized"}
_GETSTATE = NonTensorData.__getstate__
_OBJECT: Plan = ("object",)
_NONE: Plan = ("none",)


def describe(value: Any) -> Plan:
    """The plan of a turn, or of a part of it."""
    kind = type(value)
    if value is None:
        return _NONE
    if kind is torch.Tensor:
        return _describe_tensor(value)
    if kind is TensorDict:
        return _describe_tensordict(value)
    if kind is LazyStackedTensorDict or kind is NonTensorStack:
        return _describe_stack(value)
    if is_tensorclass(kind) and kind.__getstate__ is _GETSTATE and value.__dict__.keys() <= _TENSORCLASS_STATE:
        if (kind is NonTensorData or kind is MetaData) and _is_bare(value):
            return "non_tensor", kind, value.__dict__["_tensordict"].batch_size
        others = value.__dict__["_non_tensordict"]
        held = describe(value.__dict__["_tensordict"])
        return "tensorclass", kind, held, tuple(others), tuple([describe(other) for other in others.values()])
    return _OBJECT


def _describe_tensor(value: torch.Tensor) -> Plan:
    known = value.dtype in _NAMES and value.layout is torch.strided
    if not known or value.requires_grad or value.is_nested:
        return _OBJECT
    return "tensor", _NAMES[value.dtype], value.dim() == 0


def _describe_tensordict(value: TensorDict) -> Plan:
    state = value.__dict__
    if not state.keys() <= _TENSORDICT_STATE or state.get("_is_locked"):
        return _OBJECT
    names, entries = state["_td_dim_names"], state["_tensordict"]
    plans = tuple([describe(entry) for entry in entries.values()])
    names = None if names is None else tuple(names)
    return "tensordict", state["_batch_size"], state["_device"] is not None, names, tuple(entries), plans


def _describe_stack(value: LazyStackedTensorDict) -> Plan:
    state = value.__dict__
    if not state.keys() <= _STACK_STATE or state["_is_locked"] or state["hook_out"] or state["hook_in"]:
        return _OBJECT
    rows = tuple([describe(row) for row in state["tensordicts"]])
    return "stack", type(value), state["stack_dim"], state["_batch_size"], state.get("_td_dim_name"), rows


def _is_bare(value: Any) -> bool:
    """Whether it holds nothing but its data: the common case, with a plan of its own."""
    state, held = value.__dict__["_non_tensordict"], value.__dict__["_tensordict"]
    plain = held.__dict__
    return (
        len(state) == 3
        and state["_metadata"] is None
        and state["_is_non_tensor"] is True
        and type(held) is TensorDict
        and len(plain) == 4
        and not plain["_tensordict"]
        and plain["_device"] is None
        and plain["_td_dim_names"] is None
    )


# Taking apart, and building


@functools.lru_cache(maxsize=4096)
def taker(plan: Plan) -> Taker:
    """The function that puts what a plan describes into columns and objects; raises if it finds something else."""
    return _TAKERS[plan[0]](*plan[1:])


@functools.lru_cache(maxsize=4096)
def builder(plan: Plan) -> Builder:
    """The function that builds what a plan describes from the tensors and objects that follow in order."""
    return _BUILDERS[plan[0]](*plan[1:])


def _parted(keys: tuple[str, ...], plans: tuple[Plan, ...]) -> tuple[list[Any], list[tuple[str, Plan]]]:
    """The entries that are tensors, as (key, column, dtype), and the others."""
    pairs = list(zip(keys, plans, strict=True))
    tensors = [(key, plan[1:], DTYPES[plan[1]]) for key, plan in pairs if plan[0] == "tensor"]
    return tensors, [(key, plan) for key, plan in pairs if plan[0] != "tensor"]


def _take_tensordict(
    batch_size: torch.Size, placed: bool, names: Any, keys: tuple[str, ...], plans: tuple[Plan, ...]
) -> Taker:
    tensors, rest = _parted(keys, plans)
    others = [(key, taker(plan)) for key, plan in rest]
    named = names is not None

    def take(value: Any, columns: Any, objects: list[Any]) -> None:
        if type(value) is not TensorDict:
            raise Different
        state = value.__dict__
        entries = state["_tensordict"]
        if tuple(entries) != keys or state["_batch_size"] != batch_size or (state["_device"] is not None) != placed:
            raise Different
        if len(state) != 4 and (not state.keys() <= _TENSORDICT_STATE or state.get("_is_locked")):
            raise Different
        if state["_td_dim_names"] is not None and (not named or tuple(state["_td_dim_names"]) != names):
            raise Different
        for key, column, dtype in tensors:
            tensor = entries[key]
            if type(tensor) is not torch.Tensor or tensor.dtype is not dtype:
                raise Different
            columns[column].append(tensor)
        for key, take_entry in others:
            take_entry(entries[key], columns, objects)

    return take


def _build_tensordict(
    batch_size: torch.Size, placed: bool, names: Any, keys: tuple[str, ...], plans: tuple[Plan, ...]
) -> Builder:
    tensors, rest = _parted(keys, plans)
    others = [(key, builder(plan)) for key, plan in rest]
    device = torch.device("cpu") if placed else None
    template = dict.fromkeys(keys)

    def build(streams: Streams, objects: Iterator[Any]) -> TensorDict:
        entries: dict[str, Any] = template.copy()
        for key, column, _ in tensors:
            entries[key] = streams[column]()
        for key, build_entry in others:
            entries[key] = build_entry(streams, objects)
        value = TensorDict.__new__(TensorDict)
        state = value.__dict__
        state["_device"] = device
        state["_tensordict"] = entries
        state["_batch_size"] = batch_size
        state["_td_dim_names"] = None if names is None else list(names)
        return value

    return build


def _take_stack(kind: Any, stack_dim: int, batch_size: torch.Size, name: str | None, plans: tuple[Plan, ...]) -> Taker:
    rows = [taker(plan) for plan in plans]

    def take(value: Any, columns: Any, objects: list[Any]) -> None:
        if type(value) is not kind or len(value.__dict__["tensordicts"]) != len(rows):
            raise Different
        state = value.__dict__
        if state["stack_dim"] != stack_dim or state["_batch_size"] != batch_size or state.get("_td_dim_name") != name:
            raise Different
        if not state.keys() <= _STACK_STATE or state["_is_locked"] or state["hook_out"] or state["hook_in"]:
            raise Different
        for take_row, row in zip(rows, state["tensordicts"], strict=True):
            take_row(row, columns, objects)

    return take


def _build_stack(
    kind: Any, stack_dim: int, batch_size: torch.Size, name: str | None, plans: tuple[Plan, ...]
) -> Builder:
    rows = [builder(plan) for plan in plans]

    def build(streams: Streams, objects: Iterator[Any]) -> Any:
        value = kind.__new__(kind)
        state = value.__dict__
        state["_is_locked"] = None
        state["stack_dim"] = stack_dim
        state["_batch_size"] = batch_size
        state["tensordicts"] = [build_row(streams, objects) for build_row in rows]
        state["hook_out"] = state["hook_in"] = None
        if name is not None:
            state["_td_dim_name"] = name
        return value

    return build


def _take_non_tensor(kind: Any, batch_size: torch.Size) -> Taker:
    def take(value: Any, columns: Any, objects: list[Any]) -> None:
        if type(value) is not kind or not _is_bare(value):
            raise Different
        state = value.__dict__
        if state["_tensordict"].__dict__["_batch_size"] != batch_size:
            raise Different
        objects.append(state["_non_tensordict"]["data"])

    return take


def _build_non_tensor(kind: Any, batch_size: torch.Size) -> Builder:
    def build(streams: Streams, objects: Iterator[Any]) -> Any:
        held = TensorDict.__new__(TensorDict)
        state = held.__dict__
        state["_device"] = None
        state["_tensordict"] = {}
        state["_batch_size"] = batch_size
        state["_td_dim_names"] = None
        value = kind.__new__(kind)
        state = value.__dict__
        state["_tensordict"] = held
        state["_non_tensordict"] = {"data": next(objects), "_is_non_tensor": True, "_metadata": None}
        return value

    return build


def _take_tensorclass(kind: Any, held: Plan, names: tuple[str, ...], plans: tuple[Plan, ...]) -> Taker:
    take_held = taker(held)
    others = [(name, taker(plan)) for name, plan in zip(names, plans, strict=True)]

    def take(value: Any, columns: Any, objects: list[Any]) -> None:
        if type(value) is not kind:
            raise Different
        state = value.__dict__
        rest = state["_non_tensordict"]
        if tuple(rest) != names or (len(state) != 2 and not state.keys() <= _TENSORCLASS_STATE):
            raise Different
        take_held(state["_tensordict"], columns, objects)
        for name, take_other in others:
            take_other(rest[name], columns, objects)

    return take


def _build_tensorclass(kind: Any, held: Plan, names: tuple[str, ...], plans: tuple[Plan, ...]) -> Builder:
    build_held = builder(held)
    template = dict.fromkeys(names)
    others = [(name, builder(plan)) for name, plan in zip(names, plans, strict=True) if plan != _NONE]

    def build(streams: Streams, objects: Iterator[Any]) -> Any:
        value = kind.__new__(kind)
        state = value.__dict__
        state["_tensordict"] = build_held(streams, objects)
        state["_non_tensordict"] = rest = template.copy()
        for name, build_other in others:
            rest[name] = build_other(streams, objects)
        return value

    return build


def _take_none() -> Taker:
    def take(value: Any, columns: Any, objects: list[Any]) -> None:
        if value is not None:
            raise Different

    return take


def _take_tensor(name: str, scalar: bool) -> Taker:
    column, dtype = (name, scalar), DTYPES[name]

    def take(value: Any, columns: Any, objects: list[Any]) -> None:
        if type(value) is not torch.Tensor or value.dtype is not dtype:
            raise Different
        columns[column].append(value)

    return take


_TAKERS: dict[str, Callable[..., Taker]] = {
    "tensor": _take_tensor,
    "object": lambda: lambda value, columns, objects: objects.append(value),
    "none": _take_none,
    "tensordict": _take_tensordict,
    "stack": _take_stack,
    "non_tensor": _take_non_tensor,
    "tensorclass": _take_tensorclass,
}
_BUILDERS: dict[str, Callable[..., Builder]] = {
    "tensor": lambda name, scalar: lambda streams, objects: streams[name, scalar](),
    "object": lambda: lambda streams, objects: next(objects),
    "none": lambda: lambda streams, objects: None,
    "tensordict": _build_tensordict,
    "stack": _build_stack,
    "non_tensor": _build_non_tensor,
    "tensorclass": _build_tensorclass,
}
