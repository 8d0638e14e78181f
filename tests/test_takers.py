"""What a collector has taken of a source goes to nobody else, and back when it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm import PromptSource
from torchrl_llm.prompt_line import Member
from torchrl_llm.takers import Taker


def make_source(groups: int = 3, repeats: int = 2) -> PromptSource:
    return PromptSource([f"q{index}" for index in range(groups)], repeats=repeats, epochs=1)


def keys(members: list[Member]) -> list[tuple[int, int]]:
    return [(member.group_id, member.index) for member in members]


def test_two_that_take_whole_groups_get_different_ones() -> None:
    source = make_source()
    one, other = Taker(source, whole_groups=True), Taker(source, whole_groups=True)
    assert [keys(taker.take(1)) for taker in (one, other, one, other)] == [[(0, 0)], [(1, 0)], [(0, 1)], [(1, 1)]]
    assert keys(one.take(5)) == [(2, 0), (2, 1)]
    assert other.take(1) == []


def test_what_comes_back_to_one_that_takes_whole_groups_stays_with_it() -> None:
    source = make_source()
    one, other = Taker(source, whole_groups=True), Taker(source, whole_groups=True)
    one.take(2)
    one.returned(0, 1)
    assert (one.owed, other.owed) == (1, 0)
    assert keys(other.take(1)) == [(1, 0)]
    assert keys(one.take(2)) == [(0, 1), (2, 0)]


def test_what_comes_back_to_one_that_takes_single_members_is_for_whoever_is_next() -> None:
    source = make_source()
    one, other = Taker(source, whole_groups=False), Taker(source, whole_groups=False)
    one.take(2)
    one.returned(0, 1)
    assert one.owed == 0 and one.pending == other.pending == 1
    assert keys(other.take(2)) == [(0, 1), (1, 0)]
    one.give_back()
    assert keys(other.take(9)) == [(0, 0), (1, 1), (2, 0), (2, 1)]


def test_what_one_has_at_its_end_goes_back_and_nothing_that_is_done_with() -> None:
    source = make_source(4)
    one = Taker(source, whole_groups=True)
    one.take(7)
    one.delivered(0, 0)
    one.delivered(0, 1)
    one.withdraw(1)
    one.dropped(2, 0)
    one.give_back()
    one.give_back()
    assert keys(Taker(source, whole_groups=True).take(9)) == [(2, 1), (3, 0), (3, 1)]


@given(st.data())
def test_whoever_takes_and_ends_every_member_is_delivered_once(data: st.DataObject) -> None:
    source = make_source(5, repeats=3)
    whole = data.draw(st.booleans())
    takers = [Taker(source, whole) for _ in range(2)]
    held: list[list[tuple[int, int]]] = [[], []]
    delivered: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        which = data.draw(st.integers(0, 1))
        action = data.draw(st.sampled_from(["take", "deliver", "return", "end"]))
        if action == "take":
            held[which] += keys(takers[which].take(data.draw(st.integers(1, 4))))
        elif action == "end":
            takers[which].give_back()
            takers[which], held[which] = Taker(source, whole), []
        elif held[which]:
            key = held[which].pop(data.draw(st.integers(0, len(held[which]) - 1)))
            (takers[which].delivered if action == "deliver" else takers[which].returned)(*key)
            delivered += [key] * (action == "deliver")
    for taker in takers:
        taker.give_back()
    last = Taker(source, whole)
    while taken := keys(last.take(4)):
        for key in taken:
            last.delivered(*key)
        delivered += taken
    assert sorted(delivered) == [(group, index) for group in range(5) for index in range(3)]
    assert source.state_dict()["held"] == []
