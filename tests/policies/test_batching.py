"""What a batched runner takes at a time."""

from __future__ import annotations

import queue
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from torchrl_llm import RunnerOptions
from torchrl_llm.policies.batched import BatchedRunner
from torchrl_llm.policies.runner import Response, Ticket


class ByLength(BatchedRunner):
    """A runner whose requests tell their length."""

    def _length(self, request: Any) -> int:
        return int(request["length"])


def unstarted(lengths: list[int], max_batch: int | None) -> ByLength:
    runner = ByLength.__new__(ByLength)
    runner._max_batch = max_batch
    runner._waiting = deque((Ticket(i, 0, 0, i, 0), {"length": n}) for i, n in enumerate(lengths))
    return runner


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12), max_batch=st.integers(1, 6))
def test_every_request_is_taken_once_in_windows_of_like_length_with_the_oldest(
    lengths: list[int], max_batch: int
) -> None:
    runner = unstarted(lengths, max_batch)
    taken: list[int] = []
    while runner._waiting:
        waiting = [ticket.env_id for ticket, _ in runner._waiting]
        batch = [ticket.env_id for ticket, _ in runner._take()]
        assert waiting[0] in batch
        assert len(batch) == min(max_batch, len(waiting))
        span = [lengths[i] for i in batch]
        rest = [lengths[i] for i in waiting if i not in batch]
        assert not any(min(span) < n < max(span) for n in rest), "a window has no gaps"
        taken += batch
    assert sorted(taken) == list(range(len(lengths)))


def test_all_that_waits_is_one_batch_by_default() -> None:
    assert len(unstarted([3, 1, 2], None)._take()) == 3


def test_batch_wait_gathers_requests_that_come_later() -> None:
    sizes: list[int] = []

    def policy(rows: TensorDictBase) -> TensorDictBase:
        sizes.append(len(rows))
        return rows

    answers: queue.SimpleQueue[Response] = queue.SimpleQueue()
    runner = BatchedRunner(policy, answers.put, RunnerOptions(batch_wait=0.5))
    for index in range(3):
        runner.submit(Ticket(index, 0, 0, index, 0), TensorDict({"x": index}))
    assert [answers.get(timeout=10).ticket.env_id for _ in range(3)] == [0, 1, 2]
    assert sizes == [3]
    assert runner.close(0.0) == []


@pytest.mark.parametrize("options", [{"batch_wait": -1}, {"max_batch": 0}, {"max_batch": 1.5}])
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(ValueError, match=name):
        RunnerOptions(None, **options)


def test_an_evaluations_requests_and_one_that_failed_in_company_are_called_apart() -> None:
    runner = unstarted([1] * 6, None)
    for index, (ticket, _) in enumerate(runner._waiting):
        ticket.guest, ticket.alone = index in (1, 4), index == 2
    taken = []
    while runner._waiting:
        taken.append([ticket.env_id for ticket, _ in runner._take()])
    assert taken == [[0, 3, 5], [1, 4], [2]]


def test_a_call_that_fails_says_which_requests_it_held() -> None:
    answers: queue.SimpleQueue[Response] = queue.SimpleQueue()

    def policy(rows: TensorDictBase) -> TensorDictBase:
        raise ValueError("no")

    runner = BatchedRunner(policy, answers.put, RunnerOptions(batch_wait=0.5))
    tickets = [Ticket(index, 0, 0, index, 0, guest=index < 2) for index in range(4)]
    for ticket in tickets:
        runner.submit(ticket, TensorDict({"x": ticket.env_id}))
    found = [answers.get(timeout=10) for _ in range(4)]
    assert [response.ticket for response in found] == tickets
    assert [response.suspects for response in found] == [tuple(tickets[:2])] * 2 + [tuple(tickets[2:])] * 2
    assert runner.broken
    late = Ticket(4, 0, 0, 4, 0)
    runner.submit(late, TensorDict({"x": 4}))
    assert answers.get(timeout=10).suspects == tuple(tickets[2:])
    assert runner.close(0.0) == []
