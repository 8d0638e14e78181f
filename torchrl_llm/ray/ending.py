"""How workers' processes end: asked to hand over what they have finished, and then killed.

Functions without state, called by the fleet; they wait, and so are called without its lock, all but :func:`kill`.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import ray

from torchrl_llm.ray.member import Member

# How long workers get to hand over what they have finished.
FINISH_SECONDS = 10.0
# How long the driver waits for the sign that a killed process is gone.
KILL_SECONDS = 5.0


def ask_to_finish(members: Sequence[Member], seconds: float) -> dict[int, Any]:
    """Tells workers to end; returns references to what they hand over, by life, after ``seconds`` at most."""
    built = [member for member in members if member.ready]
    answers = {member.life: member.actor.finish.remote(seconds) for member in built}
    if answers:
        ray.wait(list(answers.values()), num_returns=len(answers), timeout=seconds)
    takes = [member.taking for member in built if member.taking is not None]
    concurrent.futures.wait(takes, timeout=KILL_SECONDS if takes else 0)
    return answers


def kill(member: Member) -> None:
    """Ends a process at once."""
    if ray.is_initialized():
        ray.kill(member.actor, no_restart=True)


def await_end(members: Sequence[Member]) -> None:
    """Waits for the sign that killed processes are gone: a call that fails."""
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
