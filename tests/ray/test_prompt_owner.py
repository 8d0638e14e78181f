"""Who holds which prompt, and what becomes of it when a worker's process ends."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm import PromptSource
from torchrl_llm.prompt_line import Member
from torchrl_llm.ray.prompt_owner import PromptOwner


def keys(members: list[Member]) -> list[tuple[int, int]]:
    return [(member.group_id, member.index) for member in members]


def make_owner(prompts: int = 3, repeats: int = 2, whole_groups: bool = True) -> PromptOwner:
    data = [f"q{index}" for index in range(prompts)]
    return PromptOwner(PromptSource(data, repeats=repeats, epochs=1), whole_groups)


def test_a_group_goes_to_one_worker() -> None:
    owner = make_owner()
    assert keys(owner.take(0, 1)) == [(0, 0), (0, 1)]
    assert keys(owner.take(1, 1)) == [(1, 0), (1, 1)]


def test_a_spread_group_goes_to_whoever_asks() -> None:
    owner = make_owner(whole_groups=False)
    assert keys(owner.take(0, 1)) == [(0, 0)]
    assert keys(owner.take(1, 2)) == [(0, 1), (1, 0)]


def test_what_a_lost_worker_held_comes_first_and_what_arrived_does_not_come_again() -> None:
    owner = make_owner(whole_groups=False)
    owner.take(0, 3)
    owner.lost(0, arrived=[(0, 1)])
    assert keys(owner.take(1, 4)) == [(0, 0), (1, 0), (1, 1), (2, 0)]


def test_a_state_holds_all_that_has_not_reached_the_reader() -> None:
    owner = make_owner()
    owner.take(0, 1)
    owner.take(1, 1)
    owner.reached([(0, 0)])
    again = make_owner()
    again.load_state_dict(owner.state_dict())
    taken = []
    while members := again.take(0, 1):
        taken += keys(members)
    assert taken == [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_spread_group_is_given_up_with_its_member() -> None:
    owner = make_owner(whole_groups=False)
    owner.take(0, 1)
    owner.dropped(0, 0, 0)
    assert owner.take_failed() == [0]
    assert owner.take_failed() == []
    assert keys(owner.take(0, 1)) == [(1, 0)]


def test_a_member_dropped_from_a_group_on_one_worker_is_done_with() -> None:
    owner = make_owner(prompts=1)
    owner.take(0, 1)
    owner.dropped(0, 0, 0)
    owner.lost(0, arrived=[])
    assert keys(owner.take(1, 1)) == [(0, 1)]
    assert owner.take_failed() == []


@pytest.mark.parametrize("whole_groups", [True, False])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_member_reaches_the_reader_once_whatever_workers_are_lost(whole_groups: bool, seed: int) -> None:
    rng = random.Random(seed)
    owner = make_owner(prompts=6, repeats=3, whole_groups=whole_groups)
    held: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    arrived: list[tuple[int, tuple[int, int]]] = []
    reached: Counter[tuple[int, int]] = Counter()
    lives = 3
    while owner.has_more() or any(held.values()) or arrived:
        life = rng.choice(list(held))
        event = rng.random()
        if event < 0.35:
            held[life] += keys(owner.take(life, rng.randint(1, 3)))
        elif event < 0.65 and held[life]:
            arrived.append((life, held[life].pop(rng.randrange(len(held[life])))))
        elif event < 0.9 and arrived:
            _, key = arrived.pop(rng.randrange(len(arrived)))
            owner.reached([key])
            reached[key] += 1
        elif event >= 0.9:
            owner.lost(life, [key for by, key in arrived if by == life])
            del held[life]
            held[lives] = []
            lives += 1
    assert reached == {(group, index): 1 for group in range(6) for index in range(3)}


def test_a_life_that_is_over_gets_nothing_and_has_no_say() -> None:
    owner = make_owner()
    owner.take(0, 1)
    owner.lost(0, arrived=[])
    assert owner.take(0, 1) == [], "it asked before it ended"
    assert keys(owner.take(1, 1)) == [(0, 0), (0, 1)]
    owner.dropped(0, 0, 0)
    owner.withdraw(0, 0)
    owner.lost(1, arrived=[])
    assert keys(owner.take(2, 1)) == [(0, 0), (0, 1)]


def test_what_came_back_and_was_taken_by_another_is_not_handed_out_twice() -> None:
    owner = make_owner(whole_groups=False)
    owner.take(0, 1)
    owner.come_back([(0, 0)])
    assert keys(owner.take(1, 1)) == [(0, 0)]
    owner.lost(0, arrived=[])
    assert keys(owner.take(2, 2)) == [(0, 1), (1, 0)]
