"""Equality of what two policies wrote: names, types, dtypes, shapes, values; NaN equals NaN."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.tensorclass import NonTensorDataBase


def assert_same(expected: Any, given: Any, where: str = "output") -> None:
    """Fails, naming the place, where ``given`` differs from ``expected`` in anything that a reader can see."""
    assert type(given) is type(expected), f"{where}: {type(given)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}")
        assert given.layout == expected.layout and given.is_nested == expected.is_nested, where
    elif not is_tensor_collection(expected):
        assert given == expected, f"{where}: {given!r} instead of {expected!r}"
    else:
        assert given.batch_size == expected.batch_size, f"{where}: {given.batch_size} instead of {expected.batch_size}"
        assert given.device == expected.device, where
        if isinstance(expected, NonTensorDataBase):
            assert_same(expected.tolist(), given.tolist(), f"{where}.data")
        else:
            _assert_same_fields(expected, given, where)


def _assert_same_fields(expected: Any, given: Any, where: str) -> None:
    keys = set(map(str, expected.keys()))
    assert set(map(str, given.keys())) == keys, f"{where}: {sorted(given.keys())} instead of {sorted(keys)}"
    if not isinstance(expected, TensorDictBase):  # a tensorclass also has fields that are None, and its attributes
        keys |= set(type(expected).__dataclass_fields__)
        for key in keys:
            assert_same(getattr(expected, key), getattr(given, key), f"{where}.{key}")
        # How a value that is no tensor is held decides what a stack of rows gives: MetaData one value, others a list.
        expected, given = expected.to_tensordict(), given.to_tensordict()
    for key in keys:
        assert_same(expected.get(key, None), given.get(key, None), f"{where}[{key!r}]")
