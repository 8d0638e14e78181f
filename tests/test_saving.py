"""Batches and replay buffers of text rows come back from a file as they were."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import ScriptedEnv, chat_echo, echo
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from tensordict.tensorclass import MetaData, NonTensorData
from torchrl.data import LazyStackStorage, ReplayBuffer, TensorDictMaxValueWriter
from torchrl.data.llm import History
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm import LLMCollector, PromptSource, load_batch, load_replay_buffer, save_batch, save_replay_buffer


def contents(value: Any) -> Any:
    """Everything that is in a row, as plain data that can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, (NonTensorData, MetaData)):
        return type(value).__name__, tuple(value.batch_size), value.data
    if isinstance(value, (LazyStackedTensorDict, NonTensorStack)):
        return type(value).__name__, value.stack_dim, [contents(part) for part in value.tensordicts]
    if isinstance(value, TensorDictBase):
        return tuple(value.batch_size), {key: contents(value._get_str(key, None)) for key in value.keys()}
    if hasattr(value, "_tensordict"):
        return type(value).__name__, contents(value._tensordict), dict(value._non_tensordict)
    return value


def chat_batch(vllm_llm: Any, tokenizer: Any) -> TensorDictBase:
    def make_env() -> EnvBase:
        return ChatEnv(batch_size=(1,)).append_transform(StepCounter(max_steps=2))

    data = [{"query": f"q{i}", "answer": None, "label": i, "meta": {"a": [1, "x"]}, "tools": []} for i in range(3)]
    policy = vLLMWrapper(
        vllm_llm,
        tokenizer=tokenizer,
        input_mode="history",
        return_log_probs=True,
        generate_kwargs={"max_tokens": 6},
    )
    source = PromptSource(data, repeats=2, epochs=1)
    with LLMCollector(source.env(make_env), policy, num_envs=2, groups_per_batch=3) as collector:
        [batch] = list(collector)
    return batch


def test_a_batch_comes_back_equal_in_every_entry_L75(vllm_llm: Any, tokenizer: Any, tmp_path: Path) -> None:
    batch = chat_batch(vllm_llm, tokenizer)
    save_batch(batch, tmp_path / "batch.pt")
    loaded = load_batch(tmp_path / "batch.pt")
    assert len(loaded) == len(batch) == 12
    for row, again in zip(batch.unbind(0), loaded.unbind(0), strict=True):
        assert contents(again) == contents(row)
    assert isinstance(loaded[0]["history"].prompt, History)
    assert loaded[3]["history"].full.content == batch[3]["history"].full.content
    assert loaded["label"].tolist() == batch["label"].tolist()
    assert list(tmp_path.iterdir()) == [tmp_path / "batch.pt"]
    assert torch.load(tmp_path / "batch.pt", weights_only=True)["format"] == "torchrl_llm batch"


def test_a_replay_buffer_comes_back_and_goes_on_L75(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=2)
    with LLMCollector(ScriptedEnv, echo, steps_per_batch=3, total_steps=6) as collector:
        for batch in collector:
            buffer.extend(batch)
    save_replay_buffer(buffer, tmp_path / "buffer")
    again = ReplayBuffer(storage=LazyStackStorage(8), batch_size=2)
    load_replay_buffer(again, tmp_path / "buffer")
    assert len(again) == 6
    assert [contents(row) for row in again[:].unbind(0)] == [contents(row) for row in buffer[:].unbind(0)]
    assert again.sample()["text"][0].startswith("q")
    again.extend(batch)  # 9 rows into 8 places: the oldest one goes
    assert len(again) == 8
    texts = [row["text"] for row in again[:].unbind(0)]
    assert sorted(texts) == sorted(["q1#0", "q2#0", "q3#0", "q4#0", "q5#0", "q3#0", "q4#0", "q5#0"])


