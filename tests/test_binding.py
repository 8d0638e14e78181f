"""Environments of every kind take their prompts, and all that belongs to them, from a source."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import EndAfter, chat_echo, echo
from tensordict import TensorDict, TensorDictBase
from test_groups import Answered
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.data.llm import History
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv, CountdownEnv, GSM8KEnv, LLMEnv

from torchrl_llm import LLMCollector, PromptSource, load_batch, save_batch

CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "u1"}]
FIELDS = [
    {"answer": None, "label": 1, "w": torch.ones(2), "meta": {"a": 1}, "tools": ["x", {"y": 2}], "id": "i0"},
    {"answer": "x", "label": 2, "w": torch.zeros(2), "meta": {"b": None}, "tools": [], "id": "i1"},
]


def assert_fields(row: TensorDictBase, fields: dict[str, Any]) -> None:
    for where in (row, row["next"]):
        for name, value in fields.items():
            found = where[name]
            if isinstance(value, torch.Tensor):
                assert torch.equal(found, value), name
            elif isinstance(value, int):
                assert isinstance(found, torch.Tensor) and found.item() == value and found.shape == (), name
            else:
                assert found == value and type(found) is type(value), (name, found)


def one_turn(env: EnvBase) -> EnvBase:
    return env.append_transform(StepCounter(max_steps=1))


CHAT_ENVS = {
    "ChatEnv": lambda rows: one_turn(ChatEnv(batch_size=(rows,))),
    "ChatEnv.from_dataloader": lambda rows: one_turn(
        ChatEnv.from_dataloader([{"query": ["never", "used"], "other": [1, 2]}], batch_size=(rows,))
    ),
}


@pytest.mark.parametrize("kind", CHAT_ENVS)
@pytest.mark.parametrize("rows", [1, 2])
def test_chats_keep_their_roles_and_fields_come_through_unchanged_L28_L29(kind: str, rows: int) -> None:
    data = [{"messages": CHAT, **FIELDS[0]}, {"messages": "u2", **FIELDS[1]}]
    source = PromptSource(data, epochs=1)
    with LLMCollector(source.env(lambda: CHAT_ENVS[kind](rows)), chat_echo, trajectories_per_batch=2) as collector:
        [batch] = list(collector)
    first, second = batch.unbind(0)
    assert (first["history"].prompt.role, first["history"].prompt.content) == (["system", "user"], ["S", "u1"])
    assert (second["history"].prompt.role, second["history"].prompt.content) == (["user"], ["u2"])
    assert_fields(first, FIELDS[0])
    assert_fields(second, FIELDS[1])


def test_numbers_of_every_kind_are_tensors_and_those_beyond_int64_come_through_unchanged(tmp_path: Path) -> None:
    numbers = [3, 10**25, np.int64(4), np.float64(0.5), -(2**63), 2**63, np.uint64(2**63), np.bool_(True), None, -1.5]
    source = PromptSource([{"query": f"q{i}", "label": number} for i, number in enumerate(numbers)], epochs=1)
    make_env = source.env(lambda: one_turn(ChatEnv(batch_size=(2,))))
    with LLMCollector(make_env, chat_echo, trajectories_per_batch=len(numbers)) as collector:
        [batch] = list(collector)
    save_batch(batch, tmp_path / "batch")
    for rows in (batch, load_batch(tmp_path / "batch")):
        for where in (rows, rows["next"]):
            found = [row["label"] for row in where.unbind(0)]
            assert [value.item() if isinstance(value, torch.Tensor) else value for value in found] == numbers
            assert [value.dtype if isinstance(value, torch.Tensor) else None for value in found] == [
                *(torch.int64, None, torch.int64, torch.float32, torch.int64),
                *(None, None, torch.bool, None, torch.float32),
            ]


@pytest.mark.parametrize("kind", ["ChatEnv", "Answered"])
def test_rows_that_step_together_keep_fields_of_different_kinds_and_shapes(kind: str) -> None:
    fields = [torch.ones(2), torch.ones(3), None, "x", 1, 0.5, {"a": 1}, [2]]
    source = PromptSource([{"query": f"q{i}", "x": field} for i, field in enumerate(fields)], epochs=1)
    length = lambda prompt: 1 + int(prompt[1:]) % 3  # noqa: E731
    make_env, policy = {
        "ChatEnv": (lambda: TransformedEnv(ChatEnv(batch_size=(2,)), EndAfter(length)), chat_echo),
        "Answered": (lambda: Answered(2, length), echo),
    }[kind]
    with LLMCollector(source.env(make_env), policy, trajectories_per_batch=len(fields)) as collector:
        [batch] = list(collector)
    assert len(batch) == sum(length(f"q{i}") for i in range(len(fields)))
    for row in batch.unbind(0):
        expected = fields[int(row["collector", "group_id"])]
        number = isinstance(expected, (torch.Tensor, int, float))
        for where in (row, row["next"]):
            if number:
                assert where["x"].dtype == torch.as_tensor(expected).dtype
                assert where["x"].tolist() == torch.as_tensor(expected).tolist()
            else:
                assert where["x"] == expected


def test_a_source_that_begins_with_a_number_beyond_int64_is_bound() -> None:
    env = PromptSource([{"query": "a", "answer": 10**25}]).env(lambda: ChatEnv(batch_size=(1,)))()
    assert env.reset()["answer"] == [10**25]


def test_a_source_of_histories_gives_them_as_they_are() -> None:
    source = PromptSource([History.from_chats(CHAT)], epochs=1)
    env = source.env(lambda: ChatEnv(batch_size=(1,)))()
    assert env.reset()["history"].prompt[0].content == ["S", "u1"]


def llm_answer(td: TensorDictBase) -> TensorDictBase:
    for row in td.unbind(0):
        row["text_response"] = row["text"].upper()
    return td


@pytest.mark.parametrize("batch_size", [(), (1,), (2,)])
@pytest.mark.parametrize("with_loader", [True, False])
def test_llm_env_takes_strings(batch_size: tuple[int, ...], with_loader: bool) -> None:
    def make_env() -> EnvBase:
        if with_loader:
            env = LLMEnv.from_dataloader([{"text": ["never"]}], from_text=True, batch_size=batch_size)
        else:
            env = LLMEnv(from_text=True, batch_size=batch_size)
        return env.append_transform(StepCounter(max_steps=1))

    data = [{"prompt": f"q{i}", **FIELDS[i % 2]} for i in range(4)]
    source = PromptSource(data, epochs=1)
    with LLMCollector(source.env(make_env), llm_answer, trajectories_per_batch=4) as collector:
        [batch] = list(collector)
    assert [row["text"] for row in batch.unbind(0)] == [f"q{i}" for i in range(4)]
    for index, row in enumerate(batch.unbind(0)):
        assert_fields(row, FIELDS[index % 2])


def answer_with(text: str) -> Any:
    def policy(td: TensorDictBase) -> TensorDictBase:
        for row in td.unbind(0):
            prompt = row["history"].prompt
            row["history"].full = prompt.append(History(role="assistant", content=text), inplace=False, dim=-1)
        return td

    return policy


def test_gsm8k_env_scores_local_data_without_loading_its_own(tokenizer: Any) -> None:
    data = [{"question": f"q{i}", "answer": f"so #### {i}"} for i in (5, 6)]
    source = PromptSource(data, epochs=1, repeats=2)
    answer = "<think>t</think><answer>5</answer>"
    with LLMCollector(
        source.env(lambda: GSM8KEnv(tokenizer=tokenizer)), answer_with(answer), num_envs=2, groups_per_batch=2
    ) as collector:
        [batch] = list(collector)
    assert list(batch["query"]) == ["q5", "q5", "q6", "q6"]
    assert batch["next", "success"].flatten().tolist() == [True, True, False, False]
    roles = [row["history"].prompt.role for row in batch.unbind(0)]
    assert roles == [["system", "user"]] * 4


def test_countdown_env_takes_its_problems_from_the_source(tokenizer: Any) -> None:
    data = [{"query": "make 7 of 3, 4", "answer": "target=7, numbers=3,4"}]
    source = PromptSource(data, epochs=1, repeats=3)
    answer = "<think>t</think><answer>3 + 4</answer>"
    with LLMCollector(
        source.env(lambda: CountdownEnv(tokenizer=tokenizer)), answer_with(answer), groups_per_batch=1
    ) as collector:
        [batch] = list(collector)
    assert [row["history"].prompt[-1].content for row in batch.unbind(0)] == ["make 7 of 3, 4"] * 3
    assert (batch["next", "reward"] > 0).all()


def test_other_threads_load_their_data_sets_meanwhile() -> None:
    """Only what is built inside a bound constructor goes without its own data set."""
    from torchrl.envs.llm.chat import DatasetChatEnv

    called: list[str] = []

    def make_env() -> EnvBase:
        def other() -> None:
            try:
                DatasetChatEnv(dataset="no/such/data/set")
            except Exception as error:
                called.append(type(error).__name__)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return ChatEnv(batch_size=(1,))

    before = DatasetChatEnv.__dict__["_dataloader_factory"]
    PromptSource(["q"]).env(make_env)()
    assert DatasetChatEnv.__dict__["_dataloader_factory"] is before
    assert called and called != ["KeyError"]


@pytest.mark.timeout(60)
def test_a_constructor_that_calls_a_bound_one_is_bound_to_the_outer_source(tokenizer: Any) -> None:
    from torchrl.envs.llm.chat import DatasetChatEnv

    before = DatasetChatEnv.__dict__["_dataloader_factory"]
    inner = PromptSource(["inner"])
    outer = PromptSource([{"question": "outer", "answer": "#### 5"}])
    make_env = outer.env(lambda: inner.env(lambda: GSM8KEnv(tokenizer=tokenizer))())
    assert make_env().reset()["query"] == ["outer"]
    assert DatasetChatEnv.__dict__["_dataloader_factory"] is before
    assert inner.state_dict()["next_group"] == 0


class TokenEnv(EnvBase):
    """Reads its prompt and everything else from what it is reset with; no name of torchrl's in it."""

    def __init__(self) -> None:
        super().__init__(batch_size=())
        self.observation_spec = Composite(seen=NonTensor(shape=(), example_data=""))
        self.full_action_spec = Composite(answer=NonTensor(shape=(), example_data=""))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
        return TensorDict(seen=f"{tensordict['task']} / {tensordict['tests']}")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        done = torch.ones(1, dtype=torch.bool)
        return TensorDict(seen="", done=done, terminated=done.clone(), reward=torch.ones(1))

    def _set_seed(self, seed: int | None) -> None:
        pass


