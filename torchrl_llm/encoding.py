"""Values as plain data, which ``torch.load(weights_only=True)`` reads, and the same values made of them again.

Plain data are ``None``, numbers, strings, bytes, tensors, and lists, tuples and dicts of them. A TensorDict or a tensor
class becomes a tree, whose tensors stand beside it:

tree
    ``["t", dtype, number]`` for a tensor, ``["n", value]`` (or ``"m"``) for other data, ``["d", {key: tree}]`` for a
    TensorDict, ``["c", class, tree, {key: value}]`` for a tensor class (``History``, ``Text``, ...) and
    ``["l", [tree, ...]]`` for a stack of parts; batch sizes stand beside them.
``values``, ``shapes``
    by dtype: all tensors' values one after another, and their shapes.

Pure functions; a tensor that several entries share is stored once. Invariant: what is taken can be loaded.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection
from tensordict.tensorclass import MetaData, NonTensorData, is_non_tensor

# Tensor classes are found by their name in these packages only: a file is data, and runs nothing.
PACKAGES = ("torchrl", "tensordict")
# Marks the dict that a TensorDict or tensor class inside plain data becomes.
ENCODED = "torchrl_llm tensors"


def plain(value: Any) -> Any:
    """``value`` as plain data; :func:`restored` makes it again.

    Mappings become dicts, numbers, strings, lists and tuples of derived types (``numpy.float64``, ``IntEnum``, a named
    tuple) those of the builtin ones. TensorDicts and tensor classes of torchrl and tensordict are kept exactly.

    Raises:
        TypeError: if it is made of anything else.

    Examples:
        >>> plain({"score": np.float64(0.5), "tags": ("a", b"b", None)})
        {'score': 0.5, 'tags': ('a', b'b', None)}
        >>> restored(plain([TensorDict(answer="42")]))[0]["answer"]
        '42'
    """
    value = python_number(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return "".join((value,))
    if isinstance(value, bytes):
        return b"".join((value,))
    if isinstance(value, torch.Tensor):
        return value if type(value) in (torch.Tensor, torch.nn.Parameter) else value.as_subclass(torch.Tensor)
    if is_tensor_collection(value):
        encoder = Encoder()
        return {ENCODED: encoder.encode(value), **encoder.columns()}
    if isinstance(value, Mapping) and ENCODED not in value:
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    raise TypeError(_refusal(value))


def restored(value: Any) -> Any:
    """What :func:`plain` was made of."""
    if isinstance(value, dict):
        if ENCODED in value:
            return Decoder(value)(value[ENCODED])
        return {restored(key): restored(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(restored(item) for item in value)
    return value


def python_number(value: Any) -> Any:
    """A number of numpy's as Python's; anything else as it is.

    Examples:
        >>> python_number(np.int64(3)), python_number(np.bool_(True)), python_number("3")
        (3, True, '3')
    """
    number = isinstance(value, (np.bool_, np.integer, np.floating)) and not isinstance(value, np.timedelta64)
    return value.item() if number else value


def _refusal(value: Any) -> str:
    return (
        f"a value of type {type(value).__name__} cannot be saved: None, numbers, strings, bytes, tensors, TensorDicts "
        "and tensor classes of torchrl and tensordict can, and lists, tuples and dicts of them"
    )


class Encoder:
    """Makes trees of rows, and collects their tensors."""

    def __init__(self) -> None:
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._known: dict[int, tuple[torch.Tensor, list[Any]]] = {}

    def encode(self, value: Any) -> list[Any]:
        """The tree of a value; raises TypeError if it cannot be saved."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (NonTensorData, MetaData)):
            kind = "n" if isinstance(value, NonTensorData) else "m"
            return [kind, plain(value.data), list(value.batch_size)]
        if isinstance(value, (LazyStackedTensorDict, NonTensorStack)):
            return self._stack(value)
        if is_tensor_collection(value) and not is_non_tensor(value):
            if isinstance(value, TensorDictBase):
                return ["d", self._items(value), list(value.batch_size)]
            return self._tensor_class(value)
        return ["n", plain(value), []]

    def _stack(self, value: Any) -> list[Any]:
        return ["l", [self.encode(part) for part in value.tensordicts], value.stack_dim]

    def _tensor_class(self, value: Any) -> list[Any]:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name.split(".")[0] not in PACKAGES:
            raise TypeError(_refusal(value))  # It would be refused when it is loaded.
        others = {key: plain(other) for key, other in value._non_tensordict.items()}
        return ["c", name, self.encode(value._tensordict), others]

    def _items(self, value: TensorDictBase) -> dict[str, Any]:
        return {key: self.encode(value._get_str(key, None)) for key in value.keys()}

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        known = self._known.get(id(tensor))
        if known is None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            column = self._tensors.setdefault(dtype, [])
            column.append(tensor)
            known = self._known[id(tensor)] = (tensor, ["t", dtype, len(column) - 1])
        return known[1]

    def columns(self) -> dict[str, Any]:
        """The tensors of all trees: ``values`` and ``shapes`` by dtype."""
        return {
            "values": {
                dtype: torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])
                for dtype, tensors in self._tensors.items()
            },
            "shapes": {dtype: [list(tensor.shape) for tensor in tensors] for dtype, tensors in self._tensors.items()},
        }


class Decoder:
    """Makes rows of trees.

    Args:
        content: what :meth:`Encoder.columns` gave.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._tensors = {
            dtype: [
                values.view(shape)
                for values, shape in zip(
                    content["values"][dtype].split([math.prod(shape) for shape in shapes]), shapes, strict=True
                )
            ]
            for dtype, shapes in content["shapes"].items()
        }

    def __call__(self, tree: list[Any]) -> Any:
        """The value of a tree."""
        kind = tree[0]
        if kind == "t":
            # Of its own: nobody expects that one entry shares its memory with another.
            return self._tensors[tree[1]][tree[2]].clone()
        if kind in "nm":
            return (NonTensorData if kind == "n" else MetaData)(restored(tree[1]), batch_size=tree[2])
        if kind == "d":
            return TensorDict._new_unsafe({key: self(item) for key, item in tree[1].items()}, torch.Size(tree[2]))
        if kind == "l":
            parts = [self(part) for part in tree[1]]
            if all(isinstance(part, (NonTensorData, NonTensorStack)) for part in parts):
                return NonTensorStack(*parts, stack_dim=tree[2])
            return LazyStackedTensorDict(*parts, stack_dim=tree[2])
        return _class(tree[1])._from_tensordict(self(tree[2]), restored(tree[3]))


def _class(name: str) -> Any:
    module, _, qualname = name.rpartition(".")
    if module.split(".")[0] not in PACKAGES:
        raise ValueError(f"the file names the class {name}; only classes of {' and '.join(PACKAGES)} are loaded")
    found = getattr(importlib.import_module(module), qualname)
    if not is_tensor_collection(found):
        raise ValueError(f"the file names {name}, which is no tensor class")
    return found
