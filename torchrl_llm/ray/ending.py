"""How workers' processes end: asked to hand over what they have finished, and then killed.

Functions without state, called by the fleet; they wait, and so are called without its lock, all but :func:`kill`.
"""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from torchrl_llm.ray.member import Member

# How long workers get to hand over what they have finished.
FINISH_SECONDS = 10.0
# The part of that in which a worker ends its collector; in the rest its answer comes.
WORKERS_PART = 0.8
# How long the driver waits for the sign that a killed process is gone.
KILL_SECONDS = 5.0


def finish_seconds(deadline: float = math.inf) -> float:
    """How long workers get that have to be done by then."""
    return min(max(0.0, deadline - time.monotonic()), FINISH_SECONDS)


class Parting(NamedTuple):
    """References to what a worker hands over, and to its last message, when its collector has ended."""

    handed: Any
    last: Any


def ask_to_finish(members: Sequence[Member], seconds: float) -> dict[int, Parting]:
    """Tells workers to end; returns what they say to that, by life, after ``seconds`` at most.

    They hand over what they have finished before they wait for threads that are busy.
    """
    deadline = time.monotonic() + seconds
    built = [member for member in members if member.ready]
    partings = {
        member.life: Parting(member.actor.hand_over.remote(WORKERS_PART * seconds), member.actor.finish.remote())
        for member in built
    }
    refs = [ref for parting in partings.values() for ref in parting]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=seconds)
    takes = [member.taking for member in built if member.taking is not None]
    concurrent.futures.wait(takes, timeout=max(0.0, deadline - time.monotonic()))
    return partings


def kill(member: Member) -> None:
    """Ends a process at once."""
    if ray.is_initialized():
        ray.kill(member.actor, no_restart=True)


def await_end(members: Sequence[Member]) -> None:
    """Waits for the sign that killed processes are gone: a call that fails."""
    if not ray.is_initialized():
        return
    signs = [member.actor.ready.remote() for member in members]
    if signs:
        ray.wait(signs, num_returns=len(signs), timeout=KILL_SECONDS)


def first_line(error: BaseException | None) -> str:
    """What an error says, without its traceback."""
    return "" if error is None else (str(error).strip().splitlines() or [""])[0]


def loss_message(member: Member, why: str, error: BaseException | None, trajectories: int, turns: int) -> str:
    """What the log says of a lost worker."""
    cause = "" if error is None else f" ({type(error).__name__}: {first_line(error)})"
    went = f"{trajectories} trajectories in flight and {turns} finished turns went with it"
    return f"{member.name} {why}{cause}: {went}"
