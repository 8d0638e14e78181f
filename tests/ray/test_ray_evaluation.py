"""Evaluation, seeds and sleep over a cluster, on real Ray."""

from __future__ import annotations

import os
import queue
import signal
from typing import Any

import pytest
import torch
from fakes import PATIENCE, ScriptedEnv, assert_conserved, assert_settled, ids
from fakes import echo as scripted_echo
from tensordict import TensorDict, lazy_stack
from test_faults import pid_of, wait_until
from test_groups import Answered, echo, prompts
from test_ray_prompts import members
from test_ray_weights import telling_policy, weights

from torchrl_llm import CollectorError, LLMCollector, PromptSource, WorkerError, WorkerHooks
from torchrl_llm.evaluation import NoTurns
from torchrl_llm.ray.evaluation import Part, together

pytestmark = pytest.mark.slow

QUESTIONS = [f"e{index}" for index in range(5)]


def answers(batch: Any) -> list[tuple[str, int, int, int]]:
    rows = batch.unbind(0)
    return [(row["text"], *(int(row["collector", key]) for key in ("group_id", "group_index", "step"))) for row in rows]


def build(**options: Any) -> LLMCollector:
    source = PromptSource(prompts(6), epochs=1)
    arguments = {"num_workers": 2, "trajectories_per_batch": 2, "backend": "ray"} | options
    return LLMCollector(source.env(lambda: Answered(1, length=2)), echo, num_envs=2, **arguments)


EXPECTED = [(f"e{i}", i, index, step) for i in range(5) for index in range(2) for step in range(2)]


def test_an_evaluation_comes_in_the_order_of_its_prompts_and_leaves_the_training_stream_as_it_is(
    ray_cluster: Any,
) -> None:
    counted = ("turns", "delivered", "batches", "recorded", "recorded_by_reason")
    with build() as collector:
        assert answers(collector.evaluate(QUESTIONS, n=2)) == EXPECTED, "before anything is read"
        rows = list(next(collector).unbind(0))
        before = collector.stats()
        batch = collector.evaluate(QUESTIONS, n=2)
        after = collector.stats()
        assert answers(batch) == EXPECTED
        assert [row["answer"] for row in batch.unbind(0)] == [f"a:{name}" for name, *_ in EXPECTED]
        trajectories = ids(batch.unbind(0), "traj_ids")
        assert trajectories == [number for number in range(10) for _ in range(2)]
        assert {key: before[key] for key in counted} == {key: after[key] for key in counted}
        rows += [row for batch in collector for row in batch.unbind(0)]
        with pytest.raises(CollectorError):
            collector.evaluate(QUESTIONS)
    assert members(rows) == {(f"q{group}", group, 0): 1 for group in range(6)}
    assert collector.stats()["launched"] == collector.stats()["delivered"] == 6


def test_an_evaluation_is_possible_when_the_data_have_ended_and_does_not_lose_what_a_dead_worker_had(
    ray_cluster: Any,
) -> None:
    with build(prefetch=4) as collector:
        for _ in range(3):
            next(collector)
        assert answers(collector.evaluate(QUESTIONS, n=2)) == EXPECTED
        # Nobody has noticed yet, when the next evaluation begins.
        os.kill(pid_of(collector, 1), signal.SIGKILL)
        assert answers(collector.evaluate(QUESTIONS, n=2)) == EXPECTED
        assert next(collector, None) is None


def test_what_is_wrong_with_an_evaluation_is_said_at_once(ray_cluster: Any) -> None:
    with build(num_workers=1) as collector:
        with pytest.raises(ValueError, match="data is empty"):
            collector.evaluate([])
        with pytest.raises(ValueError, match="n=0 is not allowed"):
            collector.evaluate(QUESTIONS, n=0)
        assert len(answers(collector.evaluate(["e0"]))) == 2, "fewer prompts than workers, or slots"


