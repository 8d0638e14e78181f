"""Environment slots on TorchRL's own environments: prompts, finite data, partial resets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import fakes
import pytest
from fakes import WAYS, ScriptedEnv, assert_settled, chat_echo, chat_env, chats, echo, read_to_the_end
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset
from torchrl.data.llm import History
from torchrl.envs import Compose, EnvBase, InitTracker, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv, DataLoadingPrimer
from torchrl.envs.llm.datasets.countdown import CountdownEnv

from torchrl_llm import CollectorError, EnvError, LLMCollector, PromptsExhausted


def one_turn(loader: Iterable[Any], batch_size: int = 1) -> EnvBase:
    env = ChatEnv.from_dataloader(loader, batch_size=(batch_size,))
    return TransformedEnv(env, StepCounter(max_steps=1))


def queries(*prompts: str) -> list[dict[str, list[str]]]:
    return [{"query": [prompt]} for prompt in prompts]


def prompts_of(collector: LLMCollector) -> list[str]:
    """The prompt of each delivered row, in order; the collection ends by itself and is in balance."""
    prompts = [chat[0] for batch in collector for chat in chats(batch.unbind(0))]
    assert_settled(collector.stats())
    return prompts


class Counted(IterableDataset):
    """Prompts q0, q1, ...; remembers how many were taken."""

    def __init__(self, count: int, again: bool) -> None:
        self.again = again
        self.taken: list[str] = []
        self._count = count
        self._shared = self._prompts()

    def _prompts(self) -> Iterator[dict[str, str]]:
        for index in range(self._count):
            self.taken.append(f"q{index}")
            yield {"query": f"q{index}"}

    def __iter__(self) -> Iterator[dict[str, str]]:
        return self._prompts() if self.again else self._shared


def collate(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    return {"query": [row["query"] for row in rows]}


# Finite data


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_generator_is_read_once_and_nothing_is_lost_L23(batch_size: int, count: int) -> None:
    names = [f"q{i}" for i in range(count)]
    collector = LLMCollector(lambda: one_turn((q for q in queries(*names)), batch_size), chat_echo, steps_per_batch=2)
    assert prompts_of(collector) == names


@pytest.mark.parametrize("way", WAYS)
def test_data_that_run_out_end_the_collection_in_each_way_to_read_L23(way: str) -> None:
    collector = LLMCollector(lambda: one_turn(iter(queries("q0", "q1", "q2"))), chat_echo, steps_per_batch=2)
    outcome = read_to_the_end(collector, way)
    assert outcome.error is None
    assert chats(outcome.rows) == [["q0", "Q0"], ["q1", "Q1"], ["q2", "Q2"]]


@pytest.mark.parametrize("dl_batch", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_data_loader_that_cannot_start_over_is_read_once_L23(dl_batch: int, batch_size: int) -> None:
    data = Counted(7, again=False)
    loader = DataLoader(data, batch_size=dl_batch, collate_fn=collate)
    collector = LLMCollector(lambda: one_turn(loader, batch_size), chat_echo, steps_per_batch=3)
    assert prompts_of(collector) == [f"q{i}" for i in range(7)] == data.taken


def test_a_list_is_read_again_and_again_L24() -> None:
    collector = LLMCollector(lambda: one_turn(queries("q0", "q1", "q2")), chat_echo, steps_per_batch=3, total_steps=7)
    assert prompts_of(collector) == ["q0", "q1", "q2", "q0", "q1", "q2", "q0"]


def test_one_pass_over_a_list_is_asked_for_with_iter_L24() -> None:
    collector = LLMCollector(lambda: one_turn(iter(queries("q0", "q1", "q2"))), chat_echo, steps_per_batch=3)
    assert prompts_of(collector) == ["q0", "q1", "q2"]


def test_a_data_loader_over_a_data_set_is_read_again_and_again_L24() -> None:
    data = Counted(3, again=True)
    loader = DataLoader(data, batch_size=2, collate_fn=collate)
    collector = LLMCollector(lambda: one_turn(loader, 2), chat_echo, steps_per_batch=4, total_steps=8)
    assert prompts_of(collector) == ["q0", "q1", "q2", "q0", "q1", "q2", "q0", "q1"]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_building_the_collector_takes_no_prompt_L25(batch_size: int) -> None:
    data = Counted(100, again=True)
    loader = DataLoader(data, batch_size=1, collate_fn=collate)
    env = one_turn(loader, batch_size)
    assert data.taken == ["q0"]  # TorchRL's primer looks at an item to learn its keys, and keeps it
    collector = LLMCollector(env, chat_echo, steps_per_batch=2, total_steps=6)
    assert data.taken == ["q0"]
    assert prompts_of(collector) == [f"q{i}" for i in range(6)]
    assert data.taken == [f"q{i}" for i in range(6)]


def test_an_env_that_was_used_before_goes_on_where_it_was() -> None:
    env = one_turn(queries("q0", "q1", "q2"))
    assert env.reset()["history"].prompt[0, -1].content == "q0"
    collector = LLMCollector(env, chat_echo, steps_per_batch=1, total_steps=4)
    assert prompts_of(collector) == ["q1", "q2", "q0", "q1"]


def test_dialogs_in_flight_are_finished_when_the_data_run_out() -> None:
    lengths = {"q0": 1, "q1": 3, "q2": 2}
    collector = LLMCollector(
        lambda: chat_env(["q0", "q1", "q2"], lengths.__getitem__, batch_size=2),
        chat_echo,
        trajectories_per_batch=1,
        order="completion",
    )
    found = [chats(batch.unbind(0)) for batch in collector]
    assert [dialog[-1][0] for dialog in found] == ["q0", "q2", "q1"]
    for dialog in found:
        prompt = dialog[0][0]
        assert dialog == [[prompt] + [prompt.upper()] * turn for turn in range(1, lengths[prompt] + 1)]
    stats = collector.stats()
    assert_settled(stats)
    assert (stats["launched"], stats["delivered"], stats["turns"]) == (3, 3, 6)


def test_repeats_in_the_data_are_kept_together() -> None:
    def make_env() -> EnvBase:
        env = ChatEnv.from_dataloader(iter(queries("q0", "q1")), batch_size=(1,), repeats=3)
        return TransformedEnv(env, StepCounter(max_steps=1))

    assert prompts_of(LLMCollector(make_env, chat_echo, steps_per_batch=2)) == ["q0"] * 3 + ["q1"] * 3


def test_the_primer_is_found_however_deep_it_is() -> None:
    def make_env() -> EnvBase:
        primer = DataLoadingPrimer(dataloader=iter(queries("q0", "q1")), batch_size=(1,))
        env = TransformedEnv(ChatEnv(batch_size=(1,)), Compose(RewardSum(), primer))
        return TransformedEnv(TransformedEnv(env, InitTracker()), StepCounter(max_steps=1))

    assert prompts_of(LLMCollector(make_env, chat_echo, steps_per_batch=1)) == ["q0", "q1"]


def test_a_loader_that_raises_is_an_env_error() -> None:
    def broken() -> Iterator[dict[str, list[str]]]:
        yield from queries("q0", "q1")
        raise OSError("disk is gone")

    collector = LLMCollector(lambda: one_turn(broken()), chat_echo, steps_per_batch=5)
    outcome = read_to_the_end(collector, "loop")
    assert chats(outcome.rows) == [["q0", "Q0"], ["q1", "Q1"]]
    assert isinstance(outcome.error, EnvError)
    assert isinstance(outcome.error.__cause__, OSError)


@pytest.mark.parametrize("end", [PromptsExhausted, StopIteration])
def test_an_env_of_ones_own_ends_its_part_by_an_exception(end: type[Exception]) -> None:
    envs = [
        lambda: ScriptedEnv(on_reset=fakes.raise_at(2, end())),
        lambda: ScriptedEnv(fakes.numbered("b"), on_reset=fakes.raise_at(4, end())),
    ]
    collector = LLMCollector(envs, echo, steps_per_batch=3)
    rows = [row for batch in collector for row in batch.unbind(0)]
    assert sorted(fakes.texts(rows)) == ["b0#0", "b1#0", "b2#0", "b3#0", "q0#0", "q1#0"]
    assert_settled(collector.stats())


# TorchRL's environments


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_chat_goes_on_from_turn_to_turn(batch_size: int) -> None:
    collector = LLMCollector(
        lambda: chat_env(length=lambda prompt: 1 + int(prompt[1:]) % 3, batch_size=batch_size),
        chat_echo,
        trajectories_per_batch=2,
        total_steps=12,
    )
    dialogs: dict[int, list[list[str]]] = {}
    for batch in collector:
        for row, chat in zip(batch.unbind(0), chats(batch.unbind(0)), strict=True):
            dialogs.setdefault(int(row["collector", "traj_ids"]), []).append(chat)
            following = [m.content for m in row["next", "history"].prompt.unbind(0)]
            assert following == chat
    assert len(dialogs) >= 6
    for dialog in dialogs.values():
        prompt = dialog[0][0]
        turns = 1 + int(prompt[1:]) % 3
        assert dialog == [[prompt] + [prompt.upper()] * turn for turn in range(1, turns + 1)]


def test_a_system_prompt_and_other_columns_of_the_data_stay_in_the_turn() -> None:
    def make_env() -> EnvBase:
        loader = ({"query": [f"q{i}"], "answer": [f"right{i}"]} for i in range(3))
        env = ChatEnv.from_dataloader(loader, batch_size=(1,), system_prompt="be brief")
        return TransformedEnv(env, StepCounter(max_steps=2))

    [batch] = LLMCollector(make_env, chat_echo, steps_per_batch=6)
    assert chats(batch.unbind(0))[:2] == [["be brief", "q0", "Q0"], ["be brief", "q0", "Q0", "Q0"]]
    assert [row["answer"] for row in batch.unbind(0)] == [f"right{i}" for i in (0, 0, 1, 1, 2, 2)]
    assert [row["query"] for row in batch.unbind(0)] == [f"q{i}" for i in (0, 0, 1, 1, 2, 2)]
    assert batch["step_count"].flatten().tolist() == [0, 1, 0, 1, 0, 1]
    assert batch["next", "step_count"].flatten().tolist() == [1, 2, 1, 2, 1, 2]


def test_a_reset_of_one_row_leaves_the_step_counts_of_the_others() -> None:
    def make_env() -> EnvBase:
        return TransformedEnv(chat_env(length=lambda p: 1 if p == "q0" else 3, batch_size=2), StepCounter())

    collector = LLMCollector(make_env, chat_echo, steps_per_batch=6, total_steps=6)
    [batch] = collector
    rows = batch.unbind(0)
    found = [(chat[0], int(row["step_count"])) for row, chat in zip(rows, chats(rows), strict=True)]
    assert found == [("q0", 0), ("q1", 0), ("q2", 0), ("q1", 1), ("q2", 1), ("q1", 2)]


@pytest.mark.parametrize("num_envs", [1, 3])
def test_countdown_rewards_each_answer_to_its_own_problem(num_envs: int, tokenizer: Any) -> None:
    def target(row: Any) -> int:
        return int(row["answer"].split("=")[1].split(",")[0])

    def answer(td: Any) -> Any:
        for row in td.unbind(0):
            prompt = row["history"].prompt
            text = "<think>hm</think><answer>1</answer>" if target(row) % 2 else "no idea"
            reply = History(role="assistant", content=text)
            row["history"].full = prompt.append(reply, inplace=False, dim=-1)
            row["history"].response = reply.unsqueeze(0)
        return td

    def make_env() -> EnvBase:
        return CountdownEnv(tokenizer=tokenizer, num_envs=num_envs, seed=3)

    rows = [
        row for batch in LLMCollector(make_env, answer, steps_per_batch=3, total_steps=12) for row in batch.unbind(0)
    ]
    assert len({row["query"] for row in rows}) == 12
    rewards = [pytest.approx(0.1) if target(row) % 2 else 0.0 for row in rows]
    assert [float(row["next", "reward"]) for row in rows] == rewards
    assert 0 < sum(target(row) % 2 for row in rows) < 12
    assert all(row["next", "done"].all() for row in rows)


# What is no environment


@pytest.mark.parametrize(
    ("make_env", "message"),
    [
        (lambda: None, "the env constructor returned NoneType, an EnvBase is needed (slot 0)"),
        (lambda: TensorDict(), "the env constructor returned TensorDict, an EnvBase is needed (slot 0)"),
        (
            lambda: ScriptedEnv(batch_size=(2, 2)),
            "the env has batch_size=(2, 2); allowed are (), (1,) and (B,) (slot 0)",
        ),
        (lambda: ScriptedEnv(batch_size=(0,)), "the env has batch_size=(0,); it must have a row (slot 0)"),
    ],
)
def test_what_is_no_env_is_refused_with_its_slot(make_env: Callable[[], Any], message: str) -> None:
    with pytest.raises(EnvError) as raised:
        LLMCollector(make_env, echo, steps_per_batch=1)
    assert str(raised.value) == message


def test_an_env_constructor_that_fails_closes_the_envs_before_it() -> None:
    closed = []

    def fails() -> EnvBase:
        raise OSError("no sandbox")

    with pytest.raises(EnvError, match=r"fails failed: OSError: no sandbox \(slot 1\)") as raised:
        LLMCollector([lambda: ScriptedEnv(on_close=lambda: closed.append(0)), fails], echo, steps_per_batch=1)
    assert isinstance(raised.value.__cause__, OSError)
    assert isinstance(raised.value, CollectorError)
    assert closed == [0]
