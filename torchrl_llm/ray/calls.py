"""Calls of a method of the workers' collectors, while they collect: weights and anything else goes this way.

Any thread may call; calls to a worker run beside its batches, on threads of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import ray
from ray.exceptions import RayError

from torchrl_llm.errors import WorkerError
from torchrl_llm.ray.errors import WireError, from_wire
from torchrl_llm.ray.hooks import Call
from torchrl_llm.ray.member import Member

# The name of a method of the collector, or a function that is called with the collector.
Method: TypeAlias = "str | Callable[..., Any]"


def ask(member: Member, method: Method, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Sends a call; returns a reference to its answer. References among ``args`` are read by the worker."""
    return member.actor.call.remote(method, args, kwargs)


def gather(method: Method, answers: Mapping[Any, Any], timeout: float | None) -> dict[int, Any]:
    """The answers by worker.

    Args:
        method: what was called, for the error.
        answers: references by member.
        timeout: seconds to wait for all of them together.

    Raises:
        WorkerError: naming the workers that failed or did not answer in time, with the first failure as its cause; its
            ``results`` holds what the others gave, its ``failures`` the error of each that failed.
    """
    refs = list(answers.values())
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=timeout)
    results: dict[int, Any] = {}
    failures: dict[int, BaseException] = {}
    for member, ref in answers.items():
        try:
            answer = ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            failures[member.worker] = TimeoutError(f"no answer within {timeout:g} s")
        except RayError as error:
            failures[member.worker] = error
        else:
            if isinstance(answer, WireError):
                failures[member.worker] = from_wire(answer)
            else:
                results[member.worker] = answer
    if failures:
        named = "; ".join(f"worker {w}: {type(e).__name__}: {_first_line(e)}" for w, e in sorted(failures.items()))
        name = method if isinstance(method, str) else method.__name__
        failure = WorkerError(f"{name} failed on {len(failures)} of {len(answers)} workers: {named}")
        failure.results, failure.failures = results, failures  # type: ignore[attr-defined]
        raise failure from failures[min(failures)]
    return results


def caller(member: Member) -> Call:
    """A function that calls methods of one worker's collector: ``call(method, *args, timeout=None, **kwargs)``."""

    def call(method: Method, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        answer = ask(member, method, args, kwargs)
        return gather(method, {member: answer}, timeout)[member.worker]

    return call


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
