"""Calls of a method of the workers' collectors, while they collect: weights and anything else goes this way.

Any thread may call; calls to a worker run beside its batches and beside each other, on threads of their own. Only
standing orders wait for each other, so that the last one given is the last one obeyed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import ray
from ray.exceptions import RayError

from torchrl_llm.errors import WorkerError
from torchrl_llm.ray.ending import first_line
from torchrl_llm.ray.errors import WireError, from_wire
from torchrl_llm.ray.hooks import Call
from torchrl_llm.ray.member import Member

# The name of a method of the collector, or a function that is called with the collector.
Method: TypeAlias = "str | Callable[..., Any]"
# Waits for answers, given the references and the seconds; see `Patience.wait`.
Wait = Callable[[Mapping[Member, Any], "float | None"], None]


def ask(member: Member, method: Method, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Sends a call; returns a reference to its answer. References among ``args`` are read by the worker."""
    return member.actor.call.remote(method, args, kwargs)


def order(member: Member, method: Method, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Sends a call that waits for those that were ordered before; else as :func:`ask`."""
    return member.actor.call.options(concurrency_group="orders").remote(method, args, kwargs)


class Answers(NamedTuple):
    """What came of a call of several workers, by the workers' numbers.

    Attributes:
        results: what each returned.
        failures: what went wrong with each of the others.
    """

    results: dict[int, Any]
    failures: dict[int, BaseException]


def collect(asked: Mapping[Member, Any], timeout: float | None, wait: Wait) -> Answers:
    """Waits for the answers.

    Args:
        asked: references to the answers.
        timeout: seconds to wait for all of them together; ``None`` for as long as it takes.
        wait: does that.
    """
    wait(asked, timeout)
    answers = Answers({}, {})
    for member, ref in asked.items():
        try:
            answer = ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            answers.failures[member.worker] = TimeoutError(f"no answer within {timeout:g} s")
        except RayError as error:
            answers.failures[member.worker] = error
        else:
            if isinstance(answer, WireError):
                answers.failures[member.worker] = from_wire(answer)
            else:
                answers.results[member.worker] = answer
    return answers


def gather(method: Method, asked: Mapping[Member, Any], timeout: float | None, wait: Wait) -> dict[int, Any]:
    """The answers by worker.

    Raises:
        WorkerError: naming the workers that failed or did not answer in time, with the first failure as its cause; its
            ``results`` holds what the others gave, its ``failures`` the error of each that failed.
    """
    answers = collect(asked, timeout, wait)
    if answers.failures:
        raise failure(method, answers)
    return answers.results


def failure(method: Method, answers: Answers) -> WorkerError:
    """The error that names the workers that failed, see :func:`gather`."""
    results, failures = answers
    named = "; ".join(f"worker {w}: {type(e).__name__}: {first_line(e)}" for w, e in sorted(failures.items()))
    name = method if isinstance(method, str) else method.__name__
    error = WorkerError(f"{name} failed on {len(failures)} of {len(results) + len(failures)} workers: {named}")
    error.results, error.failures = results, failures  # type: ignore[attr-defined]
    error.__cause__ = failures[min(failures)]
    return error


def refusal(error: WorkerError) -> Exception | None:
    """Why nobody did it, if all workers refused what they were given; it is of the type that they raised."""
    results, failures = error.results, error.failures  # type: ignore[attr-defined]
    if results or not all(isinstance(cause, (TypeError, ValueError)) for cause in failures.values()):
        return None
    first = failures[min(failures)]
    return type(first)(str(first))


def is_loss(error: BaseException) -> bool:
    """Whether an error says that the worker's process is gone, and not that it failed to do something."""
    return isinstance(error, RayError) and not isinstance(error, ray.exceptions.RayTaskError)


def caller(member: Member, wait: Wait) -> Call:
    """A function that calls methods of one worker's collector: ``call(method, *args, timeout=None, **kwargs)``."""

    def call(method: Method, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        answer = ask(member, method, args, kwargs)
        return gather(method, {member: answer}, timeout, wait)[member.worker]

    return call
