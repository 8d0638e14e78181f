"""The line of prompts as a state machine: every member once, what came back first, and the same again from a state."""

from __future__ import annotations

import enum
import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from tensordict.tensorclass import NonTensorData
from torch.utils.data import DataLoader
from torchrl.data.llm import History

from torchrl_llm.data import StreamReader
from torchrl_llm.prompt_line import Member, PromptLine

Key = tuple[int, int]


def line(data: Any, repeats: int = 1, shuffle: bool = False, seed: int = 0, epochs: int | None = 1) -> PromptLine:
    return PromptLine(data, repeats, shuffle, seed, epochs, None)


def key(member: Member) -> Key:
    return member.group_id, member.index


def saved(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


happenings = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 4)),
        st.tuples(st.sampled_from(["deliver", "return", "withdraw"]), st.integers(0, 20)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    min_size=15,
    max_size=40,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    events=happenings,
    repeats=st.integers(1, 3),
    shuffle=st.booleans(),
    epochs=st.integers(1, 2),
    indexed=st.booleans(),
)
def test_every_member_is_handed_out_until_it_is_done_also_over_restarts(
    events: list[Any], repeats: int, shuffle: bool, epochs: int, indexed: bool
) -> None:
    data = [f"q{index}" for index in range(5)]
    if indexed:

        def make() -> PromptLine:
            return line(data, repeats, shuffle, seed=3, epochs=epochs)
    else:

        def make() -> PromptLine:
            return line(iter(data), repeats, epochs=1)

        epochs = 1

    prompts = make()
    held: dict[Key, Member] = {}
    done: dict[Key, Member] = {}
    withdrawn: set[int] = set()
    seen: dict[int, tuple[str, int]] = {}
    came_back: set[Key] = set()

    def take(count: int) -> list[Member]:
        ahead, following = prompts.pending, prompts.peek()
        members = prompts.take(count)
        assert (following is None) == (not members) and (not members or key(following) == key(members[0]))
        for number, member in enumerate(members):
            assert key(member) not in held and key(member) not in done and member.group_id not in withdrawn
            fresh = member.group_id not in seen
            assert fresh == (member.group_id == len(seen)) and (not fresh or member.index == 0)
            assert not (fresh and (came_back or number < ahead)), "a new prompt before what came back or was begun"
            seen.setdefault(member.group_id, (member.prompt, member.epoch))
            assert seen[member.group_id] == (member.prompt, member.epoch)
            came_back.discard(key(member))
            held[key(member)] = member
        return members

    for name, number in events:
        if name == "take":
            take(number)
        elif name == "restart":
            state = prompts.state_dict()
            prompts = make()
            prompts.load_state_dict(saved(state))
            assert prompts.state_dict() == state
            came_back = {
                (group, index)
                for group in seen
                for index in range(repeats)
                if (group, index) not in done and group not in withdrawn
            }
            held.clear()
        elif held:
            which = sorted(held)[number % len(held)]
            if name == "withdraw":
                prompts.withdraw(which[0])
                withdrawn.add(which[0])
                came_back = {k for k in came_back if k[0] != which[0]}
                for k in [k for k in held if k[0] == which[0]]:
                    del held[k]
            else:
                member = held.pop(which)
                if name == "deliver":
                    prompts.delivered(*which)
                    done[which] = member
                else:
                    prompts.returned(*which)
                    prompts.returned(*which)  # twice is once
                    came_back.add(which)
    while take(2):
        pass
    for member in held.values():
        prompts.delivered(*key(member))
    done.update(held)
    assert prompts.state_dict()["held"] == [] and prompts.pending == 0
    for epoch in range(epochs):
        whole = [group for group, (_, e) in seen.items() if e == epoch]
        assert sorted(seen[group][0] for group in whole) == data
    assert set(done) | {(g, i) for g in withdrawn for i in range(repeats)} >= {
        (group, index) for group in seen for index in range(repeats) if group not in withdrawn
    }


def test_each_epoch_has_an_order_of_its_own_that_depends_on_the_seed_only() -> None:
    def orders(seed: int) -> list[list[str]]:
        prompts = line([f"q{i}" for i in range(20)], shuffle=True, seed=seed, epochs=3)
        return [[member.prompt for member in prompts.take(20)] for _ in range(3)]

    first = orders(7)
    assert first == orders(7) != orders(8)
    assert first[0] != first[1] != first[2]
    assert all(sorted(order) == sorted(first[0]) for order in first)


