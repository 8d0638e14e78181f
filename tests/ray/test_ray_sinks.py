"""Batches on their way to a Ray queue or replay buffer, that are lost with the node on which they lie."""

from __future__ import annotations

import time
from typing import Any

import fakes
import pytest
import ray
from tensordict import TensorDict

from torchrl_llm import CollectorError
from torchrl_llm.batches import StepBatcher, stack_turns
from torchrl_llm.budget import Budget
from torchrl_llm.control import Control
from torchrl_llm.handover import END, Handover
from torchrl_llm.ledger import Ledger
from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.member import Arrival
from torchrl_llm.ray.messages import Header, Parcel, TurnHead
from torchrl_llm.ray.rollout import ArrivedBatch, RayRollout, whole_delivery
from torchrl_llm.ray.sinks import OPENED_FROM_QUEUE, RayBufferSink, RayQueueSink
from torchrl_llm.ray.transport import pack
from torchrl_llm.sinks import BatchLost, Delivery


def parcel(*texts: str, opened_by: int = OPENED_FROM_QUEUE) -> Parcel:
    return Parcel(pack([TensorDict(text=text) for text in texts]), opened_by)


def arrival(first: int, *texts: str, ref: Any = None) -> Arrival:
    """A batch of trajectories of one turn, numbered from ``first``."""
    numbers = range(first, first + len(texts))
    heads = [TurnHead(number, 0, 0, 0, group_id=number, group_index=0, policy_version=0, began_with=0, done=True)
             for number in numbers]  # fmt: skip
    return Arrival(0, Header(0, heads), ref=ref, value=None if ref is not None else parcel(*texts))


def three_batches() -> list[Arrival]:
    return [
        arrival(0, "a", "b", ref="first"),
        arrival(2, "c", "d", ref="second"),
        arrival(4, "e", "f", ref="third"),
    ]


# What Ray says of what is lost


@pytest.fixture
def control() -> Control:
    return Control(wake=lambda: None)


def lost_reference() -> Any:
    """A reference to a batch that is gone with the process that it belonged to."""

    class Owner:
        def make(self, batch: Any) -> list[Any]:
            return [ray.put(batch)]

    owner = ray.remote(num_cpus=0)(Owner).remote()
    [ref] = ray.get(owner.make.remote(parcel("x" * 300_000, opened_by=0)))
    ray.kill(owner)
    deadline = time.monotonic() + fakes.PATIENCE
    with pytest.raises(ray.exceptions.ObjectLostError):
        while time.monotonic() < deadline:  # until Ray has noticed
            ray.get(ref, timeout=fakes.PATIENCE)
    return ref


@pytest.mark.slow
def test_a_lost_batch_is_no_fault_of_the_queue_which_takes_the_next_one(ray_cluster: Any, control: Control) -> None:
    from ray.util.queue import Queue

    booked: list[Any] = []
    target = Queue(maxsize=1, actor_options={"num_cpus": 0})
    sink = RayQueueSink(target)
    batch = ArrivedBatch(arrival(0, "a", ref=lost_reference()), booked.append)
    for write in (lambda: sink.write(batch, control), lambda: sink.write_last(batch, deadline=0.0)):
        batch.lost = False
        with pytest.raises(BatchLost) as caught:
            write()
        assert batch.lost
        caught.value.book(["a"])
    assert booked == [["a"], ["a"]]
    there = ArrivedBatch(arrival(0, "b", ref=ray.put(parcel("b"))), booked.append)
    assert sink.write(there, control, Delivery(poll=5.0))
    assert target.get(timeout=fakes.PATIENCE)["text"] == ["b"]
    ray.kill(target.actor)
    with pytest.raises(CollectorError, match="the queue does not take the batch"):
        sink.write(there, control)
    assert not there.lost


@pytest.mark.slow
def test_a_lost_batch_is_no_fault_of_the_replay_buffer(ray_cluster: Any, control: Control) -> None:
    class Remote:
        """As torchrl's: its actor has an ``extend``."""

        def __init__(self) -> None:
            class Buffer:
                def extend(self, batch: Any) -> int:
                    if batch["text"] == ["bad"]:
                        raise RuntimeError("no room")
                    return len(batch)

            self._rb = ray.remote(num_cpus=0)(Buffer).remote()

    buffer = Remote()
    sink = RayBufferSink(buffer)
    batch = ArrivedBatch(arrival(0, "a", ref=lost_reference()), lambda turns: None)
    with pytest.raises(BatchLost):
        sink.write(batch, control)
    with pytest.raises(BatchLost):
        sink.write_last(batch, deadline=0.0)
    there = ArrivedBatch(arrival(0, "b", ref=ray.put(parcel("b", opened_by=1))), lambda turns: None)
    assert sink.write(there, control)
    bad = ArrivedBatch(arrival(0, "bad", ref=ray.put(parcel("bad", opened_by=1))), lambda turns: None)
    with pytest.raises(CollectorError, match=r"the replay buffer does not take the batch: (.|\n)*no room"):
        sink.write(bad, control)
    ray.kill(buffer._rb)


# What becomes of the others


class Fleet:
    """Workers that have sent what they have sent, and are gone."""

    fatal = None
    at_work = False

    def __init__(self, arrivals: list[Arrival]) -> None:
        self.roster = self
        self._arrivals = arrivals

    def send_to(self, opened_by: int) -> bool:
        return True

    def next_arrival(self) -> Arrival | None:
        return self._arrivals.pop(0) if self._arrivals else None

    def revive(self) -> bool:
        return False

    def refresh(self) -> None: ...
    def begin(self) -> None: ...
    def finish_all(self, deadline: float) -> None: ...


