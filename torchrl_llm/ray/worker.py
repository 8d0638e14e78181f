"""A worker: an ordinary :class:`~torchrl_llm.collector.LLMCollector` in a Ray actor, started into an outbox.

Threads: the collector runs in its own (see :mod:`torchrl_llm.lifecycle`); the driver's calls come on threads of Ray's,
in groups (:data:`THREADS`), so that none stands behind one that takes its time: :meth:`Worker.take` waits for batches,
:meth:`Worker.call` does what the user wants, standing orders come one after the other, :meth:`Worker.report` is the
sign of life. Everything else is short, and comes in the order in which it was asked for, on a thread of its own. The
collector is built in the actor's constructor, on the process's main thread, which some engines need; what goes wrong
there is kept for :meth:`Worker.ready`.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
from tensordict import TensorDictBase, set_list_to_stack

from torchrl_llm.errors import CollectorError
from torchrl_llm.ray.dealing import Share
from torchrl_llm.ray.errors import WireError, relocated, to_wire
from torchrl_llm.ray.messages import LIFE, Header, Parcel, TurnHead
from torchrl_llm.ray.outbox import Outbox
from torchrl_llm.ray.prompts import Connection

# The groups of a worker's methods, and how many of each it answers at the same time.
THREADS = {"take": 1, "control": 8, "orders": 1, "report": 1}
# How long the last message waits for the collector's thread, which has put its end already.
JOIN_SECONDS = 60.0


@dataclass(frozen=True)
class Order:
    """What a worker is to do: everything that its process is given.

    Attributes:
        collector_class: ``LLMCollector``, or a subclass of it.
        env: the worker's environments.
        policy: the worker's policies.
        arguments: the collector's keyword arguments.
        worker: the worker's number.
        life: number of the process, over all workers.
        prefetch: batches that it prepares ahead.
        handle: called with the worker's number and the collector's arguments (``env`` and ``policy`` among them) before
            the collector is built; returns the arguments to use. ``None`` leaves them.
        list_to_stack: the driver's ``set_list_to_stack``.
        prompts: the way to the shared prompt source, if there is one.
    """

    collector_class: type
    env: Share
    policy: Share
    arguments: Mapping[str, Any]
    worker: int
    life: int
    prefetch: int
    handle: Callable[[int, dict[str, Any]], dict[str, Any]] | None
    list_to_stack: bool
    prompts: Connection | None = None


class Worker:
    """The actor's class.

    Args:
        order: what to do: a list with a reference to an :class:`Order`.
    """

    def __init__(self, order: list[Any]) -> None:
        self._collector: Any = None
        self._failure: WireError | None = None
        self._begun = False
        self._opened_by = 0
        self._first_id = 0
        self._first_versions: dict[int, int] = {}
        self._numbers = 0
        self._lock = threading.Lock()
        self._resume = threading.Event()
        self._pause: threading.Thread | None = None
        self._end: threading.Thread | None = None
        self._end_by = 0.0
        try:
            # Read here, and not as an argument, so that a module which is not to be had here is an error like others.
            self._order: Order = ray.get(order[0])
            # The garbage collector need not go again and again over what the imports have left.
            gc.collect()
            gc.freeze()
            self._outbox = Outbox(self._order.prefetch, self._label)
            self._collector = self._build()
        except Exception as error:
            self._failure = to_wire(self._relocated(error))

    def _build(self) -> Any:
        order = self._order
        set_list_to_stack(order.list_to_stack).set()
        arguments = {**order.arguments, "env": order.env.value, "policy": order.policy.value}
        if order.prompts is not None:
            arguments["env"] = order.prompts.connect(order.life, arguments["env"])
        if order.handle is not None:
            arguments = order.handle(order.worker, arguments)
        return order.collector_class(arguments.pop("env"), arguments.pop("policy"), **arguments)

    def ready(self) -> WireError | None:
        """Returns when the collector is built; what went wrong, if it could not be."""
        return self._failure

    def begin(self, opened_by: int, first_life: int) -> None:
        """Begins to collect; or goes on, when prompts have come back after the worker had found no more.

        Args:
            opened_by: by how many its parcels are read, see :class:`~torchrl_llm.ray.messages.Parcel`.
            first_life: lives that the collection had before it went on from a saved state.
        """
        self._opened_by = opened_by
        self._first_id = (first_life + self._order.life) * LIFE
        self._begun = True
        self._collector._serve(self._outbox)

    @ray.method(concurrency_group="take", num_returns=2)
    def take(self) -> tuple[Header, Parcel | None]:
        """Waits for the next batch, or the end. Says by the way that the batch before has been made use of."""
        letter = self._outbox.take()
        if letter is None:
            # A driver that ends the worker hears from `finish` how that went.
            return self._last() if self._end is None else self._header([], end=True), None
        heads, packed = letter
        return self._header(heads), Parcel(packed, self._opened_by)

    @ray.method(concurrency_group="report")
    def report(self) -> Header:
        """The worker's books."""
        return self._header([])

    @ray.method(concurrency_group="control")
    def call(self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the collector, or a function of it; returns the result, or a :class:`WireError`."""
        # Ray replaces references by their objects only where they are arguments themselves.
        args = tuple(ray.get(arg) if isinstance(arg, ray.ObjectRef) else arg for arg in args)
        try:
            if isinstance(method, str):
                return getattr(self._collector, method)(*args, **kwargs)
            return method(self._collector, *args, **kwargs)
        except Exception as error:
            return to_wire(self._relocated(error))

    def pause(self) -> None:
        """Brings the collector to rest; returns when it is."""
        resting = threading.Event()
        self._resume = threading.Event()

        def hold(resume: threading.Event) -> None:
            # A pause belongs to the thread that holds it, and calls come on any.
            with self._collector.pause():
                resting.set()
                resume.wait()

        self._pause = threading.Thread(target=hold, args=(self._resume,), name="torchrl_llm-pause", daemon=True)
        self._pause.start()
        resting.wait()

    def resume(self) -> None:
        """Ends a pause."""
        self._resume.set()
        if self._pause is not None:
            self._pause.join()

    def hand_over(self, timeout: float) -> tuple[list[tuple[Header, Parcel]], Header]:
        """Begins to end the collector; returns what was finished and not taken, and the books.

        It comes as soon as the collector has put all that into the outbox, and does not wait for threads that are busy;
        if the collector's own is, what was there before comes after ``timeout`` seconds.
        """
        self._resume.set()
        letters = []
        if self._collector is not None:
            self._outbox.let_all_in()
            self._end_by = time.monotonic() + timeout
            self._end = threading.Thread(target=self._shut_down, args=(timeout,), name="torchrl_llm-end", daemon=True)
            self._end.start()
            letters = self._outbox.rest(timeout)
        return [(self._header(heads), Parcel(packed, self._opened_by)) for heads, packed in letters], self._header([])

    def _shut_down(self, timeout: float) -> None:
        try:
            # What could not be written is in the log, and in the books.
            with contextlib.suppress(CollectorError):
                self._collector.shutdown(timeout)
        finally:
            self._outbox.put(None)

    def finish(self) -> Header:
        """Returns the books when the collector has ended, or its time for that is over."""
        if self._end is not None:
            self._end.join(max(0.0, self._end_by - time.monotonic()))
        return self._header([], end=True)

    def _last(self) -> Header:
        """The message that says that there will be no more, and why."""
        failure = self._failure
        if failure is None and self._begun:
            try:
                self._collector.join(JOIN_SECONDS)
            except CollectorError as error:
                failure = to_wire(self._relocated(error))
        return self._header([], end=True, error=failure)

    def _header(self, heads: list[TurnHead], end: bool = False, error: WireError | None = None) -> Header:
        with self._lock:
            number = self._numbers
            self._numbers += 1
            report = {} if self._collector is None else self._collector.stats()
        return Header(number, heads, report, end, error)

    # The cluster's terms

    def _label(self, turn: TensorDictBase) -> TurnHead:
        ids: Any = turn.get("collector")
        head = TurnHead(
            traj_id=self._first_id + int(ids.get("traj_ids")),
            step=int(ids.get("step")),
            env_id=self._order.env.index(int(ids.get("env_id"))),
            policy_id=self._order.policy.index(int(ids.get("policy_id"))),
            group_id=int(ids.get("group_id")),
            group_index=int(ids.get("group_index")),
            policy_version=int(ids.get("policy_version")),
            began_with=self._began_with(ids),
            done=bool(turn.get(("next", "done")).any()),
        )
        if head.done:
            self._first_versions.pop(int(ids.get("traj_ids")), None)
        ids.set("traj_ids", torch.tensor(head.traj_id))
        ids.set("env_id", torch.tensor(head.env_id))
        ids.set("policy_id", torch.tensor(head.policy_id))
        ids.set("worker_id", torch.tensor(self._order.worker))
        return head

    def _began_with(self, ids: Any) -> int:
        """The version that the turn's trajectory began with; turns of a trajectory come in their order."""
        trajectory, step, version = (int(ids.get(key)) for key in ("traj_ids", "step", "policy_version"))
        if step == 0:
            self._first_versions[trajectory] = version
        return self._first_versions.get(trajectory, version)

    def _relocated(self, error: Exception) -> Exception:
        if not isinstance(error, CollectorError):
            return error
        slot = None if error.slot is None else self._order.env.index(error.slot)
        trajectory = None if error.trajectory is None else self._first_id + error.trajectory
        return relocated(error, slot, trajectory)
