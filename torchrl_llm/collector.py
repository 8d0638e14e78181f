"""``LLMCollector``: its arguments, its life, and the four ways to read it.

The collector is a thin front: arguments become slots, a policy pool and a batcher; a
:class:`~torchrl_llm.lifecycle.Collection` drives them. The thread of ``start()`` holds the collection and never the
collector, so that dropping the last reference to the collector ends the thread.
"""

from __future__ import annotations

import abc
import contextlib
import queue as queue_module
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase

from torchrl_llm import arguments
from torchrl_llm.assembly import build_policies, build_slots
from torchrl_llm.budget import Budget
from torchrl_llm.collector_weights import WeightMethods
from torchrl_llm.control import Control
from torchrl_llm.errors import CollectorError
from torchrl_llm.lag import make_lag
from torchrl_llm.launches import Launches
from torchrl_llm.ledger import Ledger
from torchrl_llm.lifecycle import END, Collection
from torchrl_llm.rollout import Rollout
from torchrl_llm.routing import Route, make_route
from torchrl_llm.sinks import make_sink
from torchrl_llm.weight_transports import make_transport
from torchrl_llm.weights import PolicyWeights, announce_version, check_mode

EnvLike: TypeAlias = "EnvBase | Callable[[], EnvBase]"

# How long the interpreter, at its exit, waits for a collector that still runs.
EXIT_SECONDS = 5.0


