"""Which policy gets a new trajectory. Pure; called by the thread that drives the rollout.

Invariant: a trajectory stays with the policy that it began with; only new trajectories are routed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchrl_llm.errors import CollectorError

Route = Callable[[int, Sequence[int]], int]
ROUTES = ("least_loaded", "sticky", "paired")


def least_loaded(env_id: int, loads: Sequence[int]) -> int:
    """The policy with the fewest trajectories; the first of those with equally few.

    Examples:
        >>> least_loaded(0, [2, 1, 1])
        1
    """
    return min(range(len(loads)), key=loads.__getitem__)


def sticky(env_id: int, loads: Sequence[int]) -> int:
    """Each environment always has the same policy; the environments are dealt out in turn.

    Examples:
        >>> [sticky(env_id, [0, 0]) for env_id in range(4)]
        [0, 1, 0, 1]
    """
    return env_id % len(loads)


def paired(env_id: int, loads: Sequence[int]) -> int:
    """Environment i has policy i.

    Examples:
        >>> paired(1, [5, 0])
        1
    """
    return env_id


def reachable(route: str | Route, env_id: int, num_policies: int) -> list[int]:
    """The policies that ``route`` may give to an environment.

    Examples:
        >>> reachable("paired", 1, 2), reachable("sticky", 3, 2), reachable("least_loaded", 0, 2)
        ([1], [1], [0, 1])
    """
    if route == "paired":
        return [env_id]
    if route == "sticky":
        return [env_id % num_policies]
    return list(range(num_policies))


def make_route(route: str | Route, num_envs: int, num_policies: int) -> Route:
    """The routing function for the collector's ``route`` argument.

    Args:
        route: a name, or a callable ``(env_id, loads) -> policy_id``, with ``loads`` the number of trajectories that
            each policy has now.
        num_envs: how many environments there are.
        num_policies: how many policies there are.

    Raises:
        ValueError: for an unknown name, or for ``"paired"`` with lists of different lengths.
        TypeError: for anything else.
    """
    if callable(route):
        return route
    if not isinstance(route, str):
        raise TypeError(
            f"route={route!r} is not allowed: pass one of {ROUTES} or a callable (env_id, loads) -> policy_id"
        )
    if route not in ROUTES:
        raise ValueError(
            f"route={route!r} is not allowed: pass one of {ROUTES} or a callable (env_id, loads) -> policy_id"
        )
    if route == "paired" and num_envs != num_policies:
        raise ValueError(
            f"route='paired' needs as many policies as environments, got {num_policies} and {num_envs}: pass lists of "
            "the same length, or route='sticky'"
        )
    return {"least_loaded": least_loaded, "sticky": sticky, "paired": paired}[route]


def pick_policy(route: Route, env_id: int, loads: tuple[int, ...]) -> int:
    """The policy that a route gives a new trajectory.

    Raises:
        CollectorError: if the route fails, or gives no policy.
    """
    try:
        policy_id = route(env_id, loads)
    except Exception as error:
        raise CollectorError(f"route failed: {type(error).__name__}: {error}", slot=env_id) from error
    if not isinstance(policy_id, int) or not 0 <= policy_id < len(loads):
        raise CollectorError(f"route returned {policy_id!r}; an int from 0 to {len(loads) - 1} is needed", slot=env_id)
    return policy_id
