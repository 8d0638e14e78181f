"""Errors on their way from a worker to the driver: type, message and chain of causes survive. Pure functions.

Python pickles an exception without its cause and its traceback; here the causes travel beside it, and the traceback as
text, as the last link of the chain.
"""

from __future__ import annotations

import itertools
import traceback
from dataclasses import dataclass

import cloudpickle

from torchrl_llm.errors import CollectorError

# A chain that is longer than this goes in circles.
LONGEST_CHAIN = 20


class RemoteTraceback(Exception):
    """The traceback of an error that was raised in a worker, as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclass(frozen=True)
class WireError:
    """An exception and its causes, picklable whatever they hold.

    Attributes:
        chain: the exception, its cause, the cause of that, ...: each pickled, and as text.
        traceback: all of it as text.
    """

    chain: tuple[tuple[bytes, str], ...]
    traceback: str


def to_wire(error: BaseException) -> WireError:
    """Makes an exception fit to travel."""
    chain: list[tuple[bytes, str]] = []
    link: BaseException | None = error
    while link is not None and len(chain) < LONGEST_CHAIN:
        text = f"{type(link).__name__}: {link}"
        try:
            data = cloudpickle.dumps(link)
        except Exception:
            # It holds what cannot travel, such as a lock; its text can.
            data = cloudpickle.dumps(RuntimeError(text))
        chain.append((data, text))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return WireError(tuple(chain), "".join(traceback.format_exception(error)))


def from_wire(wire: WireError) -> BaseException:
    """The exception, with its chain of causes. A link that cannot be read here becomes a ``RuntimeError`` of its text.

    Examples:
        >>> try:
        ...     raise CollectorError("a") from ValueError("b")
        ... except CollectorError as error:
        ...     again = from_wire(to_wire(error))
        >>> again, again.__cause__
        (CollectorError('a'), ValueError('b'))
    """
    links: list[BaseException] = [_read(data, text) for data, text in wire.chain]
    links.append(RemoteTraceback(wire.traceback))
    for error, cause in itertools.pairwise(links):
        error.__cause__ = cause
    return links[0]


def _read(data: bytes, text: str) -> BaseException:
    try:
        error = cloudpickle.loads(data)
    except Exception:
        # Its constructor takes other arguments than it was pickled with, or its module is not to be had here.
        return RuntimeError(text)
    return error if isinstance(error, BaseException) else RuntimeError(text)


def relocated(error: CollectorError, slot: int | None, trajectory: int | None) -> CollectorError:
    """The same error, with its place in the terms of the whole cluster."""
    moved = type(error)(error.message, slot=slot, trajectory=trajectory, turn=error.turn)
    moved.__cause__ = error.__cause__
    return moved
