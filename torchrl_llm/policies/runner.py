"""The protocol between the rollout and a policy runner.

A runner turns observations into actions, request by request. The rollout calls :meth:`Runner.prepare` and
:meth:`Runner.submit` from the thread that drives it; the runner answers each ticket exactly once, from a thread of its
own, by posting a :class:`Response`. A runner never touches a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tensordict import TensorDictBase


@dataclass(eq=False)
class Ticket:
    """One request on its way: the row that waits for it, and the policy that works on it."""

    env_id: int
    row: int
    policy_id: int
    trajectory: int
    turn: int
    runner: Runner | None = None


@dataclass
class Response:
    """The answer to a ticket: what the policy wrote for the row, or why it could not."""

    ticket: Ticket
    output: TensorDictBase | None = None
    error: Exception | None = None
    prompt_tokens: int = 0
    response_tokens: int = 0


Post = Callable[[Response], None]


class Runner(Protocol):
    """Runs one policy."""

    policy: Any
    broken: bool

    def prepare(self, observation: TensorDictBase, previous: TensorDictBase | None) -> Any:
        """Turns an observation (batch size ``()``) into a request, in the rollout's thread.

        Args:
            observation: what the row observes, under the policy's own keys.
            previous: what the policy wrote at the turn before in the same trajectory; ``None`` at the first.

        Raises:
            PromptTooLong: if the policy's context has no room for a response.
        """

    def submit(self, ticket: Ticket, request: Any) -> None:
        """Takes a request; the answer comes as a :class:`Response`. Never blocks."""

    def close(self, deadline: float) -> list[str]:
        """Gives up what is in flight, without answers, and ends the runner's thread.

        Args:
            deadline: until when to wait, in seconds of :func:`time.monotonic`.

        Returns:
            The names of threads that were still busy at the deadline.
        """