def with_a_short_context(worker: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Gives modules what engines have: prompts that are too long for them."""
    from torchrl_llm.errors import PromptTooLong
    from torchrl_llm.policies.batched import BatchedRunner

    def prepare(self: Any, observation: Any, carry: Any) -> Any:
        if observation["text"].startswith("long"):
            raise PromptTooLong(9, 8)
        return observation

    BatchedRunner.prepare = prepare  # type: ignore[method-assign]
    return arguments


def test_a_prompt_that_is_too_long_is_left_out_also_when_it_is_all_that_a_worker_has(ray_cluster: Any) -> None:
    with build(hooks=WorkerHooks(handle=with_a_short_context)) as collector:
        batch = collector.evaluate(["e0", "long1", "e2", "long3", "e4"])
        assert answers(batch) == [(f"e{i}", i, 0, step) for i in (0, 2, 4) for step in range(2)]
        assert ids(batch.unbind(0), "traj_ids") == [0, 0, 2, 2, 4, 4], "the second worker goes on after the first's 3"
        batch = collector.evaluate(["e0", "e1", "long2", "long3"])
        assert answers(batch) == [(f"e{i}", i, 0, step) for i in (0, 1) for step in range(2)]
        batch = collector.evaluate(["long0", "e1"])
        assert answers(batch) == [("e1", 1, 0, step) for step in range(2)]
        with pytest.raises(CollectorError, match="the evaluation gave no turn") as caught:
            collector.evaluate(["long0", "long1", "long2"])
        assert type(caught.value) is NoTurns
        assert answers(collector.evaluate(QUESTIONS, n=2)) == EXPECTED


# Seeds


def drawing_env() -> Any:
    """A constructor of environments whose reward is drawn at random."""

    def make() -> Any:
        class Drawing(Answered):
            def _set_seed(self, seed: int | None) -> None:
                self._chance = torch.Generator().manual_seed(seed)

            def _step(self, tensordict: Any) -> Any:
                following = super()._step(tensordict)
                for row in following.unbind(0):
                    row["reward"] = torch.randint(10**9, (1,), generator=self._chance).float()
                return following

        return Drawing(1)

    return make


def test_a_prompt_has_the_same_seeds_on_whichever_worker_it_is_answered(ray_cluster: Any) -> None:
    def run(workers: int, kill: bool, seed: int | None) -> dict[tuple[str, int, int], float]:
        source = PromptSource(prompts(8), repeats=2, epochs=1, shuffle=True)
        collector = LLMCollector(
            source.env(drawing_env()), echo, num_envs=2, num_workers=workers, trajectories_per_batch=2, backend="ray",
            seed=seed,
        )  # fmt: skip
        with collector:
            if seed is None:
                collector.set_seed(3)
            if kill:
                os.kill(pid_of(collector, 0), signal.SIGKILL)
            rows = [row for batch in collector for row in batch.unbind(0)]
        assert len(rows) == 16
        keys = [(row["text"], *(int(row["collector", k]) for k in ("group_id", "group_index"))) for row in rows]
        return {key: float(row["next", "reward"]) for key, row in zip(keys, rows, strict=True)}

    two = run(workers=2, kill=False, seed=3)
    assert len(set(two.values())) == 16
    assert run(workers=1, kill=True, seed=None) == two, "set_seed reaches a worker that is restarted"


# Sleep


def with_engines_that_sleep(worker: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Gives in-process modules vLLM's two calls, and their runners what an engine's thread has."""
    from torchrl_llm.policies.batched import BatchedRunner
    from torchrl_llm.policies.engine_sleep import EngineSleep
    from torchrl_llm.policies.weights_module import ModuleTarget

    init, close = BatchedRunner.__init__, BatchedRunner.close

    def init_asleep(self: Any, *args: Any) -> None:
        self.asleep = EngineSleep()
        init(self, *args)

    def close_asleep(self: Any, deadline: float) -> list[str]:
        self.asleep.close()
        return close(self, deadline)

    BatchedRunner.__init__, BatchedRunner.close = init_asleep, close_asleep  # type: ignore[method-assign]
    ModuleTarget.sleep = lambda self, level: None  # type: ignore[attr-defined]
    ModuleTarget.wake_up = lambda self: None  # type: ignore[attr-defined]
    return arguments


def with_one_that_cannot_sleep(worker: int, arguments: dict[str, Any]) -> dict[str, Any]:
    from torchrl_llm.policies.weights_module import ModuleTarget

    def fail(self: Any, level: int) -> None:
        raise RuntimeError("no sleep here")

    arguments = with_engines_that_sleep(worker, arguments)
    if worker == 1:
        ModuleTarget.sleep = fail  # type: ignore[attr-defined]
    return arguments


def levels(collector: Any) -> dict[int, int]:
    return collector.call_workers(lambda worker: worker._weights.asleep.level)


def test_all_workers_sleep_and_wake_together_also_one_that_was_restarted_meanwhile(ray_cluster: Any) -> None:
    collector = LLMCollector(
        ScriptedEnv, telling_policy(), steps_per_batch=1, num_workers=2, worker_timeout=1.0, backend="ray",
        hooks=WorkerHooks(handle=with_engines_that_sleep),
    )  # fmt: skip
    target: queue.Queue[Any] = queue.Queue()
    with collector:
        next(collector)
        collector.sleep()
        assert levels(collector) == {0: 1, 1: 1}
        for refused in (
            lambda: next(collector), lambda: collector.start(target), lambda: collector.sleep(),
            lambda: collector.update_policy_weights_(weights(1)),
        ):  # fmt: skip
            with pytest.raises(CollectorError, match="engines sleep"):
                refused()
        collector.wake_up()
        assert levels(collector) == {0: 0, 1: 0}
        collector.start(target)
        target.get(timeout=PATIENCE)
        collector.sleep(level=2)
        os.kill(pid_of(collector, 1), signal.SIGKILL)
        wait_until(lambda: collector.stats()["worker_restarts"] == 1)
        wait_until(lambda: levels(collector) == {0: 2, 1: 2})
        # Whoever sleeps makes no progress, and is not taken for lost by that.
        while not target.empty():
            target.get()
        with pytest.raises(queue.Empty):
            target.get(timeout=1.5)
        assert collector.stats()["worker_restarts"] == 1
        collector.wake_up()
        with pytest.raises(CollectorError, match="sleep already, or have no weights yet"):
            collector.sleep()
        collector.update_policy_weights_(weights(4))
        seen: set[tuple[int, str]] = set()
        while not seen.issuperset({(0, "w4"), (1, "w4")}):
            seen |= {
                (int(row["collector", "worker_id"]), row["answer"]) for row in target.get(timeout=PATIENCE).unbind(0)
            }
        assert_conserved(collector.stats())
    assert_settled(collector.stats())


@pytest.mark.parametrize("level", [1, 2])
def test_a_worker_that_cannot_sleep_leaves_none_asleep(level: int, ray_cluster: Any) -> None:
    with LLMCollector(
        ScriptedEnv, telling_policy(), steps_per_batch=1, num_workers=2, backend="ray",
        hooks=WorkerHooks(handle=with_one_that_cannot_sleep),
    ) as collector:  # fmt: skip
        with pytest.raises(WorkerError, match="worker 1: RuntimeError: no sleep here"):
            collector.sleep(level)
        assert levels(collector) == {0: 0, 1: 0}
        if level == 2:
            with pytest.raises(CollectorError, match="discards their weights"):
                next(collector)
            collector.update_policy_weights_(weights(1))
        assert len(next(collector)) == 1


def test_what_cannot_sleep_says_so_and_goes_on(ray_cluster: Any) -> None:
    with LLMCollector(ScriptedEnv, scripted_echo, steps_per_batch=1, num_workers=2, backend="ray") as collector:
        with pytest.raises(ValueError, match=r"no policy of the collector is a vllm\.LLM"):
            collector.sleep()
        with pytest.raises(ValueError, match="level=3 is not allowed"):
            collector.sleep(3)
        with pytest.raises(CollectorError, match="do not sleep"):
            collector.wake_up()
        assert len(next(collector)) == 1


def test_prompts_that_the_workers_left_out_are_named_by_their_numbers_among_all() -> None:
    def part(first: int, groups: list[int]) -> Part:
        rows = [TensorDict(collector=TensorDict(group_id=group, traj_ids=0)) for group in groups]
        return Part(first, lazy_stack(rows))

    with pytest.warns(RuntimeWarning, match=r"left out 2 of 5 prompts, with the numbers \[1, 4\]"):
        found = together([part(3, [0]), part(0, [0, 2])], prompts=5)
    assert ids(found.unbind(0), "group_id") == [0, 2, 3]