def test_epochs_are_counted_and_end_where_asked_L24() -> None:
    prompts = line(["q0", "q1", "q2"], epochs=2)
    assert [(m.prompt, m.epoch) for m in prompts.take(100)] == [
        *(("q0", 0), ("q1", 0), ("q2", 0)),
        *(("q0", 1), ("q1", 1), ("q2", 1)),
    ]
    endless = line(["q0", "q1", "q2"], epochs=None)
    assert [m.prompt for m in endless.take(7)] == ["q0", "q1", "q2", "q0", "q1", "q2", "q0"]
    once = line(iter(["q0", "q1"]), epochs=None)
    assert [m.prompt for m in once.take(7)] == ["q0", "q1"]
    again = line(range_of_prompts(2), epochs=None)
    assert [m.epoch for m in again.take(5)] == [0, 0, 1, 1, 2]


def range_of_prompts(count: int) -> Any:
    class Again:
        def __iter__(self) -> Any:
            return iter([f"q{i}" for i in range(count)])

    return Again()


def test_an_iterable_without_data_ends_instead_of_spinning() -> None:
    assert line(range_of_prompts(0), epochs=None).take(1) == []


def test_a_state_of_a_stream_holds_the_prompts_themselves() -> None:
    data = [{"query": "a", "meta": {"n": None}, "w": torch.ones(2), "tools": ["t", 1]}, {"query": "b", "meta": {}}]
    prompts = line(iter(data), repeats=2)
    prompts.take(3)
    prompts.delivered(0, 0)
    again = line(iter(data), repeats=2)
    again.load_state_dict(saved(prompts.state_dict()))
    members = again.take(10)
    assert [(m.group_id, m.index, m.prompt) for m in members] == [(0, 1, "a"), (1, 0, "b"), (1, 1, "b")]
    assert members[0].fields["meta"] == {"n": None} and members[0].fields["tools"] == ["t", 1]
    assert members[0].fields["w"].tolist() == [1.0, 1.0]


def datum_rows() -> Any:
    rows = [
        TensorDict(tokens=torch.arange(2) + i, answer=NonTensorData({"x": [i]}), label=NonTensorData(f"l{i}"))
        for i in range(2)
    ]
    return DataLoader(rows, batch_size=2, collate_fn=lazy_stack)


def test_a_state_keeps_the_fields_of_tensordicts() -> None:
    first = PromptLine(datum_rows(), 2, False, 0, 1, "tokens")
    first.take(1)
    again = PromptLine(datum_rows(), 2, False, 0, 1, "tokens")
    again.load_state_dict(saved(first.state_dict()))
    members = again.take(9)
    assert [member.prompt.tolist() for member in members] == [[0, 1], [0, 1], [1, 2], [1, 2]]
    assert [member.fields for member in members[1:3]] == [
        {"answer": {"x": [0]}, "label": "l0"},
        {"answer": {"x": [1]}, "label": "l1"},
    ]


def test_a_state_keeps_a_history_and_what_numpy_and_enums_made_of_text_and_numbers() -> None:
    def make() -> PromptLine:
        history = History.from_chats([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])
        return line(iter([history, {"query": np.str_("a"), "w": np.float64(0.5), "size": Size.BIG, "h": history}]))

    first = make()
    first.take(2)
    again = make()
    again.load_state_dict(saved(first.state_dict()))
    one, two = again.take(9)
    assert isinstance(one.prompt, History) and (one.prompt.role, one.prompt.content) == (
        ["user", "assistant"],
        ["hi", "ho"],
    )
    assert (two.prompt, two.fields["w"], two.fields["size"], two.fields["h"].content) == ("a", 0.5, 2, ["hi", "ho"])


class Size(enum.IntEnum):
    BIG = 2


