"""The parts without I/O: dealing, whose turn it is, the cluster's books, the outbox, errors on their way."""

from __future__ import annotations

import itertools
import queue
import threading
from typing import Any

import fakes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from torchrl_llm.errors import CollectorError, EnvError
from torchrl_llm.ledger import Ledger
from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.dealing import default_workers, share_of
from torchrl_llm.ray.errors import RemoteTraceback, from_wire, relocated, to_wire
from torchrl_llm.ray.messages import TurnHead
from torchrl_llm.ray.outbox import Outbox
from torchrl_llm.ray.schedule import FirstCome, RoundRobin
from torchrl_llm.ray.transport import unpack

# Dealing


@pytest.mark.parametrize(("items", "workers"), list(itertools.product(range(1, 9), range(1, 9))))
def test_a_list_is_dealt_out_in_order_and_evenly_and_nobody_is_left_without(items: int, workers: int) -> None:
    shares = [share_of(list(range(items)), worker, workers) for worker in range(workers)]
    assert all(share.value == list(share.indices) == sorted(share.value) and share.value for share in shares)
    assert all(share.index(place) == item for share in shares for place, item in enumerate(share.indices))
    sizes = [len(share.value) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    dealt = sorted(item for share in shares for item in share.value)
    assert dealt == list(range(items)) if items >= workers else set(dealt) == set(range(items))
    assert share_of(list(range(items)), workers, workers) == shares[0], "one that is added later has the first's"


def test_paired_lists_stay_paired_and_constructors_are_given_to_each() -> None:
    assert all(share_of(list("abc"), w, 2).indices == share_of(list("xyz"), w, 2).indices for w in range(2))
    assert share_of("make", 1, 2).value == "make" and share_of("make", 1, 2).index(4) == 4
    assert default_workers(["a"] * 3, ["b"] * 5) == 5


# Schedules


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_first_come_is_first_served_whatever_happens(moves: list[tuple[int, bool]]) -> None:
    schedule: FirstCome[int] = FirstCome()
    given_out = []
    for number, (worker, take) in enumerate(moves):
        schedule.arrive(worker, number)
        if take:
            given_out.append(schedule.pop())
    assert given_out + schedule.drain() == list(range(len(moves)))
    assert schedule.pop() is None


@given(st.permutations([(worker, number) for worker in range(3) for number in range(4)]))
def test_round_robin_does_not_depend_on_who_is_fast(arrivals: list[tuple[int, int]]) -> None:
    schedule: RoundRobin[tuple[int, int]] = RoundRobin()
    for worker in range(3):
        schedule.join(worker)
    waiting: dict[int, list[int]] = {worker: [] for worker in range(3)}
    for worker, number in arrivals:  # each worker's own come in order
        waiting[worker].append(number)
    taken = []
    for worker, _ in arrivals:
        schedule.arrive(worker, (worker, len([t for t in taken if t == worker])))
        taken.append(worker)
    out = []
    while (item := schedule.pop()) is not None:
        out.append(item)
    assert out == [(worker, number) for number in range(4) for worker in range(3)]


def test_round_robin_waits_for_the_one_whose_turn_it_is_and_skips_who_left() -> None:
    schedule: RoundRobin[str] = RoundRobin()
    for worker in range(3):
        schedule.join(worker)
    schedule.arrive(1, "b0")
    schedule.arrive(2, "c0")
    assert schedule.pop() is None
    schedule.leave(0)
    assert [schedule.pop(), schedule.pop(), schedule.pop()] == ["b0", "c0", None]
    schedule.arrive(2, "c1")
    assert schedule.pop() is None, "worker 1's turn"
    schedule.arrive(1, "b1")
    schedule.leave(1)
    assert [schedule.pop(), schedule.pop(), schedule.pop()] == ["b1", "c1", None]
    schedule.join(3)
    schedule.arrive(3, "d0")
    schedule.arrive(2, "c2")
    assert schedule.drain() == ["c2", "d0"]


# Books


@given(st.data())
def test_the_books_balance_whatever_happens(data: st.DataObject) -> None:
    """Workers launch, finish, fail, send, die and are restarted in any order; the reader takes or drops."""
    books = ClusterBooks()
    life_of: dict[int, int] = {}
    ledgers: dict[int, Ledger] = {}
    live: dict[int, list[int]] = {}
    arrived: list[tuple[int, int]] = []
    numbers = itertools.count()
    ids = itertools.count()

    def start(worker: int) -> None:
        life = life_of[worker] = len(ledgers)
        ledgers[life], live[life] = Ledger(), []
        books.begin(life, worker)

    for worker in range(2):
        start(worker)
    for _ in range(data.draw(st.integers(0, 30))):
        worker = data.draw(st.sampled_from([0, 1]))
        life = life_of[worker]
        ledger = ledgers[life]
        move = data.draw(st.sampled_from(["launch", "send", "fail", "report", "die", "deliver", "drop"]))
        if move == "launch":
            live[life].append(next(ids))
            ledger.launch(live[life][-1])
        elif move == "fail" and live[life]:
            ledger.record(live[life].pop(), "failed")
        elif move == "send" and live[life]:
            trajectory = live[life].pop(0)
            ledger.finish_turn(1, 2)
            books.report(life, next(numbers), ledger.snapshot())
            ledger.deliver(1, [trajectory])
            books.arrive(life, 1, 1)
            arrived.append((life, trajectory))
        elif move == "report":
            books.report(life, next(numbers), ledger.snapshot())
        elif move == "die":
            known = books.snapshot()["workers"][worker]["in_flight"]
            assert books.end(life, "worker_died")[0] == known
            start(worker)
        elif move in ("deliver", "drop") and arrived:
            _, trajectory = arrived.pop(0)
            if move == "deliver":
                books.deliver(1, [trajectory])
            else:
                books.drop(1, [trajectory], "cut_off")
        fakes.assert_conserved(books.snapshot())
    stats = books.snapshot()
    assert stats["worker_restarts"] == len(ledgers) - 2
    books.record_rest("shutdown")
    fakes.assert_settled(books.snapshot())
    assert books.snapshot()["turns"] == books.turns_delivered == stats["turns"]


def test_old_reports_do_not_replace_new_ones() -> None:
    books, worker = ClusterBooks(), Ledger()
    books.begin(0, 0)
    worker.launch(0)
    assert books.report(0, 5, worker.snapshot())
    assert not books.report(0, 4, Ledger().snapshot())
    assert not books.report(0, 6, worker.snapshot()), "nothing has happened since"
    assert books.snapshot()["launched"] == 1


def test_what_a_worker_records_when_it_is_told_to_end_has_the_drivers_reason() -> None:
    books, worker = ClusterBooks(), Ledger()
    books.begin(0, 0)
    worker.launch(0)
    worker.record_rest("shutdown")
    books.report(0, 0, worker.snapshot())
    assert books.snapshot()["in_flight"] == 1
    books.end(0, "worker_removed")
    assert books.snapshot()["recorded_by_reason"] == {"worker_removed": 1}


def test_a_state_that_was_taken_after_a_shutdown_loads_with_nothing_in_flight() -> None:
    books, worker = ClusterBooks(), Ledger()
    books.begin(0, 0)
    for trajectory in range(3):
        worker.launch(trajectory)
    worker.finish_turn(1, 1)
    books.report(0, 0, worker.snapshot())
    books.arrive(0, turns=1, ended=1)
    books.deliver(1, [0])
    books.record_rest("shutdown")
    state = books.state_dict()
    for _ in range(2):  # also when what was loaded is saved again
        books = ClusterBooks()
        books.load_state_dict(state)
        stats = books.snapshot()
        fakes.assert_settled(stats)
        assert (stats["launched"], stats["delivered"], stats["recorded_by_reason"]) == (3, 1, {"shutdown": 2})
        books.begin(0, 0)
        state = books.state_dict()
    books.record_rest("shutdown")
    assert books.snapshot()["recorded_by_reason"] == {"shutdown": 2}


# The outbox


def batch(*texts: str) -> Any:
    return lazy_stack([TensorDict(text=text) for text in texts])


def label(turn: Any) -> TurnHead:
    turn["seen"] = torch.tensor(1)
    return TurnHead(0, 0, 0, 0, -1, -1, 0, 0, turn["text"] == "end")


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_an_outbox_holds_what_waits_and_what_was_taken_and_not_used(prefetch: int) -> None:
    outbox = Outbox(prefetch, label)
    for number in range(prefetch):
        outbox.put(batch(str(number)), timeout=0)
    with pytest.raises(queue.Full):
        outbox.put(batch("too many"), timeout=0)
    heads, packed = outbox.take()
    assert heads == [TurnHead(0, 0, 0, 0, -1, -1, 0, 0, False)]
    [row] = unpack(packed)
    assert (row["text"], int(row["seen"])) == ("0", 1), "labels are written into the turns"
    with pytest.raises(queue.Full):
        outbox.put(batch("too many"), timeout=0)
    if prefetch > 1:
        outbox.take()  # says that the first has been used
        outbox.put(batch("more"), timeout=0)


def test_an_outbox_that_ends_has_room_for_everything_and_gives_it_back() -> None:
    outbox = Outbox(1, label)
    outbox.put(batch("0"), timeout=0)
    outbox.let_all_in()
    outbox.put(batch("1", "end"), timeout=0)
    outbox.put(None, timeout=0)
    assert [[head.done for head in heads] for heads, _ in outbox.rest(timeout=0)] == [[False], [False, True]]
    assert outbox.take() is None
    assert outbox.take() is None, "nobody waits for a worker that ends"


def test_the_rest_of_an_outbox_waits_for_the_end_as_long_as_it_may() -> None:
    outbox = Outbox(1, label)
    outbox.put(batch("0"), timeout=0)
    outbox.let_all_in()
    assert len(outbox.rest(timeout=0.01)) == 1, "its thread is busy"

    def end() -> None:
        outbox.put(batch("1"))
        outbox.put(None)

    outbox = Outbox(1, label)
    outbox.put(batch("0"), timeout=0)
    thread = threading.Thread(target=end)
    outbox.let_all_in()
    thread.start()
    assert len(outbox.rest(timeout=fakes.PATIENCE)) == 2
    thread.join()


def test_a_take_waits_for_a_batch_and_wakes_a_put_that_waits_for_room() -> None:
    outbox = Outbox(1, label)
    taken: list[Any] = []
    taker = threading.Thread(target=lambda: taken.extend([outbox.take(), outbox.take(), outbox.take()]))
    taker.start()
    outbox.put(batch("0"), timeout=fakes.PATIENCE)
    outbox.put(batch("1"), timeout=fakes.PATIENCE)
    outbox.put(None)
    taker.join(fakes.PATIENCE)
    assert [unpack(letter[1])[0]["text"] for letter in taken[:2]] == ["0", "1"]
    assert taken[2] is None


# Errors


class Awkward(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("awkward")


class Held(Exception):
    def __init__(self) -> None:
        super().__init__("held")
        self.lock = threading.Lock()


def test_an_error_travels_with_its_causes_and_its_traceback() -> None:
    def fail() -> None:
        try:
            try:
                raise KeyError("inner")
            except KeyError:
                raise ValueError("middle")  # noqa: B904
        except ValueError as error:
            raise EnvError("outer", slot=1, trajectory=2, turn=3) from error

    with pytest.raises(EnvError) as raised:
        fail()
    error = from_wire(to_wire(raised.value))
    assert type(error) is EnvError and str(error) == "outer (slot 1, trajectory 2, turn 3)"
    assert (error.slot, error.trajectory, error.turn) == (1, 2, 3)
    assert type(error.__cause__) is ValueError
    assert type(error.__cause__.__cause__) is KeyError
    last = error.__cause__.__cause__.__cause__
    assert type(last) is RemoteTraceback and "in fail" in str(last)


@pytest.mark.parametrize("error", [Awkward(1, 2), Held()], ids=["not to be read", "not to be pickled"])
def test_an_error_that_cannot_travel_becomes_its_text(error: Exception) -> None:
    arrived = from_wire(to_wire(error))
    assert type(arrived) is RuntimeError
    assert str(arrived) == f"{type(error).__name__}: {error}"


def test_a_relocated_error_keeps_its_kind_and_its_cause() -> None:
    cause = ValueError("x")
    error = EnvError("failed", slot=0, trajectory=1, turn=2)
    error.__cause__ = cause
    moved = relocated(error, 5, 1 << 32)
    assert str(moved) == f"failed (slot 5, trajectory {1 << 32}, turn 2)"
    assert type(moved) is EnvError and moved.__cause__ is cause
    assert isinstance(moved, CollectorError)
