"""The errors that the collector raises, and where in the collection they happened.

Invariant: every error that reaches a reader is a :class:`CollectorError` that chains the original exception as
``__cause__`` and names the slot, the trajectory and the turn as far as they are known.
"""

from __future__ import annotations

from typing import Any


class CollectorError(RuntimeError):
    """Something stopped the collection, or a call came at a time when it cannot be served.

    Args:
        message: what happened, and what can be done about it.

    Keyword Args:
        slot: index of the environment slot (``("collector", "env_id")``), if one is to blame.
        trajectory: id of the trajectory (``("collector", "traj_ids")``).
        turn: number of the turn within the trajectory, from 0.

    Examples:
        >>> error = EnvError("step failed", slot=2, trajectory=7, turn=0)
        >>> str(error)
        'step failed (slot 2, trajectory 7, turn 0)'
    """

    def __init__(
        self, message: str, *, slot: int | None = None, trajectory: int | None = None, turn: int | None = None
    ) -> None:
        places = (("slot", slot), ("trajectory", trajectory), ("turn", turn))
        where = ", ".join(f"{name} {value}" for name, value in places if value is not None)
        super().__init__(f"{message} ({where})" if where else message)
        self.message = message
        self.slot = slot
        self.trajectory = trajectory
        self.turn = turn

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments do not survive the default pickling of exceptions.
        return _rebuild, (type(self), self.message, self.slot, self.trajectory, self.turn)


def _rebuild(
    kind: type[CollectorError], message: str, slot: int | None, trajectory: int | None, turn: int | None
) -> CollectorError:
    return kind(message, slot=slot, trajectory=trajectory, turn=turn)


class EnvError(CollectorError):
    """An environment raised in its constructor, ``reset`` or ``step``, or returned what cannot be used."""


class PolicyError(CollectorError):
    """A policy raised in its constructor or its call, lost its engine, or returned what cannot be used."""


class WorkerError(CollectorError):
    """A worker process of a distributed collector was lost and could not be replaced."""


class PromptTooLong(Exception):
    """A prompt leaves no room for a response in the model's context.

    Not an error of the collection: the rollout ends the trajectory as truncated, or skips the prompt and counts it.

    Args:
        length: tokens in the prompt.
        limit: the longest prompt that the engine takes, in tokens.
    """

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"the prompt has {length} tokens; the engine takes at most {limit}")
        self.length = length
        self.limit = limit


class PromptsExhausted(Exception):
    """An environment has no further prompt: its data were built not to repeat, and they have run out.

    An environment may raise it in ``reset`` to end its part of the collection cleanly.
    """