@pytest.mark.parametrize("kind", ["generator", "iterable", "loader", "sequence"])
def test_a_state_from_before_the_first_prompt_loses_none_though_it_was_looked_at(kind: str) -> None:
    def make() -> PromptLine:
        prompts = {
            "generator": lambda: (f"q{i}" for i in range(3)),
            "iterable": lambda: range_of_prompts(3),
            "loader": lambda: DataLoader(["q0", "q1", "q2"], batch_size=2),
            "sequence": lambda: ["q0", "q1", "q2"],
        }[kind]()
        return line(prompts)

    first = make()
    assert first.peek() is not None
    state = saved(first.state_dict())
    assert [member.prompt for member in first.take(9)] == ["q0", "q1", "q2"]
    for looks in (0, 1):
        again = make()
        for _ in range(looks):
            again.peek()
        again.load_state_dict(state)
        again.load_state_dict(saved(again.state_dict()))
        following = again.peek()
        assert following is not None and following.prompt == "q0"
        assert [(m.group_id, m.prompt) for m in again.take(9)] == [(0, "q0"), (1, "q1"), (2, "q2")]


def test_a_stream_is_started_over_for_what_is_past_or_says_that_it_cannot() -> None:
    again = StreamReader(range_of_prompts(3))
    assert [again.read(0, position)[1] for position in (0, 1, 0, 2)] == ["q0", "q1", "q0", "q2"]
    once = StreamReader(iter(["q0", "q1"]))
    assert once.read(0, 1) == (None, "q1")
    with pytest.raises(RuntimeError, match="datum 0 was read already, and the data can be read only once"):
        once.read(0, 0)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [2, 12])
@pytest.mark.parametrize("older", [False, True])
def test_a_state_of_other_data_is_refused_and_changes_nothing(shuffle: bool, count: int, older: bool) -> None:
    first = line([f"q{i}" for i in range(10)], shuffle=shuffle, seed=1)
    first.take(9)
    state = saved(first.state_dict())
    assert state["length"] == 10
    if older:
        del state["length"], state["order_length"]
    other = line([f"q{i}" for i in range(count)], shuffle=shuffle, seed=2)
    before = other.state_dict()
    if older and count == 12:
        other.load_state_dict(state)  # Nothing in it tells.
        return
    with pytest.raises(ValueError, match=rf"data has {count} items, the state was saved with (at least )?(9|10): a so"):
        other.load_state_dict(state)
    assert other.state_dict() == before
    assert len(other.take(99)) == count


def test_a_state_of_indices_is_refused_by_a_stream_and_other_streams_are_known_by_their_length() -> None:
    first = line(["q0", "q1"])
    first.take(1)
    stream = line(iter(["q0", "q1"]))
    with pytest.raises(ValueError, match="the state keeps its prompts by their index, and data has no indices"):
        stream.load_state_dict(first.state_dict())
    assert [member.prompt for member in stream.take(9)] == ["q0", "q1"]
    loader = line(DataLoader(["q0", "q1", "q2"], batch_size=2))
    loader.take(1)
    for batch_size in (1, 3):  # It is the data that count, not the batches.
        again = line(DataLoader(["q0", "q1", "q2"], batch_size=batch_size))
        again.load_state_dict(loader.state_dict())
        assert [member.prompt for member in again.take(9)] == ["q0", "q1", "q2"]
    with pytest.raises(ValueError, match="data has 4 items, the state was saved with 3"):
        line(DataLoader(list("abcd"), batch_size=2)).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("shuffle", [False, True])
def test_data_that_grow_are_read_to_their_end(shuffle: bool) -> None:
    data = ["q0", "q1"]
    prompts = line(data, shuffle=shuffle, epochs=2)
    [first] = prompts.take(1)
    prompts.delivered(0, 0)
    data.append("q2")
    again = line(data, shuffle=shuffle, epochs=2)
    again.load_state_dict(saved(prompts.state_dict()))
    for source in (prompts, again):
        rest = source.take(99)
        epochs = [sorted(m.prompt for m in (first, *rest) if m.epoch == epoch) for epoch in (0, 1)]
        assert epochs == [["q0", "q1"] if shuffle else ["q0", "q1", "q2"], ["q0", "q1", "q2"]]


def test_a_state_says_what_it_cannot_hold_or_does_not_fit() -> None:
    prompts = line(iter([{"query": "a", "thing": object()}]))
    prompts.take(1)
    with pytest.raises(
        TypeError, match=r"a value of type object cannot be saved.*data with indices are saved by their"
    ):
        prompts.state_dict()
    state = line(["a"], repeats=2).state_dict()
    with pytest.raises(ValueError, match=r"repeats=2 and the source repeats=3"):
        line(["a"], repeats=3).load_state_dict(state)
    begun = line(["a"], repeats=2)
    begun.take(1)
    with pytest.raises(RuntimeError, match="has handed out prompts already"):
        begun.load_state_dict(state)
