"""Evaluation on the same policies: whole, in order, and the training stream does not notice."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import PATIENCE, Gate, Policy, ScriptedEnv, assert_conserved, assert_settled, echo, ids
from tensordict import TensorDictBase
from test_groups import Answered, Slow, assert_whole, prompts
from torch.utils.data import DataLoader, IterableDataset
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper

from torchrl_llm import CollectorError, LLMCollector, PolicyError, PromptSource, RunnerOptions
from torchrl_llm.evaluation import NoTurns
from torchrl_llm.policies.batched import BatchedRunner


def length(prompt: str) -> int:
    return 1 + int(prompt[1:]) % 3


def build(**options: Any) -> LLMCollector:
    source = PromptSource(prompts(40), repeats=2, epochs=1)
    return LLMCollector(source.env(lambda: Answered(1, length)), echo, num_envs=3, groups_per_batch=2, **options)


EVALUATED = [{"query": f"q{index}", "answer": index} for index in (7, 3, 8, 5)]


def check(found: TensorDictBase, n: int) -> None:
    assert assert_whole(found, n, length) == [0, 1, 2, 3]
    ends = [row for row in found.unbind(0) if bool(row["next", "done"])]
    assert [row["text"] for row in ends] == [f"q{i}" for i in (7, 3, 8, 5) for _ in range(n)]
    assert [row["answer"] for row in ends] == [f"a:{row['text']}" for row in ends]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("threads", [0, 2])
def test_an_evaluation_does_not_disturb_the_training_stream(n: int, threads: int) -> None:
    def run(evaluating: bool) -> tuple[list[Any], dict[str, Any]]:
        with build(env_threads=threads) as collector:
            found: list[Any] = []
            for batch in collector:
                found += zip(ids(batch.unbind(0), "group_id"), [row["text"] for row in batch.unbind(0)], strict=True)
                if evaluating and len(found) < 60:
                    before = collector.stats()
                    check(collector.evaluate([{"query": d["query"]} for d in EVALUATED], n), n)
                    after = collector.stats()
                    assert before == after
            return found, {k: v for k, v in collector.stats().items() if k not in ("longest_wait_seconds",)}

    with_evaluations, stats = run(True)
    without, expected = run(False)
    assert with_evaluations == without
    assert_settled(stats)
    assert threads or stats == expected


def test_all_fields_reach_the_evaluation() -> None:
    with build() as collector:
        found = collector.evaluate([{"query": "q1", "label": 3}, {"query": "q0", "label": 4}])
        assert [(row["text"], row["label"].item()) for row in found.unbind(0)] == [("q1", 3), ("q1", 3), ("q0", 4)]
        assert ids(found.unbind(0), "traj_ids") in ([0, 0, 1], [1, 1, 0])
        found = collector.evaluate([{"mine": "q0"}], key="mine")
        assert [row["text"] for row in found.unbind(0)] == ["q0"]
        assert len(next(collector)) > 0


def test_a_collector_without_a_source_is_evaluated_too() -> None:
    def make_env() -> EnvBase:
        return ChatEnv.from_dataloader([{"query": ["train"]}], batch_size=(1,)).append_transform(
            StepCounter(max_steps=1)
        )

    from fakes import chat_echo

    with LLMCollector(make_env, chat_echo, num_envs=2, steps_per_batch=1) as collector:
        found = collector.evaluate(["a", "b", "c"])
        assert [row["history"].full[-1].content for row in found.unbind(0)] == ["A", "B", "C"]
        assert next(collector)[0]["history"].full[-1].content == "TRAIN"


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[str]:
        return iter([f"q{index}" for index in (1, 2, 0, 3)])


class SizedStream(Stream):
    """Its length is an estimate."""

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("data", [Stream, SizedStream, lambda: ["q1", "q2", "q0", "q3"]])
@pytest.mark.parametrize("batched", [True, False])
def test_a_loader_or_stream_is_evaluated_in_as_many_environments_as_there_are(data: Any, batched: bool) -> None:
    prompts = DataLoader(data(), batch_size=4) if batched else data()
    with build() as collector:
        found = collector.evaluate(prompts)
    ends = [row for row in found.unbind(0) if bool(row["next", "done"])]
    assert [row["text"] for row in ends] == ["q1", "q2", "q0", "q3"]
    assert set(ids(found.unbind(0), "env_id")) == {0, 1, 2}


def test_no_more_environments_are_built_than_a_list_has_prompts() -> None:
    with build() as collector:
        found = collector.evaluate(["q1", "q2"])
    assert set(ids(found.unbind(0), "env_id")) == {0, 1}


def test_an_evaluation_runs_beside_a_collection_in_the_background() -> None:
    target: queue.Queue[Any] = queue.Queue()
    with build(env_threads=1) as collector:
        collector.start(target)
        for _ in range(3):
            check(collector.evaluate([d["query"] for d in EVALUATED]), 1)
        assert collector.join(PATIENCE)
    batches = list(iter(target.get, None))
    assert [group for batch in batches for group in assert_whole(batch, 2, length)] == list(range(40))
    assert_settled(collector.stats())


@pytest.mark.parametrize("seed", [None, 3])
def test_an_evaluation_on_an_engine(seed: int | None, vllm_llm: Any, tokenizer: Any) -> None:
    def make_env() -> EnvBase:
        return ChatEnv(batch_size=(1,)).append_transform(StepCounter(max_steps=2))

    policy = vLLMWrapper(vllm_llm, tokenizer=tokenizer, input_mode="history", generate_kwargs={"max_tokens": 8})
    source = PromptSource([f"train {i}" for i in range(50)], repeats=2)
    with LLMCollector(
        source.env(make_env), policy, num_envs=4, groups_per_batch=2, seed=seed, total_steps=100
    ) as collector:
        next(collector)
        first = collector.evaluate(["one", "two"], n=2)
        next(collector)
        second = collector.evaluate(["one", "two"], n=2)
        assert_conserved(collector.stats())
    places = list(zip(*(ids(first.unbind(0), key) for key in ("group_id", "group_index", "step")), strict=True))
    assert places == [(g, i, s) for g in range(2) for i in range(2) for s in range(2)]
    tokens = [[row["tokens", "response"].tolist() for row in found.unbind(0)] for found in (first, second)]
    assert (tokens[0] == tokens[1]) == (seed is not None)
    assert tokens[0][0] != tokens[0][2]


def test_an_evaluation_ends_when_the_collector_is_shut_down() -> None:
    slow = Slow("q3")
    source = PromptSource(prompts(2), epochs=1)
    collector = LLMCollector(
        source.env(lambda: Answered(1, on_step=slow)), echo, num_envs=2, groups_per_batch=1, env_threads=1
    )
    raised: list[Exception] = []

    def run() -> None:
        with pytest.raises(CollectorError) as error:
            collector.evaluate(["q3"])
        raised.append(error.value)

    thread = threading.Thread(target=run)
    thread.start()
    assert slow.reached.acquire(timeout=PATIENCE)
    collector.shutdown()
    slow.go.set()
    thread.join(PATIENCE)
    assert "the collector ended while it was evaluating" in str(raised[0])
    with pytest.raises(CollectorError, match="the collector has ended, and its policies with it"):
        collector.evaluate(["q3"])


def test_what_cannot_be_evaluated_says_so() -> None:
    with (
        LLMCollector(ScriptedEnv(), echo, steps_per_batch=1) as collector,
        pytest.raises(TypeError, match=r"evaluate\(\) builds environments of its own: pass constructors"),
    ):
        collector.evaluate(["a"])
    with build() as collector:
        with pytest.raises(ValueError, match="n=0 is not allowed"):
            collector.evaluate(["q1"], n=0)
        with pytest.raises(ValueError, match="data is empty"):
            collector.evaluate([])
        with pytest.raises(CollectorError, match="the evaluation gave no turn") as caught:
            collector.evaluate(iter([]))
        assert type(caught.value) is NoTurns
        with pytest.raises(CollectorError, match=r"env.step failed: ValueError"):
            collector.evaluate(["not a number"])
        check(collector.evaluate([d["query"] for d in EVALUATED]), 1)


def test_a_collector_that_serves_answers_after_its_data_have_ended_and_goes_on_when_there_are_more() -> None:
    source = PromptSource(prompts(3), epochs=1)
    [held] = source.take(1)
    target: queue.Queue[Any] = queue.Queue()
    with LLMCollector(source.env(Answered), echo, trajectories_per_batch=1) as collector:

        def serve() -> list[str]:
            collector._serve(target)
            found = [batch[0]["text"] for batch in iter(lambda: target.get(timeout=PATIENCE), None)]
            assert collector.join(PATIENCE)
            return found

        assert serve() == ["q1", "q2"]
        assert [row["text"] for row in collector.evaluate(["e0"]).unbind(0)] == ["e0"]
        assert serve() == []
        source.returned(held.group_id, held.index)
        assert serve() == ["q0"]
        assert_conserved(collector.stats())
    assert_settled(collector.stats())
    assert collector.stats()["delivered"] == 3


def fails_on_bad(number: int, texts: list[str]) -> None:
    if "bad" in texts:
        raise ValueError("no such prompt")


@pytest.mark.parametrize("on_error", ["raise", "restart"])
@pytest.mark.parametrize("background", [False, True])
def test_an_evaluation_on_which_the_policy_fails_costs_the_training_nothing(on_error: str, background: bool) -> None:
    policy = Policy(fails_on_bad)
    made: list[Policy] = []

    def make_policy() -> Policy:
        made.append(policy)
        return policy

    source = PromptSource(prompts(40), repeats=2, epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, lambda prompt: 1)),
        make_policy if on_error == "restart" else policy,
        num_envs=3,
        groups_per_batch=2,
        on_error=on_error,
    ) as collector:
        target: queue.Queue[Any] = queue.Queue(maxsize=1)
        if background:
            collector.start(target)
        first = target.get(timeout=PATIENCE) if background else next(collector)
        for _ in range(2):
            with pytest.raises(PolicyError, match="policy 0 failed: ValueError: no such prompt"):
                collector.evaluate(["q1", "bad"], n=2)
        assert [row["text"] for row in collector.evaluate(["q5", "q6"]).unbind(0)] == ["q5", "q6"]
        rest = iter(lambda: target.get(timeout=PATIENCE), None) if background else collector
        found = [group for batch in (first, *rest) for group in assert_whole(batch, 2, lambda prompt: 1)]
        stats = collector.stats()
    assert found == list(range(40))
    assert_conserved(stats)
    assert (stats["errors"], stats["policy_restarts"], stats["recorded"], len(made)) == (0, 0, 0, on_error == "restart")
    assert any("bad" in call for call in policy.calls)


def test_requests_of_an_evaluation_share_no_call_with_those_of_the_training() -> None:
    """Both wait while the policy is busy; then each gets a call of its own."""
    gate = Gate()
    policy = Policy(lambda number, texts: gate() if number == 0 else None)
    source = PromptSource(prompts(40), epochs=1)
    options = RunnerOptions(policy, max_batch=2)  # so that one of three requests waits, whatever the first call takes
    with LLMCollector(source.env(Answered), options, num_envs=3, groups_per_batch=1) as collector:
        collector.start(queue.Queue())
        gate.wait()
        found: list[TensorDictBase] = []
        thread = threading.Thread(target=lambda: found.append(collector.evaluate(["e7", "e8"])))
        thread.start()
        runner = collector._pool.runners[0]
        assert isinstance(runner, BatchedRunner)
        patience = threading.Event()
        for _ in range(int(PATIENCE / 0.01)):
            if {ticket.guest for ticket, _ in list(runner._waiting)} == {False, True}:
                break
            patience.wait(0.01)
        gate.open()
        thread.join(PATIENCE)
        assert [row["text"] for row in found[0].unbind(0)] == ["e7", "e8"]
        assert collector.join(PATIENCE)
    kinds = [{text[0] for text in call} for call in policy.calls]
    assert {"e"} in kinds and {"q"} in kinds and {"e", "q"} not in kinds


def test_prompts_that_took_too_long_are_left_out_and_named() -> None:
    slow = Slow("q3", "q5")
    source = PromptSource(prompts(2), epochs=1)
    with LLMCollector(
        source.env(lambda: Answered(1, on_step=slow)),
        echo,
        num_envs=2,
        groups_per_batch=1,
        env_threads=4,
        max_turn_seconds=0.6,
        on_timeout="drop",
    ) as collector:
        with pytest.warns(RuntimeWarning, match=r"left out 2 of 4 prompts, with the numbers \[0, 2\]") as said:
            found = collector.evaluate(["q3", "q1", "q5", "q2"], n=2)
        assert [warning.filename for warning in said] == [__file__]
        assert [(row["text"], int(row["collector", "group_id"])) for row in found.unbind(0)] == [
            *[("q1", 1)] * 2,
            *[("q2", 3)] * 2,
        ]
        with pytest.raises(CollectorError, match=r"gave no turn.*took too long \(on_timeout='drop'\)"):
            collector.evaluate(["q3"])
        slow.go.set()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            assert [row["text"] for row in collector.evaluate(["q3", "q1"]).unbind(0)] == ["q3", "q1"]
        assert_conserved(collector.stats())