def test_any_env_is_reset_with_the_datum_under_its_own_names() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        for row in td.unbind(0):
            row["answer"] = row["seen"]
        return td

    source = PromptSource([{"task": "t0", "tests": 2}, {"task": "t1", "tests": 3}], key="task", epochs=1)
    with LLMCollector(source.env(TokenEnv), policy, steps_per_batch=1) as collector:
        rows = [batch[0] for batch in collector]
    assert [(row["answer"], row["tests"].item()) for row in rows] == [("t0 / 2", 2), ("t1 / 3", 3)]


def test_building_a_collector_takes_no_prompt_and_an_env_reset_by_hand_takes_the_next() -> None:
    source = PromptSource((f"q{i}" for i in range(5)), epochs=1)
    make_env = source.env(lambda: one_turn(ChatEnv(batch_size=(1,))))
    collector = LLMCollector(make_env, chat_echo, num_envs=3, steps_per_batch=1)
    assert make_env().reset()["history"].prompt[0, -1].content == "q0"
    with collector:
        assert sorted(row["history"].prompt[-1].content for batch in collector for row in batch.unbind(0)) == [
            f"q{i}" for i in range(1, 5)
        ]
    assert source.state_dict()["held"] == []


def test_what_cannot_be_bound_is_refused() -> None:
    source = PromptSource(["q"])
    with pytest.raises(TypeError, match="make_env of type ChatEnv is not allowed: pass a constructor"):
        source.env(ChatEnv(batch_size=(1,)))
    with pytest.raises(TypeError, match="make_env returned int, an EnvBase is needed"):
        source.env(lambda: 3)()

    def two_primers() -> EnvBase:
        env = ChatEnv.from_dataloader([{"query": ["a"]}], batch_size=(1,))
        return env.append_transform(ChatEnv.from_dataloader([{"query": ["b"]}], batch_size=(1,)).transform.clone())

    with pytest.raises(ValueError, match="the environment has 2 data primers; a source can replace one"):
        source.env(two_primers)()


