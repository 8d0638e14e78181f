"""The ways to read a collector, to run it in the background, to pause and to end it.

A thin front of a :class:`~torchrl_llm.lifecycle.Collection`; any thread may call it, as far as that says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from typing_extensions import Self

from torchrl_llm.control import Control
from torchrl_llm.lifecycle import END, Collection
from torchrl_llm.sinks import Sink, make_sink


class Reading(BaseCollector):
    """What a collector's reader calls. A subclass's constructor sets the attributes that are declared here."""

    total_steps: int
    steps_per_batch: int | None
    _collection: Collection
    _control: Control
    _sink: Sink | None

    # Reading

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """The collector itself: a loop that was left goes on where it was."""
        return self

    def __next__(self) -> TensorDictBase | None:
        """The next batch; ``None`` if it was written to the buffer or queue that the collector has.

        Raises:
            StopIteration: at the end.
            CollectorError: what stopped the collection, at every call.
        """
        batch = self._collection.read()
        if batch is END:
            raise StopIteration
        return batch

    def next(self) -> TensorDictBase | None:
        """Like ``next(collector)``, but ``None`` at the end, as in TorchRL."""
        return next(self, None)

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """The collector's iterator, as TorchRL's collectors have it."""
        yield from self

    def __len__(self) -> int:
        """Batches in the collector's life, with ``steps_per_batch`` and ``total_steps``."""
        if self.total_steps < 0 or self.steps_per_batch is None:
            raise TypeError("the collector has a length only with steps_per_batch and total_steps")
        return -(-self.total_steps // self.steps_per_batch)

    def start(self, target: Any = None) -> None:
        """Collects in the background, into a replay buffer or a queue.

        Args:
            target: a replay buffer (has ``extend``) or a queue (has ``put``); defaults to the constructor's.

        Raises:
            TypeError: if there is no target, or it cannot be written to.
            CollectorError: if the collection runs already, failed, or has ended.
        """
        sink = self._sink
        if target is not None:
            is_buffer = callable(getattr(target, "extend", None))
            sink = make_sink(target if is_buffer else None, None if is_buffer else target)
        if sink is None:
            raise TypeError("start() needs a target: pass a replay buffer or a queue, here or to the constructor")
        self._sink = sink
        self._collection.start(sink)

    def is_running(self) -> bool:
        """Whether the collection runs in the background."""
        return self._collection.is_running()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for what ``start()`` began.

        Args:
            timeout: seconds to wait; ``None`` for as long as it takes.

        Returns:
            ``True`` if it has ended, ``False`` if ``timeout`` was not enough.

        Raises:
            CollectorError: what stopped the run.
        """
        return self._collection.join(timeout)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Brings the collection to rest inside the ``with`` block.

        On entry the loop has come to rest: it calls no environment, sends no request and delivers no batch. What is
        in flight in an engine or on an environment thread goes on, and is taken up afterwards. Safe from any thread.
        """
        with self._control.pause():
            yield

    # Ending

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Ends the collection, from any thread. Idempotent; never hangs on a full queue or a long generation.

        What is in flight is aborted and recorded. Finished turns are still written to the buffer or queue that the
        collection writes to. What was built from constructors is closed, what was passed as an instance is not.

        Args:
            timeout: seconds to wait for a call of an environment or a batched policy that is under way, which nothing
                can interrupt; a ``RuntimeWarning`` names what was still busy. Defaults to 30, and to 0 after an earlier
                call has waited in vain.
            close_env: ignored; for TorchRL's sake.
            raise_on_error: ignored; an error is raised by the call that reads, and by :meth:`join`.

        Raises:
            CollectorError: if finished turns could not be written.
        """
        self._collection.shutdown(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
