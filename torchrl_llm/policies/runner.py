"""The protocol between the rollout and a policy runner.

A runner turns observations into actions, request by request. The rollout calls :meth:`Runner.prepare` and
:meth:`Runner.submit` from the thread that drives it; the runner answers each ticket exactly once, from a thread of its
own, by posting a :class:`Response`. A runner never touches a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase

from torchrl_llm.policies.weight_target import WeightTarget
from torchrl_llm.seeds import derive


@dataclass(eq=False)
class Ticket:
    """One request on its way: the row that waits for it, where the answer goes, and the policy that works on it.

    ``seed`` is the collector's, and ``identity`` says what the trajectory is, whatever slot it runs in. ``alone`` asks
    a policy that is called on many requests for a call without others: it failed in company. ``guest`` marks what
    belongs to an evaluation beside the training stream.
    """

    env_id: int
    row: int
    policy_id: int
    trajectory: int
    turn: int
    post: Callable[[Response], None] | None = None
    runner: Runner | None = None
    seed: int | None = None
    identity: tuple[int, ...] = ()
    alone: bool = False
    guest: bool = False

    def sampling_seed(self, own: int | None) -> int | None:
        """The request's seed, made of the collector's, or else the policy's own; ``None`` without either."""
        seed = own if self.seed is None else self.seed
        return None if seed is None else derive(seed, *self.identity, self.turn)


@dataclass
class Response:
    """The answer to a ticket: what the policy wrote for the row, or why it could not.

    Args:
        ticket: what is answered.
        output: what the policy wrote, of batch size ``()``.
        error: why it could not.
        suspects: with an error that others got too: the requests that were being worked on when it came, of which any
            may be the reason. A request that is not among them was lost with the policy.
        carry: what the runner wants to be given when it prepares the trajectory's next turn.
        prompt_tokens: tokens of the prompt; 0 if the policy does not tell.
        response_tokens: tokens of the response; 0 if the policy does not tell.
        finish_reason: why the response ended (``"stop"``, ``"length"``, or ``"abort"`` if it was cut); ``None`` if the
            policy does not tell.
        policy_version: version of the weights when the response began to be generated.
        policy_version_end: their version when it ended.
        token_versions: int64, shape ``(T,)``: the version that made each token of the response, if it is tracked.
    """

    ticket: Ticket
    output: TensorDictBase | None = None
    error: BaseException | None = None
    suspects: tuple[Ticket, ...] = ()
    carry: Any = None
    prompt_tokens: int = 0
    response_tokens: int = 0
    finish_reason: str | None = None
    policy_version: int = 0
    policy_version_end: int = 0
    token_versions: torch.Tensor | None = None


# How long a thread that is not in a call gets to end, when there is no time left.
IDLE_SECONDS = 0.2

Post = Callable[[Response], None]


class Runner(Protocol):
    """Runs one policy.

    ``tokens_discarded`` counts the sampled tokens that weight updates have
    thrown away; ``track_token_versions`` says whether responses tell the version of each token.
    """

    policy: Any
    broken: bool
    tokens_discarded: int
    track_token_versions: bool

    @property
    def version(self) -> int:
        """Version of the policy's weights."""

    def prepare(self, observation: TensorDictBase, carry: Any) -> Any:
        """Turns an observation (batch size ``()``) into a request, in the rollout's thread.

        Args:
            observation: what the row observes, under the policy's own keys.
            carry: the ``carry`` of the last response in the same trajectory; ``None`` at its first turn.

        Raises:
            PromptTooLong: if the policy's context has no room for a response.
        """

    def restore_version(self, version: int) -> None:
        """Counts versions from ``version`` on, before the first request: a collection goes on from a saved state."""

    def weight_target(self) -> WeightTarget | None:
        """How to switch the policy's weights; ``None`` if the runner is closed."""

    def began(self, ticket: Ticket) -> int | None:
        """The version with which a request's response began, if the weights have changed since then."""

    def held_seconds(self, ticket: Ticket) -> float:
        """How long a request has waited for a switch of weights or a sleeping engine, through no fault of its own."""

    def submit(self, ticket: Ticket, request: Any) -> None:
        """Takes a request; the answer comes as a :class:`Response`. Never blocks."""

    def abort(self, ticket: Ticket) -> None:
        """Gives a request up: it is not worked on any more, as far as that can be stopped. Never blocks.

        An answer that is on its way may still come.
        """

    def cut(self, ticket: Ticket) -> bool:
        """Asks for a request's answer now, with the tokens made so far and the finish reason ``"abort"``. Never blocks.

        Returns:
            ``False`` if this runner cannot: its answer comes when it comes.
        """

    def close(self, deadline: float) -> list[str]:
        """Gives up what is in flight, without answers, and ends the runner's thread.

        Args:
            deadline: until when to wait, in seconds of :func:`time.monotonic`.

        Returns:
            The names of threads that were still busy at the deadline.
        """
