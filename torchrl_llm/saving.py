"""Saving batches and replay buffers of text rows, exactly and without pickled code.

A file is what ``torch.save`` makes of plain data, so that ``torch.load(weights_only=True)`` reads it. It is a dict:

``format``, ``version``
    ``"torchrl_llm batch"`` and 1.
``rows``
    a tree per row: ``["t", dtype, number]`` for a tensor, ``["n", value]`` (or ``"m"``) for other data,
    ``["d", {key: tree}]`` for a nested TensorDict, ``["c", class, tree, {key: value}]`` for a tensor class
    (``History``, ``Text``, ...) and ``["l", [tree, ...]]`` for a stack of parts; batch sizes stand beside them.
``values``, ``shapes``
    by dtype: all tensors' values one after another, and their shapes.

Pure functions; a tensor that several entries share is stored once.
"""

from __future__ import annotations

import importlib
import math
import os
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection
from tensordict.tensorclass import MetaData, NonTensorData, is_non_tensor
from torchrl.data import ReplayBuffer

from torchrl_llm.prompt_line import plain

FORMAT, VERSION = "torchrl_llm batch", 1
# Tensor classes are found by their name in these packages only: a file is data, and runs nothing.
PACKAGES = ("torchrl", "tensordict")


def save_batch(batch: TensorDictBase, path: str | os.PathLike[str]) -> None:
    """Saves a batch of turns, or any one-dimensional TensorDict.

    Args:
        batch: of shape ``(T,)``; tensors are saved from wherever they are, and loaded to the CPU.
        path: the file.

    Raises:
        TypeError: if an entry is neither a tensor nor plain data (``None``, numbers, strings, lists, dicts).
        ValueError: if the batch is not one-dimensional.
    """
    if batch.ndim != 1:
        raise ValueError(f"the batch has batch_size={tuple(batch.batch_size)}; a one-dimensional one is needed")
    encoder = _Encoder()
    rows = [encoder.encode(row) for row in batch.unbind(0)]
    # Written beside its place first, so that a file under its name is always whole.
    partial = f"{os.fspath(path)}.part"
    torch.save({"format": FORMAT, "version": VERSION, "rows": rows, **encoder.columns()}, partial)
    os.replace(partial, path)


def load_batch(path: str | os.PathLike[str]) -> LazyStackedTensorDict:
    """Loads what :func:`save_batch` saved: a one-dimensional lazy stack of its rows, equal in every entry.

    Raises:
        ValueError: if the file holds something else.
    """
    content = torch.load(path, weights_only=True)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{os.fspath(path)} holds no batch of turns: it was not made by save_batch")
    if content["version"] != VERSION:
        raise ValueError(f"{os.fspath(path)} has version {content['version']} of the format; known is {VERSION}")
    decode = _Decoder(content)
    return LazyStackedTensorDict(*[decode(row) for row in content["rows"]], stack_dim=0)


def save_replay_buffer(buffer: ReplayBuffer, path: str | os.PathLike[str]) -> None:
    """Saves all rows of a replay buffer; torchrl's own ``dumps`` and ``state_dict`` fail on text.

    Raises:
        ValueError: if the buffer is empty.
        TypeError: see :func:`save_batch`.
    """
    if not len(buffer):
        raise ValueError("the replay buffer is empty: there is nothing to save")
    save_batch(buffer._storage[torch.arange(len(buffer))], path)


def load_replay_buffer(buffer: ReplayBuffer, path: str | os.PathLike[str]) -> None:
    """Puts the rows of a file at the end of a replay buffer, as they are: its transforms are not applied to them.

    Raises:
        ValueError: if the file holds no batch.
    """
    buffer._extend(load_batch(path))


class _Encoder:
    """Makes trees of rows, and collects their tensors."""

    def __init__(self) -> None:
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._known: dict[int, tuple[torch.Tensor, list[Any]]] = {}

    def encode(self, value: Any) -> list[Any]:
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
        return {
            "values": {
                dtype: torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])
                for dtype, tensors in self._tensors.items()
            },
            "shapes": {dtype: [list(tensor.shape) for tensor in tensors] for dtype, tensors in self._tensors.items()},
        }


class _Decoder:
    """Makes rows of trees."""

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
        kind = tree[0]
        if kind == "t":
            # Of its own: nobody expects that one entry shares its memory with another.
            return self._tensors[tree[1]][tree[2]].clone()
        if kind in "nm":
            return (NonTensorData if kind == "n" else MetaData)(tree[1], batch_size=tree[2])
        if kind == "d":
            return TensorDict._new_unsafe({key: self(item) for key, item in tree[1].items()}, torch.Size(tree[2]))
        if kind == "l":
            parts = [self(part) for part in tree[1]]
            if all(isinstance(part, (NonTensorData, NonTensorStack)) for part in parts):
                return NonTensorStack(*parts, stack_dim=tree[2])
            return LazyStackedTensorDict(*parts, stack_dim=tree[2])
        return _class(tree[1])._from_tensordict(self(tree[2]), dict(tree[3]))


def _class(name: str) -> Any:
    module, _, qualname = name.rpartition(".")
    if module.split(".")[0] not in PACKAGES:
        raise ValueError(f"the file names the class {name}; only classes of {' and '.join(PACKAGES)} are loaded")
    found = getattr(importlib.import_module(module), qualname)
    if not is_tensor_collection(found):
        raise ValueError(f"the file names {name}, which is no tensor class")
    return found
