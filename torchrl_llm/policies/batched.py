"""The batched runner: any TensorDict policy, called on whatever waits.

The runner's thread takes every request that is waiting, calls the policy once on a one-dimensional lazy stack of their
rows, and splits the result. The policy is called by that thread only, without gradients and, as in TorchRL's
collectors, with exploration.

Invariants: each submitted ticket is answered once, unless the runner is closed first; after a failure, with that
failure. A call holds requests of the training stream or of evaluations, never of both: one that fails with the latter
is no failure of the policy's for the former.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_llm.policies.hold import Hold, OwnerThread
from torchrl_llm.policies.options import DEFAULT_OPTIONS, RunnerOptions
from torchrl_llm.policies.runner import IDLE_SECONDS, Post, Response, Ticket
from torchrl_llm.policies.weight_target import WeightTarget
from torchrl_llm.policies.weights_module import BatchedTarget, ModuleTarget, enlist


class BatchedRunner:
    """Runs a policy on batches of the requests that wait.

    Args:
        policy: a callable from a TensorDict of shape ``(N,)`` to one of the same shape.
        post: where responses go.
        options: how to run it.
    """

    def __init__(self, policy: Any, post: Post, options: RunnerOptions = DEFAULT_OPTIONS) -> None:
        self.policy = policy
        self.broken = False
        self.version = enlist(self)
        self.tokens_discarded = 0
        self.track_token_versions = False
        self._holds: deque[Hold] = deque()
        self._failure: BaseException | None = None
        self._suspects: tuple[Ticket, ...] = ()
        self._post = post
        self._batch_wait = options.batch_wait
        self._max_batch = options.max_batch
        self._waiting: deque[tuple[Ticket, Any]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = OwnerThread(target=self._work, name="torchrl_llm-policy", daemon=True)
        self._thread.start()

    def prepare(self, observation: TensorDictBase, carry: Any) -> Any:
        """The row itself; see :meth:`Runner.prepare`."""
        return observation

    def submit(self, ticket: Ticket, request: Any) -> None:
        """See :meth:`Runner.submit`."""
        with self._changed:
            failure, suspects = self._failure, self._suspects
            if failure is None:
                self._waiting.append((ticket, request))
                self._changed.notify()
        if failure is not None:
            self._post(Response(ticket, error=failure, suspects=suspects))

    def restore_version(self, version: int) -> None:
        """See :meth:`Runner.restore_version`."""
        self.version = version

    def weight_target(self) -> WeightTarget | None:
        """See :meth:`Runner.weight_target`."""
        policy = self.policy
        if policy is None:
            return None
        return ModuleTarget(self, policy) if isinstance(policy, nn.Module) else BatchedTarget(self, policy)

    def began(self, ticket: Ticket) -> int | None:
        """Never: the weights are switched between two calls."""
        return None

    def held_seconds(self, ticket: Ticket) -> float:
        """None to speak of: weights are copied between two calls, and only engines sleep."""
        return 0.0

    def hold(self, mode: str) -> Hold:
        """Brings the thread to rest between two calls of the policy; returns at once, see :class:`Hold`."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a policy cannot update its own weights from its call: do it from another thread")
        hold = Hold(self._thread.name)
        with self._changed:
            if not self._closing:
                self._holds.append(hold)
                self._changed.notify()
                return hold
        hold.give_up(RuntimeError("the policy was closed"))
        return hold

    def fail(self, error: BaseException, suspects: tuple[Ticket, ...] = ()) -> None:
        """Gives the policy up: all that waits, and all that comes, gets ``error``; for the runner's thread only."""
        with self._changed:
            self._failure, self._suspects = error, suspects
            tickets = [ticket for ticket, _ in self._waiting]
            self._waiting.clear()
        self.broken = True
        for ticket in tickets:
            self._post(Response(ticket, error=error, suspects=suspects))

    def abort(self, ticket: Ticket) -> None:
        """See :meth:`Runner.abort`. A call of the policy that is under way goes on."""
        with self._changed:
            self._waiting = deque(item for item in self._waiting if item[0] is not ticket)

    def cut(self, ticket: Ticket) -> bool:
        """A call of the policy cannot be cut short."""
        return False

    def close(self, deadline: float) -> list[str]:
        """See :meth:`Runner.close`. A call of the policy that is under way cannot be cut short.

        Weight updates that wait for its end wait no longer, also if it never ends.
        """
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify()
        self._thread.join(max(IDLE_SECONDS, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._give_up_holds()
            return [self._thread.name]
        # A closed runner that somebody still knows must not keep the policy's memory.
        self.policy = None
        return []

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._holds or self._closing):
                    self._changed.wait()
                self._await_more()
                if self._closing:
                    break
                hold = self._holds.popleft() if self._holds else None
                batch = [] if hold is not None else self._take()
            if hold is not None:
                hold.rest()
            else:
                self._run(batch)
        self._give_up_holds()

    def _give_up_holds(self) -> None:
        """Those that have not come to rest; one that rests is let go by whoever asked for it."""
        with self._changed:
            while self._holds:
                self._holds.popleft().give_up(RuntimeError("the policy was closed"))

    def _await_more(self) -> None:
        """Waits for company, up to ``batch_wait`` seconds after the first request."""
        until = time.monotonic() + self._batch_wait
        while not (self._closing or self._holds) and (left := until - time.monotonic()) > 0:
            self._changed.wait(left)

    def _take(self) -> list[tuple[Ticket, Any]]:
        """The next batch, out of what waits: the oldest request, and those that go best with it."""
        waiting = list(self._waiting)
        # Those of an evaluation keep to themselves, so that what fails of them costs the training nothing.
        company = [index for index, (ticket, _) in enumerate(waiting) if _together(waiting[0][0], ticket)]
        size = len(company) if self._max_batch is None else min(self._max_batch, len(company))
        # Rows of like length need little padding, so the batch is a window of the requests by length.
        by_length = sorted(company, key=lambda index: self._length(waiting[index][1]))
        oldest = by_length.index(0)
        start = min(max(0, oldest - size // 2), len(company) - size)
        taken = by_length[start : start + size]
        left = set(range(len(waiting))) - set(taken)
        self._waiting = deque(waiting[index] for index in sorted(left))
        return [waiting[index] for index in taken]

    def _length(self, request: Any) -> int:
        """Tokens in a request's prompt, where the runner knows them."""
        return 0

    def _run(self, batch: list[tuple[Ticket, Any]]) -> None:
        tickets = [ticket for ticket, _ in batch]
        try:
            responses = self._respond(tickets, [request for _, request in batch])
        except BaseException as error:
            # Also SystemExit: this thread is the only one that can tell. A policy that raised is not called again,
            # unless that was for an evaluation's requests: what waits for it gets the same answer.
            guests = tickets[0].guest
            self.broken = self.broken or not guests
            for ticket in tickets:
                self._post(Response(ticket, error=error, suspects=tuple(tickets)))
            if not guests:
                self.fail(error, tuple(tickets))
            return
        for response in responses:
            response.policy_version = response.policy_version_end = self.version
            if self.track_token_versions:
                response.token_versions = torch.full((response.response_tokens,), self.version)
            self._post(response)

    def _respond(self, tickets: list[Ticket], requests: list[Any]) -> list[Response]:
        """One call of the policy; raises what it raises."""
        responses = []
        for ticket, output in zip(tickets, self._call(requests), strict=True):
            prompt_tokens, response_tokens = self._token_counts(output)
            responses.append(Response(ticket, output, prompt_tokens=prompt_tokens, response_tokens=response_tokens))
        return responses

    def _call(self, rows: list[TensorDictBase]) -> list[TensorDictBase]:
        stack = LazyStackedTensorDict(*[row.copy() for row in rows], stack_dim=0)
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            output = self.policy(stack)
        if not isinstance(output, TensorDictBase):
            raise TypeError(f"the policy returned {type(output).__name__}; it must return a TensorDict")
        if output.batch_size != stack.batch_size:
            raise ValueError(
                f"the policy returned batch_size={tuple(output.batch_size)} for rows of batch_size="
                f"{tuple(stack.batch_size)}; the two must be equal"
            )
        return list(output.unbind(0))

    def _token_counts(self, output: TensorDictBase) -> tuple[int, int]:
        """Tokens of the prompt and of the response, where a language-model wrapper wrote them."""
        if not isinstance(self.policy, LLMWrapperBase):
            return 0, 0
        counts = []
        for part in ("prompt", "response"):
            tokens = output.get((self.policy.tokens_key, part), None)
            if tokens is None:
                counts.append(0)
            elif getattr(self.policy, "pad_output", False):
                counts.append(int((tokens != self.policy.padding_value).sum()))
            else:
                counts.append(tokens.numel())
        return counts[0], counts[1]


def _together(first: Ticket, other: Ticket) -> bool:
    """Whether a request may share the call of ``first``."""
    return other is first or (other.guest == first.guest and not first.alone and not other.alone)