class _DCMeta(abc.ABCMeta):
    """Turns ``LLMCollector(..., backend="ray")`` into a collector on Ray."""

    def __call__(cls, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        if backend is None:
            return super().__call__(*args, **kwargs)
        if backend == "ray":
            raise NotImplementedError("backend='ray' comes with a later release; leave it out to collect locally")
        raise ValueError(f"backend={backend!r} is not allowed: pass None or 'ray'")


class LLMCollector(WeightMethods, BaseCollector, metaclass=_DCMeta):
    """Collects turns of language-model policies in environments.

    Every environment is a slot that sends its next request the moment it is ready, and every policy answers request by
    request (``vLLMWrapper`` over ``vllm.LLM``) or on whatever waits (any other TensorDict policy): no batch waits for
    its longest response.

    Args:
        env: a constructor ``() -> EnvBase``, an environment, or a list of them. Batch sizes ``()``, ``(1,)`` and
            ``(B,)`` are allowed, also mixed; ``(B,)`` is one slot whose B rows step together.
        policy: a constructor ``() -> policy``, a policy, or a list of them. A policy is any callable from a TensorDict
            to a TensorDict: ``vLLMWrapper``, ``TransformersWrapper``, a ``TensorDictModule``, a function of one
            argument. :class:`RunnerOptions` around one says how to run it, where the defaults do not suit.

    Keyword Args:
        num_envs: how many slots to build from a single constructor. Defaults to 1.
        steps_per_batch: a batch is exactly so many turns, in the order in which they ended.
        trajectories_per_batch: a batch is so many complete trajectories, each contiguous.
        total_steps: turns to deliver in the collector's life; -1 (default) for no end. Exact with ``steps_per_batch``;
            with ``trajectories_per_batch`` the last trajectory is not cut, and may pass it.
        replay_buffer: where batches are written by ``start()``, and by a plain loop, which then yields ``None``.
        queue: like ``replay_buffer``, for anything with ``put(item, timeout=)``. A full queue blocks the collector.
            At the end, however it comes, one ``None`` is put.
        postproc: called with each batch; what it returns is delivered. ``None`` delivers nothing (counted in
            :meth:`stats` under ``"postproc_kept"``).
        env_threads: worker threads for environments that block; 0 (default) steps them in the loop's own thread.
        route: which policy gets a new trajectory: ``"least_loaded"`` (default), ``"sticky"`` (an environment always has
            the same policy), ``"paired"`` (environment i has policy i), or a callable ``(env_id, loads) -> policy_id``.
            A trajectory stays with its policy.
        on_error: ``"raise"`` (default) stops and gives the error to the reader; ``"restart"`` drops the trajectory,
            rebuilds the environment or the policy from its constructor, and gives up after 3 failures in a row.
        groups_per_batch: not yet supported.
        max_policy_lag: ``k``: no trajectory (with ``steps_per_batch``: no turn) is delivered that began more than k
            versions before the version of the weights at delivery. What would come too late is not begun; what has
            become too old is dropped and replaced (``"stale"`` in :meth:`stats`). 0 with ``next()`` is the strictly
            on-policy case: batches of one version. ``None`` (default) for no limit.
        update_mode: what becomes of the responses that are being made at a weight update: ``"continue"`` (default),
            ``"wait"`` or ``"restart"``; see :meth:`update_policy_weights_`.
        weight_updater: how weights reach the policies, if not by the collector itself: TorchRL's ``WeightUpdaterBase``
            (or a constructor of one), or :class:`VLLMTransfer`.
        weight_sync_schemes: the same, as TorchRL's dict of model id -> ``WeightSyncScheme``.
        track_token_versions: whether turns have ``("collector", "token_versions")``, int64 of shape ``(T,)``: the
            version of the weights that made each token of the response.
        seed: not yet supported.
        backend: ``None``; ``"ray"`` is not yet supported.

    Yields:
        One-dimensional lazy stacks of turns. Besides the environment's and the policy's own keys a turn has, under
        ``"collector"``, the int64 scalars ``traj_ids``, ``step``, ``env_id``, ``policy_id``, ``group_id``,
        ``policy_version`` and ``policy_version_end``.

    Raises:
        TypeError: for an argument that does not exist here, or is of the wrong type.
        ValueError: for a value that is not allowed, and for an environment that offers nothing that a policy reads.
        EnvError: if an environment's constructor fails.
        PolicyError: if a policy's constructor fails.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.envs.llm import ChatEnv
        >>> def shout(td):  # any policy; here one that answers by the last message in capitals
        ...     history = td["history"].prompt
        ...     for row, messages in zip(td.unbind(0), history.unbind(0)):
        ...         answer = type(messages)(role="assistant", content=messages[-1].content.upper())
        ...         row["history"].full = messages.append(answer, inplace=False, dim=-1)
        ...     return td
        >>> def make_env():
        ...     return ChatEnv.from_dataloader([{"query": ["hello"]}], batch_size=(1,))
        >>> with LLMCollector(make_env, shout, steps_per_batch=2, total_steps=2) as collector:
        ...     batch = next(collector)
        >>> [messages[-1].content for messages in batch["history"].full.unbind(0)]
        ['HELLO', 'HELLO']
    """

    def __init__(
        self,
        env: EnvLike | list[EnvLike],
        policy: Any,
        *,
        num_envs: int | None = None,
        steps_per_batch: int | None = None,
        trajectories_per_batch: int | None = None,
        groups_per_batch: int | None = None,
        total_steps: int = -1,
        replay_buffer: Any = None,
        queue: Any = None,
        postproc: Callable[[TensorDictBase], TensorDictBase | None] | None = None,
        env_threads: int = 0,
        route: str | Route = "least_loaded",
        max_policy_lag: int | None = None,
        update_mode: str = "continue",
        track_token_versions: bool = False,
        weight_updater: Any = None,
        weight_sync_schemes: Any = None,
        on_error: str = "raise",
        seed: int | None = None,
        **unknown: Any,
    ) -> None:
        arguments.reject_unknown(unknown)
        check_mode(update_mode)
        later = {"groups_per_batch": groups_per_batch, "seed": seed}
        for name, value in later.items():
            if value is not None:
                raise NotImplementedError(f"{name}={value!r} comes with a later release; leave it out")
        batcher = arguments.make_batcher(steps_per_batch, trajectories_per_batch)
        arguments.check_int("total_steps", total_steps, "-1 for no end, or an int of at least 1", minimum=1, or_=-1)
        arguments.check_int("env_threads", env_threads, "an int of at least 0", minimum=0)
        if max_policy_lag is not None:
            arguments.check_int("max_policy_lag", max_policy_lag, "an int of at least 0, or None", minimum=0)
        if postproc is not None and not callable(postproc):
            raise TypeError(f"postproc={postproc!r} is not allowed: pass a callable batch -> batch, or None")
        envs = arguments.env_sources(env, num_envs)
        policy, options = arguments.policy_options(policy)
        policies = arguments.policy_sources(policy)
        restart = arguments.check_restartable(on_error, envs)
        router = make_route(route, len(envs), len(policies))
        sink = make_sink(replay_buffer, queue)
        super().__init__()

        self.total_steps = total_steps
        self.steps_per_batch = steps_per_batch
        self.trajectories_per_batch = trajectories_per_batch
        self.replay_buffer = replay_buffer
        self.queue = queue
        self.postproc = postproc
        self._ledger = Ledger()
        events: queue_module.SimpleQueue[Any] = queue_module.SimpleQueue()
        control = Control(wake=lambda: events.put(None))
        transport = make_transport(weight_updater, weight_sync_schemes, self)
        slots = build_slots(envs)
        pool = build_policies(policies, options, slots, route)
        pool.track_token_versions(track_token_versions)
        weights = PolicyWeights(
            pool, update_mode, keep=restart, on_update=lambda version: announce_version(version, slots, events.put)
        )
        self._weights = weights
        weights.transport = transport
        lag = make_lag(max_policy_lag, batcher, lambda: weights.version)
        rollout = Rollout(
            slots=slots,
            pool=pool,
            launches=Launches(pool, router, Budget(total_steps, batcher.whole_trajectories), self._ledger, lag),
            batcher=batcher,
            ledger=self._ledger,
            restart=restart,
            env_threads=env_threads,
            events=events,
            control=control,
            lag=lag,
        )
        self._control = control
        changing = None if lag is None else weights.changing
        self._collection = Collection(rollout, control, self._ledger, _BatchFinish(self), sink, changing)
        self._sink = sink
        self._finalizer = weakref.finalize(self, self._collection.shutdown, EXIT_SECONDS)

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
        self._weights.asleep.check_ready()
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
        self._weights.asleep.check_ready()
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

    def __enter__(self) -> LLMCollector:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    # Knowing

    def stats(self) -> dict[str, Any]:
        """The books of the collection at this moment; cheap, and safe from any thread.

        Always ``launched == delivered + recorded + in_flight`` (trajectories), and
        ``turns_finished == turns + turns_dropped + turns_pending``.

        Returns:
            Counters: ``turns``, ``trajectories`` (delivered whole), ``batches``, ``prompt_tokens``,
            ``response_tokens``, ``errors`` (and ``env_errors``, ``policy_errors``), ``env_restarts``,
            ``policy_restarts``, ``requests_in_flight``, those of the two equations, and ``recorded_by_reason``.
        """
        return self._ledger.snapshot() | self._weights.stats()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Not yet supported."""
        raise NotImplementedError("set_seed comes with a later release: seed the environments in their constructors")

    def state_dict(self) -> Any:
        """Not yet supported."""
        raise NotImplementedError("state_dict comes with a later release")

    def load_state_dict(self, state_dict: Any) -> None:
        """Not yet supported."""
        raise NotImplementedError("load_state_dict comes with a later release")

    def __reduce__(self) -> Any:
        raise TypeError("a collector has threads and engines and cannot be pickled: pickle its constructors instead")

    def __repr__(self) -> str:
        stats = self.stats()
        unit = "steps_per_batch" if self.steps_per_batch is not None else "trajectories_per_batch"
        return (
            f"{type(self).__name__}({unit}={getattr(self, unit)}, total_steps={self.total_steps}, "
            f"turns={stats['turns']}, in_flight={stats['in_flight']})"
        )


class _BatchFinish:
    """Runs the collector's ``postproc`` and hooks, without keeping the collector alive."""

    def __init__(self, collector: LLMCollector) -> None:
        self._collector = weakref.ref(collector)
        self._postproc = collector.postproc

    def __call__(self, batch: TensorDictBase) -> TensorDictBase | None:
        finished = batch if self._postproc is None else self._postproc(batch)
        if finished is not None and not isinstance(finished, TensorDictBase):
            raise CollectorError(f"postproc returned {type(finished).__name__}; a TensorDict or None is needed")
        collector = self._collector()
        if finished is not None and collector is not None and collector.post_collect_hook is not None:
            collector.post_collect_hook(finished)
        return finished
