"""``PromptSource``: what it takes as data, what it refuses, and that any thread may take from it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchrl.data.llm import History

from torchrl_llm import PromptSource
from torchrl_llm.prompt_line import Member

CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "u1"}]


class Questions(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"q{index}", "answer": index}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"text": f"q{index}", "answer": index} for index in range(3)])


class SizedStream(Stream):
    def __len__(self) -> int:
        return 3


def content(members: list[Member]) -> list[tuple[Any, dict[str, Any]]]:
    return [(member.prompt, member.fields) for member in members]


ANSWERED = [("q0", {"answer": 0}), ("q1", {"answer": 1}), ("q2", {"answer": 2})]
DATA: dict[str, tuple[Any, list[Any]]] = {
    "strings": (["a", "b"], [("a", {}), ("b", {})]),
    "tuple": (("a", "b"), [("a", {}), ("b", {})]),
    "generator": ((text for text in ("a", "b")), [("a", {}), ("b", {})]),
    "chats": ([CHAT], [(CHAT, {})]),
    "chat in a mapping": ([{"messages": CHAT, "id": 3}], [(CHAT, {"id": 3})]),
    "query before prompt and text": (
        [{"text": "t", "prompt": "p", "query": "q"}],
        [("q", {"text": "t", "prompt": "p"})],
    ),
    "torch dataset": (Questions(), ANSWERED),
    "torch iterable dataset": (Stream(), ANSWERED),
    "torch iterable dataset with a length": (SizedStream(), ANSWERED),
    "loader of a torch iterable dataset with a length": (DataLoader(SizedStream(), batch_size=2), ANSWERED),
    "loader of columns": (DataLoader(Questions(), batch_size=2), ANSWERED),
    "loader of lists": (DataLoader(Questions(), batch_size=2, collate_fn=list), ANSWERED),
    "loader without batches": (DataLoader(Questions(), batch_size=None), ANSWERED),
    "tensordict": (lazy_stack([TensorDict(query=f"q{i}", answer=i) for i in range(3)]), ANSWERED),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_of_any_kind_are_read_prompt_by_prompt_L28_L29(kind: str) -> None:
    data, expected = DATA[kind]
    found = content(PromptSource(data, epochs=1).take(100))
    assert found == expected


def test_a_hugging_face_dataset_is_read_and_shuffled_by_index() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"question": f"q{i}", "answer": i, "tools": ["t"]} for i in range(5)])
    assert content(PromptSource(data, epochs=1).take(9)) == [(f"q{i}", {"answer": i, "tools": ["t"]}) for i in range(5)]
    shuffled = PromptSource(data, epochs=1, shuffle=True, seed=1).take(9)
    assert sorted(member.prompt for member in shuffled) == [f"q{i}" for i in range(5)]
    stream = PromptSource(data.to_iterable_dataset(), epochs=2).take(99)
    assert [(m.prompt, m.epoch) for m in stream] == [(f"q{i}", e) for e in range(2) for i in range(5)]
    with pytest.raises(TypeError, match="choose one of its splits"):
        PromptSource(datasets.DatasetDict(train=data))


def test_other_prompts_are_a_history_or_token_ids_under_a_key_of_ones_own() -> None:
    history, tokens = History.from_chats(CHAT), torch.tensor([1, 2, 3])
    [member] = PromptSource([{"mine": history, "query": "no"}], key="mine").take(1)
    assert member.prompt is history and member.fields == {"query": "no"} and member.name == "mine"
    [member] = PromptSource([{"tokens": tokens}], key="tokens").take(1)
    assert member.prompt is tokens


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ("a prompt", {}, TypeError, "data of type str is not allowed: put it in a list"),
        ({"train": ["a"]}, {}, TypeError, "data of type dict is not allowed: choose one of its splits"),
        (3, {}, TypeError, "data of type int is not allowed: pass a sequence, an iterable"),
        ([], {}, ValueError, "data is empty"),
        ([3], {}, TypeError, "a prompt of type int is not allowed: pass a string, a chat"),
        ([{"query": ["a", "b"]}], {}, TypeError, r"a list of strings is a batch: give single prompts"),
        ([{"say": "a"}], {}, KeyError, "its prompt is looked for under one of 'query'"),
        (
            [{"query": "a"}],
            {"key": "say"},
            KeyError,
            r"has the fields \['query'\], its prompt is looked for under 'say'",
        ),
        (
            [{"query": "a", "next": 1}],
            {},
            ValueError,
            "a datum has the field 'next', which is not allowed: rename it, or leave it out. Taken are 'next', 'collec",
        ),
        ([{"query": "a", "collector": {}}], {}, ValueError, "the field 'collector', which is not allowed"),
        ([{"query": "a", "shape": 3}], {}, ValueError, "the field 'shape', which is not allowed"),
        ([{"query": "a", 3: 4}], {}, TypeError, "the field 3, of type int: fields are named by strings"),
        (["a"], {"repeats": 0}, ValueError, "repeats=0 is not allowed: pass an int of at least 1"),
        (["a"], {"repeats": True}, TypeError, "repeats=True is not allowed"),
        (["a"], {"epochs": 0}, ValueError, "epochs=0 is not allowed"),
        (["a"], {"seed": "x"}, TypeError, "seed='x' is not allowed"),
        (["a"], {"shuffle": 1}, TypeError, "shuffle=1 is not allowed"),
        (["a"], {"key": 1}, TypeError, "key=1 is not allowed"),
        (iter(["a"]), {"shuffle": True}, ValueError, "shuffle=True is not allowed with data of type list_iterator"),
        (iter(["a"]), {"epochs": 2}, ValueError, "epochs=2 is not allowed with data that can be read only once"),
        (DataLoader(["a"]), {"shuffle": True}, ValueError, "of a DataLoader its dataset"),
    ],
)
def test_what_is_no_data_is_refused_when_the_source_is_made(
    data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PromptSource(data, **options)


def test_a_wrong_datum_further_on_is_refused_when_it_comes() -> None:
    source = PromptSource(["a", 3])
    source.take(1)
    with pytest.raises(TypeError, match="a prompt of type int"):
        source.take(1)


def test_threads_share_one_stream() -> None:
    source = PromptSource([f"q{i}" for i in range(300)], repeats=3, epochs=1)
    taken: list[tuple[int, int]] = []

    def work() -> None:
        while members := source.take(2):
            taken.extend((member.group_id, member.index) for member in members)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [(group, index) for group in range(300) for index in range(3)]


def test_a_source_is_reseeded_unless_the_user_gave_a_seed_or_it_has_begun() -> None:
    data = [f"q{i}" for i in range(20)]

    def order(source: PromptSource) -> list[str]:
        return [member.prompt for member in source.take(20)]

    source = PromptSource(data, shuffle=True)
    assert source.reseed(5)
    again = PromptSource(data, shuffle=True)
    assert again.peek() is not None and again.reseed(5)
    assert order(source) == order(again) == order(PromptSource(data, shuffle=True, seed=5))
    assert not source.reseed(6)
    assert not PromptSource(data, shuffle=True, seed=1).reseed(5)


def test_a_source_goes_to_another_process_with_all_it_has_handed_out() -> None:
    source = PromptSource(["a", "b"], repeats=2, epochs=1)
    source.take(3)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.state_dict() == source.state_dict()
    assert [(m.group_id, m.index) for m in copy.take(9)] == [(1, 1)]


def test_a_group_is_taken_as_a_whole_and_what_was_begun_before_it_is_completed() -> None:
    source = PromptSource(["a", "b", "c"], repeats=3, epochs=1)
    source.take(2)
    assert [(m.prompt, m.index) for m in source.take_group()] == [("a", 2)]
    assert [(m.prompt, m.index) for m in source.take_group()] == [("b", 0), ("b", 1), ("b", 2)]
    source.give_back([(1, 2), (0, 1), (1, 0), (1, 1), (0, 0)])
    assert source.pending == 5
    assert [(m.prompt, m.index) for m in source.take_group()] == [("a", 0), ("a", 1)]
    assert [(m.prompt, m.index) for m in source.take_group()] == [("b", 0), ("b", 1), ("b", 2)]
    assert len(source.take_group()) == 3
    assert source.take_group() == []


def test_a_group_is_taken_without_a_look_at_the_next_prompt() -> None:
    source = PromptSource(iter(["a", 3]), repeats=2)
    assert [(m.prompt, m.index) for m in source.take_group()] == [("a", 0), ("a", 1)]
    with pytest.raises(TypeError, match="a prompt of type int"):
        source.take_group()
