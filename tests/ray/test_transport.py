"""Turns that were packed and unpacked equal those that were packed."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import cloudpickle
import fakes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same import assert_same
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_llm import LLMCollector
from torchrl_llm.ray.messages import Parcel
from torchrl_llm.ray.transport import Packed, pack, unpack


class Own(TensorClass):
    """A tensorclass of the user's."""

    score: torch.Tensor
    label: str | None = None


@dataclass
class Plain:
    """Any object."""

    value: int


def sent(turns: list[TensorDictBase]) -> list[TensorDictBase]:
    """As they arrive: through a pickle whose arrays lie in memory that must not be written to."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(pack(turns), protocol=5, buffer_callback=buffers.append)
    packed: Packed = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
    assert not any(column.values.flags.writeable for column in packed.columns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return unpack(packed)


def a_turn(index: int = 0, **more: Any) -> TensorDict:
    ids = torch.arange(3 + index)
    history = History.from_chats(
        [[{"role": "user", "content": "é 😀"}, {"role": "assistant", "content": "b" * index}]]
    )[0]
    turn = TensorDict(
        history=ChatHistory(prompt=history[:1], full=history),
        text=Text(prompt="p", response="r" * index, full=None),
        tokens=Tokens(prompt=ids, response=ids[:1], full=ids, padded=False),
        masks=Masks(all_attention_mask=ids > 0, all_assistant_mask=ids > 1, padded=False),
        log_probs=LogProbs(response=-ids.float(), padded=False),
        query=f"query {index}",
        answer=NonTensorData({"number": index, "list": [1, 2.5, None]}, batch_size=()),
        number=MetaData(index),
        nothing=NonTensorData(None, batch_size=()),
        next=TensorDict(done=torch.tensor([index % 2 == 0]), reward=torch.full((1, 2), 0.5)),
        collector=TensorDict(step=torch.tensor(index)),
    )
    for key, value in more.items():
        turn[key] = value
    return turn


def test_every_kind_of_entry_arrives_as_it_was() -> None:
    turns = [a_turn(index) for index in range(5)]
    arrived = sent(turns)
    assert len(arrived) == 5
    for before, after in zip(turns, arrived, strict=True):
        assert_same(before, after)
        assert before["text"].full is after["text"].full is None
        assert after["history"].full[0].content == "é 😀"
        assert after["answer"] == before["answer"]
        assert type(after.get("number")) is MetaData


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (5,), (2, 3), (2, 0, 3)], ids=str)
def test_every_dtype_and_shape_arrives_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(30).float()[: max(1, torch.Size(shape).numel())]).to(dtype)
    tensor = tensor[: torch.Size(shape).numel()].reshape(shape)
    [arrived] = sent([TensorDict(x=tensor, y=torch.zeros(2))])
    assert arrived["x"].dtype is dtype and arrived["x"].shape == tensor.shape
    assert torch.equal(arrived["x"], tensor)


def test_what_no_plan_describes_is_pickled_as_it_is() -> None:
    turn = TensorDict(
        sparse=torch.eye(3).to_sparse(),
        learnt=torch.ones(2, requires_grad=True),
        parameter=torch.nn.Parameter(torch.ones(1)),
        conjugate=torch.tensor([1 + 2j]).conj(),
        turned=torch.arange(6).reshape(2, 3).T,
        own=Own(score=torch.ones(2), label="x", batch_size=()),
        plain=NonTensorData(Plain(3), batch_size=()),
        array=NonTensorData(np.arange(3), batch_size=()),
        ragged=lazy_stack([TensorDict(x=torch.ones(n), s="a" * n) for n in (1, 2)]),
        strings=lazy_stack([NonTensorData(text, batch_size=()) for text in "ab"]),
    )
    turn.get("ragged").names = None
    locked = TensorDict(inner=TensorDict(a=torch.ones(1)).lock_())
    placed = TensorDict(a=torch.zeros(2, 3), batch_size=(2,), device="cpu", names=["row"])
    first, second, third = sent([turn, locked, placed])
    assert torch.equal(first["sparse"].to_dense(), torch.eye(3)) and first["sparse"].layout is torch.sparse_coo
    assert first["learnt"].requires_grad and isinstance(first["parameter"], torch.nn.Parameter)
    assert first["conjugate"].tolist() == [1 - 2j]
    assert first["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert type(first["own"]) is Own and first["own"].label == "x"
    assert first["plain"] == Plain(3) and first["array"].tolist() == [0, 1, 2]
    assert [row["x"].tolist() for row in first["ragged"].unbind(0)] == [[1.0], [1.0, 1.0]]
    assert list(first["strings"]) == ["a", "b"]
    assert second["inner"].is_locked
    assert_same(placed, third)
    assert third.names == ["row"] and third.device == torch.device("cpu")


def test_a_class_that_no_module_has_by_name_travels() -> None:
    @dataclass
    class Local:
        value: int

    [arrived] = unpack(
        cloudpickle.loads(cloudpickle.dumps(pack([TensorDict(x=NonTensorData(Local(4), batch_size=()))])))
    )
    assert arrived["x"].value == 4


def test_a_reader_may_write_in_place_and_changes_nothing_else() -> None:
    first, second = sent([a_turn(1), a_turn(1)])
    first["tokens"].full += 100
    first["next", "done"].fill_(True)
    first["collector", "step"].add_(5)
    first["tokens"].prompt.resize_(10)
    assert second["tokens"].full.tolist() == [0, 1, 2, 3]
    assert not second["next", "done"].any()
    assert second["collector", "step"] == 1
    first["new"] = torch.zeros(1)
    assert "new" not in second.keys()


def test_a_turn_keeps_no_other_turns_memory() -> None:
    _, arrived = sent([TensorDict(a=torch.arange(1000)), TensorDict(a=torch.arange(5))])
    assert arrived["a"].untyped_storage().nbytes() == 40
    assert len(pickle.dumps(arrived)) < 4000


def test_a_turn_that_only_looks_like_the_one_before_arrives_as_it_was() -> None:
    """Plans are tried by what is cheap to see; whatever else a turn is, it must be found out."""
    plain = TensorDict(x=torch.ones(2), y=TensorDict(z=torch.ones(2)))
    others = [
        TensorDict(x=torch.tensor(1.0), y=TensorDict(z=torch.ones(2))),
        TensorDict(x=torch.ones(2, requires_grad=True), y=TensorDict(z=torch.ones(2))),
        TensorDict(x=torch.ones(2).to_sparse(), y=TensorDict(z=torch.ones(2))),
        TensorDict(x=torch.ones(2).double(), y=TensorDict(z=torch.ones(2))),
        TensorDict(x=torch.ones(2), y=TensorDict(z=torch.ones(2)).lock_()),
        TensorDict(x=torch.ones(2), y=TensorDict(z=torch.ones(2), batch_size=(2,))),
        TensorDict(x=torch.ones(2), y=TensorDict(z=torch.ones(2), device="cpu")),
        TensorDict(x=torch.ones(2), y="text"),
        TensorDict(x=torch.ones(2), y=Own(score=torch.ones(2), label=None, batch_size=())),
        TensorDict(y=TensorDict(z=torch.ones(2)), x=torch.ones(2)),
        TensorDict(x=torch.ones(2), y=TensorDict(z=MetaData("a"))),
    ]
    for other in others:
        for turns in ([plain, other, plain], [other, plain, other]):
            for before, after in zip(turns, sent(turns), strict=True):
                x, arrived = before["x"], after["x"]
                assert arrived.layout is x.layout and arrived.requires_grad == x.requires_grad
                assert arrived.shape == x.shape and arrived.dtype is x.dtype
                assert list(before.keys()) == list(after.keys())
                if x.layout is torch.strided:
                    assert_same(before, after)
                assert before.get("y").is_locked == after.get("y").is_locked


def test_turns_of_the_same_make_share_their_plan() -> None:
    plans = [pickle.loads(pack([a_turn(3) for _ in range(n)]).plans) for n in (1, 50)]
    assert plans[0] == plans[1] and len(plans[0]) == 1


def test_no_turns_and_empty_turns_travel() -> None:
    assert sent([]) == []
    [arrived] = sent([TensorDict()])
    assert_same(TensorDict(), arrived)


@pytest.mark.parametrize("length", [1, 3])
def test_the_turns_of_a_collector_arrive_as_they_were(length: int) -> None:
    with LLMCollector(lambda: fakes.chat_env(length=length), fakes.chat_echo, steps_per_batch=6) as collector:
        batch = next(collector)
    for before, after in zip(batch.unbind(0), sent(list(batch.unbind(0))), strict=True):
        assert_same(before, after)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=5),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.lists(st.integers(-100, 100), max_size=4).map(torch.tensor),
    st.lists(st.booleans(), max_size=3).map(lambda values: torch.tensor(values, dtype=torch.bool)),
    st.integers(-5, 5).map(torch.tensor),
)  # fmt: skip
names = st.text("abcd", min_size=1, max_size=2)
trees = st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=12)


def tree(value: Any) -> Any:
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        made = TensorDict()
        for key, entry in value.items():
            entry = tree(entry)
            plain = isinstance(entry, (torch.Tensor, TensorDictBase))
            made[key] = entry if plain else NonTensorData(entry, batch_size=())
        return made
    return value


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(names, trees, max_size=4).map(tree), max_size=4))
def test_any_nesting_arrives_as_it_was(turns: list[TensorDictBase]) -> None:
    for before, after in zip(turns, sent(turns), strict=True):
        assert_same(before, after)


@pytest.mark.parametrize("readers", [0, 1, 2])
def test_a_parcel_becomes_the_batch_at_its_last_reader(readers: int) -> None:
    item: Any = Parcel(pack([a_turn(1)]), readers)
    for _ in range(readers):
        assert type(item) is Parcel
        item = pickle.loads(pickle.dumps(item))
    batch = item.open() if readers == 0 else item
    assert isinstance(batch, LazyStackedTensorDict)
    assert_same(a_turn(1), batch[0])