@pytest.mark.parametrize("rows", [3, 4, 6, 9])
def test_a_full_replay_buffer_comes_back_in_its_order_and_overwrites_its_oldest_rows(rows: int, tmp_path: Path) -> None:
    def buffer() -> ReplayBuffer:
        return ReplayBuffer(storage=LazyStackStorage(4), batch_size=1)

    def row(number: int) -> TensorDictBase:
        return lazy_stack([TensorDict(i=torch.tensor(number), s=NonTensorData(str(number)))])

    first, again = buffer(), buffer()
    for number in range(rows):
        first.extend(row(number))
    save_replay_buffer(first, tmp_path / "buffer")
    kept = list(range(max(0, rows - 4), rows))
    assert load_batch(tmp_path / "buffer")["i"].tolist() == kept
    load_replay_buffer(again, tmp_path / "buffer")
    for number in range(rows, rows + 6):
        again.extend(row(number))
        first.extend(row(number))
        kept = [*kept, number][-4:]
        assert sorted(again[:]["i"].tolist()) == sorted(first[:]["i"].tolist()) == kept


def test_a_buffer_with_a_writer_that_has_no_order_is_saved_as_it_lies(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(2), writer=TensorDictMaxValueWriter(rank_key="i"), batch_size=1)
    for number in (5, 1, 7):
        buffer.extend(lazy_stack([TensorDict(i=torch.tensor([float(number)]), s=NonTensorData(str(number)))]))
    save_replay_buffer(buffer, tmp_path / "buffer")
    assert load_batch(tmp_path / "buffer")["i"].flatten().tolist() == buffer[:]["i"].flatten().tolist()
    assert sorted(buffer[:]["i"].flatten().tolist()) == [5.0, 7.0]


def test_loading_applies_no_transform(tmp_path: Path) -> None:
    from torchrl.objectives.llm import MCAdvantage

    def make() -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyStackStorage(100),
            batch_size=2,
            transform=MCAdvantage(grpo_size=2, prompt_key=("collector", "group_id")),
        )

    def make_env() -> EnvBase:
        from test_groups import Reward

        return ChatEnv(batch_size=(1,)).append_transform(StepCounter(max_steps=1)).append_transform(Reward())

    buffer = make()
    source = PromptSource(["a", "b"], repeats=2, epochs=1)
    with LLMCollector(source.env(make_env), chat_echo, groups_per_batch=2) as collector:
        buffer.extend(next(collector))
    save_replay_buffer(buffer, tmp_path / "buffer")
    again = make()
    load_replay_buffer(again, tmp_path / "buffer")
    assert again[:]["advantage"].tolist() == buffer[:]["advantage"].tolist()


def test_text_and_numbers_of_derived_types_are_saved_as_builtin_ones_and_tensordicts_in_them_whole(
    tmp_path: Path,
) -> None:
    values = [np.str_("a"), np.float64(0.5), Size.BIG, {"h": [History(role="user", content="hi")]}]
    save_batch(lazy_stack([TensorDict(x=NonTensorData(value)) for value in values]), tmp_path / "x")
    found = [row["x"] for row in load_batch(tmp_path / "x").unbind(0)]
    assert found[:3] == ["a", 0.5, 2] and [type(value) for value in found[:3]] == [str, float, int]
    assert isinstance(found[3]["h"][0], History) and found[3]["h"][0].content == "hi"


class Size(enum.IntEnum):
    BIG = 2


def test_what_cannot_be_saved_or_loaded_says_so(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a value of type object cannot be saved: None, numbers, strings"):
        save_batch(lazy_stack([TensorDict(thing=NonTensorData(object()))]), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"batch_size=\(\); a one-dimensional one is needed"):
        save_batch(TensorDict(a=torch.ones(1)), tmp_path / "x")
    with pytest.raises(ValueError, match="the replay buffer is empty"):
        save_replay_buffer(ReplayBuffer(storage=LazyStackStorage(8)), tmp_path / "x")
    torch.save({"a": 1}, tmp_path / "other")
    with pytest.raises(ValueError, match="holds no batch of turns"):
        load_batch(tmp_path / "other")
    save_batch(lazy_stack([TensorDict(a=torch.ones(1))]), tmp_path / "good")
    content = torch.load(tmp_path / "good", weights_only=True)
    torch.save(content | {"version": 9}, tmp_path / "newer")
    with pytest.raises(ValueError, match="has version 9 of the format; known is 1"):
        load_batch(tmp_path / "newer")
    for name, message in (("os.system", "only classes of torchrl and tensordict"), ("torchrl.x", "no tensor class|x")):
        torch.save(content | {"rows": [["c", name, ["d", {}, []], {}]]}, tmp_path / "evil")
        with pytest.raises((ValueError, AttributeError), match=message):
            load_batch(tmp_path / "evil")
