"""Plain data: what is taken comes back from a file, in builtin types or exactly; everything else is refused."""

from __future__ import annotations

import enum
import io
from collections import UserDict, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import MemoryMappedTensor, TensorClass, TensorDict, lazy_stack
from tensordict.tensorclass import MetaData, NonTensorData
from test_saving import contents
from torchrl.data.llm import History

from torchrl_llm.encoding import ENCODED, plain, restored


class Number(enum.IntEnum):
    ONE = 1


class Word(str, enum.Enum):
    A = "a"


class Blob(bytes):
    pass


class Mine(TensorClass):
    x: torch.Tensor


Pair = namedtuple("Pair", "a b")


def again(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(plain(value), file)
    file.seek(0)
    return restored(torch.load(file, weights_only=True))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.str_("s"), "s"),
        (np.bytes_(b"s"), b"s"),
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (Number.ONE, 1),
        (Word.A, "a"),
        (Blob(b"x"), b"x"),
        (10**25, 10**25),
        (True, True),
        (None, None),
        (Pair(1, Number.ONE), (1, 1)),
        (UserDict({np.str_("k"): [np.int8(1)]}), {"k": [1]}),
        (MappingProxyType({1: (2, None)}), {1: (2, None)}),
    ],
)
def test_derived_types_become_builtin_ones_that_every_file_can_hold(value: Any, expected: Any) -> None:
    def types(tree: Any) -> Any:
        if isinstance(tree, dict):
            return [(types(key), types(item)) for key, item in tree.items()]
        return (type(tree), [types(item) for item in tree]) if isinstance(tree, (list, tuple)) else type(tree)

    found = again(value)
    assert found == expected and types(found) == types(expected)


def test_tensors_of_every_class_are_saved_as_tensors(tmp_path: Any) -> None:
    found = again([MemoryMappedTensor.from_tensor(torch.arange(3), filename=tmp_path / "x"), torch.ones(2).bfloat16()])
    assert [type(tensor) for tensor in found] == [torch.Tensor] * 2
    assert found[0].tolist() == [0, 1, 2] and found[1].dtype == torch.bfloat16


CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "arguments": {"x": None}}]},
]


@pytest.mark.parametrize(
    "value",
    [
        TensorDict(
            query=NonTensorData("a"), answer=NonTensorData({"x": [1]}), n=torch.tensor(1), inner=TensorDict(a=2)
        ),
        lazy_stack([TensorDict(q="a", n=torch.ones(1)), TensorDict(q="b", n=torch.ones(2))]),
        History.from_chats(CHAT),
        History(role="user", content="a"),
        NonTensorData(np.str_("a")),
        MetaData({"a": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensor_dicts_and_tensor_classes_come_back_as_they_were_wherever_they_are(value: Any) -> None:
    for found in (again(value), again({"a": [value]})["a"][0]):
        assert type(found) is type(value)
        assert contents(found) == contents(value)


@pytest.mark.parametrize("value", [object(), {1}, 1j, np.array([1]), {"a": [Mine(x=torch.ones(1))]}, {ENCODED: 1}])
def test_what_no_file_can_hold_is_refused_with_what_is_allowed(value: Any) -> None:
    kind = "Mine" if isinstance(value, dict) and "a" in value else type(value).__name__
    with pytest.raises(TypeError, match=rf"a value of type {kind} cannot be saved: None, numbers, strings, bytes, ten"):
        plain(value)
