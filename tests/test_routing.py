"""Which policy gets a new trajectory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm.routing import least_loaded, make_route, paired, sticky


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=8), env_id=st.integers(0, 20))
def test_least_loaded_is_the_first_of_the_least(loads: list[int], env_id: int) -> None:
    chosen = least_loaded(env_id, loads)
    assert loads[chosen] == min(loads)
    assert min(loads) not in loads[:chosen]


def test_least_loaded_deals_new_trajectories_out_evenly() -> None:
    loads = [0, 0, 0]
    for _ in range(10):
        loads[least_loaded(0, loads)] += 1
    assert sorted(loads) == [3, 3, 4]


def test_sticky_gives_each_env_the_same_policy_whatever_the_loads() -> None:
    chosen = [[sticky(env_id, loads) for env_id in range(7)] for loads in ([0, 0, 0], [9, 0, 3])]
    assert chosen[0] == chosen[1] == [0, 1, 2, 0, 1, 2, 0]
    assert Counter(chosen[0]) == {0: 3, 1: 2, 2: 2}


def test_paired_gives_env_i_policy_i() -> None:
    assert [paired(env_id, [5, 0, 2]) for env_id in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(("name", "route"), [("least_loaded", least_loaded), ("sticky", sticky), ("paired", paired)])
def test_a_name_stands_for_its_function(name: str, route: Any) -> None:
    assert make_route(name, num_envs=2, num_policies=2) is route


def test_a_callable_is_taken_as_it_is() -> None:
    def route(env_id: int, loads: Any) -> int:
        return 0

    assert make_route(route, 3, 2) is route


@pytest.mark.parametrize(("envs", "policies"), [(2, 1), (1, 2), (4, 2)])
def test_paired_needs_lists_of_the_same_length(envs: int, policies: int) -> None:
    with pytest.raises(ValueError, match=f"got {policies} and {envs}: pass lists of the same length"):
        make_route("paired", envs, policies)


@pytest.mark.parametrize(
    ("route", "error"), [("random", ValueError), ("", ValueError), (None, TypeError), (0, TypeError), ([1], TypeError)]
)
def test_any_other_route_is_refused_and_the_choices_are_named(route: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"least_loaded.*sticky.*paired.*callable") as raised:
        make_route(route, 2, 2)
    assert f"route={route!r} is not allowed" in str(raised.value)
