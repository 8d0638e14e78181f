"""``LLMCollector``: its arguments, its life, and the four ways to read it.

The collector is a thin front: arguments become slots, a policy pool and a batcher; a
:class:`~torchrl_llm.lifecycle.Collection` drives them. The thread of ``start()`` holds the collection and never the
collector, so that dropping the last reference to the collector ends the thread.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_llm import arguments
from torchrl_llm.assembly import assemble
from torchrl_llm.collector_weights import WeightMethods
from torchrl_llm.deadlines import make_limits
from torchrl_llm.errors import CollectorError
from torchrl_llm.evaluation import evaluate
from torchrl_llm.finishing import BatchFinish
from torchrl_llm.lifecycle import Collection
from torchrl_llm.plan import UNITS, check_int, make_plan
from torchrl_llm.routing import Route, make_route
from torchrl_llm.seeds import check_seed, next_seed
from torchrl_llm.sinks import make_sink
from torchrl_llm.weight_transports import make_transport
from torchrl_llm.weights import check_mode

EnvLike: TypeAlias = "EnvBase | Callable[[], EnvBase]"

# How long the interpreter, at its exit, waits for a collector that still runs.
EXIT_SECONDS = 5.0


class _DCMeta(abc.ABCMeta):
    """Turns ``LLMCollector(..., backend="ray")`` into a collector on Ray."""

    def __call__(cls, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        if backend is None:
            return super().__call__(*args, **kwargs)
        if backend == "ray":
            return ray_collector(cls, *args, **kwargs)
        raise ValueError(f"backend={backend!r} is not allowed: pass None or 'ray'")


def ray_collector(cls: type, *args: Any, **kwargs: Any) -> Any:
    """A :class:`RayCollector` whose workers are collectors of ``cls``.

    Raises:
        ImportError: if Ray is not installed.
    """
    from torchrl_llm.ray_collector import RayCollector

    if issubclass(cls, RayCollector):
        return cls(*args, **kwargs)
    return RayCollector(*args, collector_class=cls, **kwargs)


class LLMCollector(WeightMethods, metaclass=_DCMeta):
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
        groups_per_batch: a batch is so many complete groups, each contiguous: all trajectories of one prompt of a
            :class:`PromptSource`, to which every environment must be bound (``source.env(make_env)``).
        order: ``"launch"`` (default for whole trajectories and groups) delivers in the order of launches,
            ``"completion"`` as they end.
        window: with ``order="launch"``: how many ended trajectories may wait for an older one before no new ones are
            begun. Defaults to the number of slots, counted in rows.
        group_filter: a callable ``group -> bool`` that says which groups are delivered; it gets a lazy stack of turns.
        oversample: groups that may be under way beyond those of a batch; the first complete ones are delivered. By
            default there is no limit but the slots and the window.
        keep_surplus: whether groups that are under way when a batch is full go into the next one; else they are
            ended, and their prompts handed out again.
        total_steps: turns to deliver in the collector's life; -1 (default) for no end. Exact with ``steps_per_batch``;
            the last trajectory or group is not cut, and may pass it.
        replay_buffer: where batches are written by ``start()``, and by a plain loop, which then yields ``None``.
        queue: like ``replay_buffer``, for anything with ``put(item, timeout=)``. A full queue blocks the collector.
            At the end, however it comes, one ``None`` is put.
        postproc: called with each batch; what it returns is delivered. ``None`` delivers nothing (counted in
            :meth:`stats` under ``"postproc_kept"``). With ``max_policy_lag`` it gets a copy, and gets turns again whose
            batch was too old in part when it was to be delivered.
        env_threads: worker threads for environments that block; 0 (default) steps them in the loop's own thread.
        max_turn_seconds: how long a turn may take, from the request to the end of the environment's step. Calls of
            environments can be given up only with ``env_threads``.
        max_trajectory_seconds: how long a trajectory may take, from its first request on.
        on_timeout: ``"deliver"`` (default) ends what takes too long as truncated, ``"drop"`` records it and tries its
            prompt again.
        route: which policy gets a new trajectory: ``"least_loaded"`` (default), ``"sticky"`` (an environment always has
            the same policy), ``"paired"`` (environment i has policy i), or a callable ``(env_id, loads) -> policy_id``.
            A trajectory stays with its policy.
        on_error: ``"raise"`` (default) stops and gives the error to the reader; ``"restart"`` drops the trajectory,
            rebuilds the environment or the policy from its constructor, and gives up after 3 failures in a row. A
            prompt of a source is tried again, up to 3 times, and counts once in a row.
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
        seed: see :meth:`set_seed`.
        backend: ``None`` collects in this process; ``"ray"`` gives a :class:`RayCollector`, whose workers are
            collectors of this class, and takes its arguments too.

    Yields:
        One-dimensional lazy stacks of turns. Besides the environment's and the policy's own keys a turn has, under
        ``"collector"``, the int64 scalars ``traj_ids``, ``step``, ``env_id``, ``policy_id``, ``group_id``,
        ``group_index``, ``epoch``, ``policy_version`` and ``policy_version_end``.

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
        order: str | None = None,
        window: int | None = None,
        group_filter: Callable[[TensorDictBase], bool] | None = None,
        oversample: int | None = None,
        keep_surplus: bool = True,
        total_steps: int = -1,
        replay_buffer: Any = None,
        queue: Any = None,
        postproc: Callable[[TensorDictBase], TensorDictBase | None] | None = None,
        env_threads: int = 0,
        max_turn_seconds: float | None = None,
        max_trajectory_seconds: float | None = None,
        on_timeout: str = "deliver",
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
        plan = make_plan(
            steps_per_batch=steps_per_batch,
            trajectories_per_batch=trajectories_per_batch,
            groups_per_batch=groups_per_batch,
            order=order,
            window=window,
            group_filter=group_filter,
            oversample=oversample,
            keep_surplus=keep_surplus,
        )
        check_int("total_steps", total_steps, "-1 for no end, or an int of at least 1", minimum=1, or_=-1)
        check_int("env_threads", env_threads, "an int of at least 0", minimum=0)
        limits = make_limits(max_turn_seconds, max_trajectory_seconds, on_timeout)
        if seed is not None:
            check_seed(seed)
        if max_policy_lag is not None:
            check_int("max_policy_lag", max_policy_lag, "an int of at least 0, or None", minimum=0)
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
        self.groups_per_batch = groups_per_batch
        self.replay_buffer = replay_buffer
        self.queue = queue
        self.postproc = postproc
        parts = assemble(
            envs=envs,
            policies=policies,
            options=options,
            plan=plan,
            total_steps=total_steps,
            env_threads=env_threads,
            limits=limits,
            route=route,
            router=router,
            restart=restart,
            max_policy_lag=max_policy_lag,
            update_mode=update_mode,
            track_token_versions=track_token_versions,
            transport=make_transport(weight_updater, weight_sync_schemes, self),
            seed=seed,
        )
        self._ledger, self._control, self._pool = parts.ledger, parts.control, parts.pool
        self._weights, self._launches = parts.weights, parts.launches
        self._constructors = [constructor for constructor, _ in envs]
        self._evaluation: dict[str, Any] = {
            "pool": parts.pool,
            "route": route,
            "router": router,
            "env_threads": env_threads,
            "limits": limits,
        }
        changing = None if max_policy_lag is None else parts.weights.changing
        finish = BatchFinish(self, max_policy_lag is not None)
        self._collection = Collection(parts.rollout, parts.control, parts.ledger, finish, sink, changing)
        self._sink = sink
        self._finalizer = weakref.finalize(self, self._collection.shutdown, EXIT_SECONDS)

    def _serve(self, target: Any) -> None:
        """Starts into a target that outlives the data: at their end the policies stay, and a further call goes on."""
        self._launches.look_again()
        self._collection.linger()
        super()._serve(target)

    # Knowing

    def stats(self) -> dict[str, Any]:
        """The books of the collection at this moment; cheap, and safe from any thread.

        Always ``launched == delivered + recorded + in_flight`` (trajectories), and
        ``turns_finished == turns + turns_dropped + turns_pending``.

        Returns:
            Counters: ``turns``, ``trajectories`` (delivered whole), ``batches``, ``prompt_tokens``,
            ``response_tokens``, ``errors`` (and ``env_errors``, ``policy_errors``), ``env_restarts``,
            ``policy_restarts``, ``requests_in_flight``, those of the two equations, and ``recorded_by_reason``;
            ``groups``, ``groups_filtered``, ``groups_failed``, ``groups_surplus``; ``timeouts`` (and
            ``generation_timeouts``, ``env_timeouts``); ``longest_wait_seconds``, ``most_overtaken``.
        """
        return self._ledger.snapshot() | self._weights.stats() | self._launches.stats()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the environments, orders of prompts that have not begun, and every request from now on.

        A request's seed is made of (seed, trajectory, turn) and does not depend on what else is going on. It reaches
        ``vLLMWrapper`` and ``TransformersWrapper``; any other policy has to be seeded by its owner.

        Args:
            seed: the seed.
            static_seed: whether to return ``seed`` itself.

        Returns:
            A seed for whatever is to be seeded next.
        """
        check_seed(seed)
        with self.pause():
            self._launches.set_seed(seed)
        return seed if static_seed else next_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """What another process needs to go on, as plain data for ``torch.save`` and ``torch.load(weights_only=True)``.

        Counters, trajectory ids, version, seed, and of each prompt source its order, position and every prompt that was
        handed out and not delivered. Consistent, from any thread: the collection rests meanwhile. A batch counts as
        delivered when the reader, buffer or queue has it. Not in it: weights, and where an environment with data of its
        own (no prompt source) is in them.

        Raises:
            TypeError: if a prompt of an iterable source is not plain data.
        """
        with self.pause():
            return {
                "policy_version": self.policy_version,
                "ledger": self._ledger.state_dict(),
                "launches": self._launches.state_dict(),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a state, in a collector built like the one that was saved, before it is read.

        Prompts that were handed out and not delivered are handed out again first, from their first turn, under their
        group id and index. What was delivered after the state was saved comes again, with the same ids of group, index
        and epoch (and, with a seed and equal weights, the same answers). What was in flight is recorded as
        ``"interrupted"``.

        Raises:
            CollectorError: if the collector has begun.
            ValueError: if the state does not fit.
        """
        with self.pause():
            if self._ledger.snapshot()["launched"]:
                raise CollectorError("the collector has begun: load a state into a new one, before it is read")
            self._launches.load_state_dict(state_dict["launches"])
            self._ledger.load_state_dict(state_dict["ledger"])
            self._weights.count_from(state_dict["policy_version"])

    def evaluate(self, prompts: Any, n: int = 1, key: str | None = None) -> TensorDictBase:
        """Runs a list of prompts on the collector's policies, beside the training stream, whose order and books stay.

        In the calling thread, while the collection runs in the background or between two batches; environments are
        built anew from the collector's constructors and closed afterwards. The policies work on both meanwhile, and one
        that raises at the evaluation's requests is not given up for the training. With a seed, the same weights give
        the same answers each time. ``postproc`` and hooks are not called.

        Args:
            prompts: what :class:`PromptSource` takes as data.
            n: trajectories per prompt.
            key: the field of a mapping that holds the prompt; see :class:`PromptSource`.

        Returns:
            All turns as one batch, trajectories whole, in the order of the prompts: ``("collector", "group_id")`` is
            the number of the prompt, ``"group_index"`` that of its trajectory, from 0; ``"traj_ids"`` are the
            evaluation's own. A prompt that is too long for the policy is left out, and with ``on_timeout="drop"`` one
            of which a trajectory took too long three times; a ``RuntimeWarning`` gives their numbers.

        Raises:
            TypeError: if an environment was passed as an instance.
            CollectorError: what stopped the evaluation, that it gave no turn, or that the collector has ended.
        """
        constructors = [constructor for constructor in self._constructors if constructor is not None]
        if len(constructors) < len(self._constructors):
            raise TypeError("evaluate() builds environments of its own: pass constructors as env=, not instances")
        check_int("n", n, "an int of at least 1", minimum=1)
        self._weights.asleep.check_ready()
        seed, collection = self._launches.seed, self._collection
        return evaluate(
            prompts, n=n, key=key, constructors=constructors, seed=seed, collection=collection, **self._evaluation
        )

    def __reduce__(self) -> Any:
        raise TypeError("a collector has threads and engines and cannot be pickled: pickle its constructors instead")

    def __repr__(self) -> str:
        stats = self.stats()
        unit = next(name for name in UNITS if getattr(self, name) is not None)
        return (
            f"{type(self).__name__}({unit}={getattr(self, unit)}, total_steps={self.total_steps}, "
            f"turns={stats['turns']}, in_flight={stats['in_flight']})"
        )