def chat_env() -> EnvBase:
    return one_turn(ChatEnv(batch_size=(1,)))


def text_env() -> EnvBase:
    return LLMEnv(from_text=True, batch_size=(1,))


@pytest.mark.parametrize(
    ("make_env", "datum", "key", "error", "message"),
    [
        (
            chat_env,
            {"prompt": "a", "query": "b"},
            "prompt",
            ValueError,
            "has the field 'query' beside its prompt, 'prom",
        ),
        (
            text_env,
            {"query": "a", "text": "b"},
            None,
            ValueError,
            "has the field 'text' beside its prompt, 'query': th",
        ),
        (
            chat_env,
            {"query": "a", "history": "b"},
            None,
            ValueError,
            "the field 'history', which is not allowed: the e",
        ),
        (chat_env, {"query": "a", "done": True}, None, ValueError, "'done', which is .* Taken are 'done', 'history', "),
        (chat_env, {"query": "a", "truncated": 1}, None, ValueError, "the field 'truncated', which is not allowed"),
        (
            TokenEnv,
            {"task": "a", "tests": 1, "done": True},
            "task",
            ValueError,
            "the field 'done', which is not allowed",
        ),
        (
            chat_env,
            [{**CHAT[0], "name": "bob"}],
            None,
            ValueError,
            "a message of a chat has 'name', which is not allowed",
        ),
        (
            text_env,
            CHAT,
            None,
            TypeError,
            "a prompt of type list is not allowed: an LLMEnv with from_text=True reads str",
        ),
        (text_env, {"text": torch.ones(2)}, None, TypeError, "a prompt of type Tensor is not allowed"),
    ],
)
def test_a_datum_that_the_env_cannot_take_is_refused_when_it_is_bound_and_when_it_comes(
    make_env: Any, datum: Any, key: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PromptSource([datum], key=key).env(make_env)()
    source = PromptSource([{key: "fine", "tests": 1} if key else "fine", datum], key=key)
    env = source.env(make_env)()
    env.reset()
    with pytest.raises(error, match=message):
        env.reset()


def test_a_message_may_have_entries_without_a_value() -> None:
    source = PromptSource([[{"role": "user", "content": "u", "name": None, "tool_calls": None}]])
    history = source.env(chat_env)().reset()["history"].prompt[0]
    assert (history.role, history.content) == (["user"], ["u"])


def test_fields_may_have_the_names_that_only_another_env_needs() -> None:
    source = PromptSource([{"task": "a", "tests": 1, "history": "h", "query": "q"}], key="task")
    found = source.env(TokenEnv)().reset()
    assert (found["seen"], found["history"], found["query"]) == ("a / 1", "h", "q")