class Groups:
    """Prompts without groups; notes what comes back."""

    size = None
    spread = False

    def __init__(self) -> None:
        self.back: list[Any] = []
        self.reached: list[int] = []

    def come_back(self, members: list[Any]) -> None:
        self.back += members

    def delivered(self, turns: list[Any]) -> None:
        self.reached += [turn.trajectory.id for turn in turns]

    def settle(self, *_: Any) -> None: ...
    def end_failed(self, *_: Any) -> None: ...


class Target:
    """A sink that takes whole batches unread, unless they are lost on their way."""

    opened_by = OPENED_FROM_QUEUE

    def __init__(self, loses: list[str]) -> None:
        self.texts: list[list[str]] = []
        self._loses = loses

    def write(self, batch: Any, control: Control, delivery: Any = None) -> bool:
        if not isinstance(batch, ArrivedBatch):
            self.texts.append(list(batch["text"]))
            return True
        if batch.ref in self._loses:
            raise batch.lose()
        self.texts.append([batch.ref])
        return True

    def write_last(self, batch: Any, deadline: float) -> bool:
        return self.write(batch, None)  # type: ignore[arg-type]


def collection(
    arrivals: list[Arrival], loses: list[str], size: int, total: int, launched: int
) -> tuple[Handover, RayRollout, ClusterBooks, Groups, Target]:
    books, worker = ClusterBooks(), Ledger()
    books.begin(0, 0)
    for number in range(launched):
        worker.launch(number)
        worker.finish_turn(1, 1)
        worker.deliver(1, [number])
    books.report(0, 0, worker.snapshot())
    books.arrive(0, turns=launched, ended=launched)
    control, groups, target = Control(wake=lambda: None), Groups(), Target(loses)
    rollout = RayRollout(
        fleet=Fleet(arrivals), batcher=StepBatcher(size), budget=Budget(total, False), books=books, control=control,
        groups=groups,
    )  # type: ignore[arg-type]  # fmt: skip
    rollout.send_to(target)
    handover: Any = Handover(
        rollout, control, books, lambda turns: whole_delivery(turns) or stack_turns(turns), changing=None
    )  # type: ignore[arg-type]
    return handover, rollout, books, groups, target


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, Parcel]:
    """Ray's object store: what is not in it is lost."""
    parcels: dict[str, Parcel] = {}

    def get(ref: str) -> Parcel:
        if ref not in parcels:
            raise ray.exceptions.ObjectLostError("00", "", "")
        return parcels[ref]

    monkeypatch.setattr("torchrl_llm.ray.rollout.ray.get", get)
    return parcels


def test_a_batch_that_its_target_cannot_fetch_is_booked_and_its_prompts_come_back(store: dict[str, Parcel]) -> None:
    arrivals = [
        arrival(0, "a", "b", ref="first"),
        arrival(2, "c", "d", ref="second"),
        arrival(4, "e", "f", ref="third"),
    ]
    handover, _, books, groups, target = collection(arrivals, ["second"], size=2, total=-1, launched=6)
    results = [handover.next_batch(target, lambda: 0.0) for _ in range(3)]
    assert results == [None, None, END]
    assert target.texts == [["first"], ["third"]]
    assert groups.back == [(2, 0), (3, 0)] and groups.reached == [0, 1, 4, 5]
    stats = books.snapshot()
    fakes.assert_settled(stats)
    assert stats["recorded_by_reason"] == {"worker_died": 2}
    assert (stats["turns"], stats["turns_dropped"], stats["turns_lost_with_workers"]) == (4, 2, 2)


def test_of_a_batch_that_was_put_together_what_is_left_comes_again(store: dict[str, Parcel]) -> None:
    # Batches of the cluster are larger here than those of the workers, which the driver reads therefore.
    store |= {"first": parcel("a", "b"), "third": parcel("e", "f")}
    arrivals = [
        arrival(0, "a", "b", ref="first"),
        arrival(2, "c", "d", ref="second"),
        arrival(4, "e", "f", ref="third"),
    ]
    handover, _, books, groups, target = collection(arrivals, [], size=3, total=-1, launched=6)
    results = [handover.next_batch(target, lambda: 0.0) for _ in range(3)]
    assert results == [None, None, END]
    assert target.texts == [["a", "b", "e"], ["f"]]
    assert groups.back == [(2, 0), (3, 0)] and groups.reached == [0, 1, 4, 5]
    fakes.assert_settled(books.snapshot())
    assert books.snapshot()["recorded_by_reason"] == {"worker_died": 2}


def test_what_is_lost_while_the_collection_stops_is_no_error(store: dict[str, Parcel]) -> None:
    arrivals = [arrival(0, "a", "b", ref="first"), arrival(2, "c", "d", ref="second")]
    handover, _, books, groups, target = collection(arrivals, ["first"], size=2, total=-1, launched=4)
    handover.write_rest(target, room_until=0.0, deadline=0.0)
    assert target.texts == [["second"]]
    assert groups.back == [(0, 0), (1, 0)]
    fakes.assert_settled(books.snapshot())


def test_a_member_of_a_group_that_is_put_together_at_the_driver_is_read_when_it_arrives(
    store: dict[str, Parcel],
) -> None:
    _, rollout, books, groups, _ = collection([arrival(0, "a", ref="first")], [], size=2, total=-1, launched=1)
    groups.spread = True
    assert rollout.stay_away
    assert rollout.next_batch() is None
    assert groups.back == [(0, 0)], "at once, so that its group does not become complete with it"
    fakes.assert_settled(books.snapshot())
