"""``RayCollector``: the same collector, on many machines.

A worker is an ordinary collector in a Ray actor; the driver takes their batches and hands them to the reader. The front
is that of :class:`~torchrl_llm.collector.LLMCollector`, driven by the same
:class:`~torchrl_llm.lifecycle.Collection`; in place of a rollout stands a :class:`~torchrl_llm.ray.rollout.RayRollout`
over a :class:`~torchrl_llm.ray.fleet.Fleet` of workers. Importing this module imports Ray.
"""

from __future__ import annotations

import atexit
import contextlib
import queue as queue_module
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tensordict import TensorDictBase, list_to_stack
from torchrl.collectors import BaseCollector

from torchrl_llm import arguments as local_arguments
from torchrl_llm.budget import Budget
from torchrl_llm.collector import EXIT_SECONDS, LLMCollector
from torchrl_llm.control import Control
from torchrl_llm.finishing import BatchFinish
from torchrl_llm.lag import make_lag
from torchrl_llm.lifecycle import Collection
from torchrl_llm.ray.arguments import check_ray_arguments, check_sendable, dry_run
from torchrl_llm.ray.books import ClusterBooks
from torchrl_llm.ray.cluster import Placement, connect, disconnect
from torchrl_llm.ray.dealing import share_of
from torchrl_llm.ray.evaluation import evaluate_on, shares_of, together
from torchrl_llm.ray.fleet import Fleet
from torchrl_llm.ray.groups import Groups
from torchrl_llm.ray.hooks import WorkerHooks
from torchrl_llm.ray.member import Arrival, Event
from torchrl_llm.ray.plan import make_cluster_plan
from torchrl_llm.ray.prompts import ClusterPrompts, detach
from torchrl_llm.ray.rollout import RayRollout, whole_delivery
from torchrl_llm.ray.roster import SEED
from torchrl_llm.ray.schedule import FirstCome, RoundRobin, Schedule
from torchrl_llm.ray.sinks import make_ray_sink
from torchrl_llm.ray.weights import ClusterWeights
from torchrl_llm.ray.worker import Order
from torchrl_llm.seeds import check_seed, next_seed
from torchrl_llm.weight_forms import one_source

_running: weakref.WeakSet[RayCollector] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends what still runs at the interpreter's exit. Registered after Ray's own exit, and so called before it."""
    for collector in list(_running):
        collector._finalizer()


class RayCollector(LLMCollector):
    """An :class:`LLMCollector` whose environments and policies run in Ray actors; ``backend="ray"`` makes one.

    Each worker is a collector of its own, with its engines, in an actor. The driver takes batches from whichever worker
    has one. A worker that dies or hangs is restarted from its constructors while the others go on. A list of
    environments or of policies is dealt out to the workers like cards; a single constructor is given to each worker.

    Args:
        env: a constructor ``() -> EnvBase``, or a list of them. Constructors travel by ``cloudpickle``.
        policy: a constructor ``() -> policy``, a policy that can be pickled (each worker has a copy), or a list.

    Keyword Args:
        num_workers: how many workers. Defaults to the length of the longer of the two lists, else 1.
        num_cpus: CPUs of each worker, or a list with one number per worker. Defaults to 1.
        num_gpus: GPUs of each worker, likewise. Defaults to 0.
        resources: other resources of each worker, in Ray's names: a dict, or a list of dicts.
        ray_init_config: arguments of ``ray.init``, where Ray does not run yet in this process.
        placement: ``None`` leaves it to Ray; ``"spread"`` over the nodes, ``"pack"`` onto few, or a placement group.
        prefetch: how many finished batches a worker may have waiting before it stops. Defaults to 1.
        max_restarts: how often each worker may be restarted in the collector's life, after which its loss is a
            :class:`WorkerError`. Defaults to 3.
        worker_timeout: seconds without any finished turn after which a worker is taken for hung, and restarted; also
            by a call that waits for it, such as an update of the weights. Defaults to ``None``, no limit.
        ordered: take batches strictly in turn, worker by worker, instead of first come, first served.
        group_affinity: keep all members of a group on one worker, whose prefix cache knows their prompt; ``False``
            spreads them over the workers. Prompts of a :class:`PromptSource` are shared by all workers either way: an
            epoch is one epoch.
        hooks: what is called at the turns of a worker's life, see :class:`WorkerHooks`.
        replay_buffer, queue: as in :class:`LLMCollector`; a ``RayReplayBuffer`` or a ``ray.util.queue.Queue`` is
            written to from the workers' nodes, without a way through the driver.
        postproc: as in :class:`LLMCollector`; it runs on the driver.
        total_steps: as in :class:`LLMCollector`, over all workers.
        collector_class: what the workers are; ``LLMCollector`` or a subclass.
        arguments: all other arguments of :class:`LLMCollector`, for each worker. ``num_envs`` is per worker, and a
            ``route`` that is a function sees its worker's environments and policies only.

    Yields:
        What :class:`LLMCollector` yields, with ``("collector", "worker_id")`` in each turn. ``traj_ids`` are unique
        over all workers and restarts; ``env_id`` and ``policy_id`` are places in the lists that were passed.

    Raises:
        ImportError: if Ray is not installed.
        TypeError: for an argument that does not exist, is of the wrong type, or cannot be sent to a worker.
        ValueError: for a value that is not allowed, or if the cluster can never hold so many workers.
        EnvError: if an environment's constructor fails in a worker.
        PolicyError: if a policy's constructor fails in a worker.
        WorkerError: if a worker cannot be started.
    """

    def __init__(
        self,
        env: Any,
        policy: Any,
        *,
        num_workers: int | None = None,
        num_cpus: float | list[float] = 1,
        num_gpus: float | list[float] = 0,
        resources: Mapping[str, float] | list[Mapping[str, float]] = {},  # noqa: B006
        ray_init_config: Mapping[str, Any] | None = None,
        placement: Any = None,
        prefetch: int = 1,
        max_restarts: int = 3,
        worker_timeout: float | None = None,
        ordered: bool = False,
        group_affinity: bool = True,
        hooks: WorkerHooks | None = None,
        total_steps: int = -1,
        replay_buffer: Any = None,
        queue: Any = None,
        postproc: Callable[[TensorDictBase], TensorDictBase | None] | None = None,
        collector_class: type = LLMCollector,
        **arguments: Any,
    ) -> None:
        on_driver = {
            "total_steps": total_steps, "replay_buffer": replay_buffer, "queue": queue, "postproc": postproc,
        }  # fmt: skip
        dry_run(collector_class, policy, env, {**arguments, **on_driver})
        env, source = detach(env)
        plan = make_cluster_plan(arguments, source is not None, group_affinity)
        wanted = check_ray_arguments(
            env, policy,
            num_workers=num_workers, num_cpus=num_cpus, num_gpus=num_gpus, resources=resources,
            ray_init_config=ray_init_config, placement=placement, prefetch=prefetch, max_restarts=max_restarts,
            worker_timeout=worker_timeout, ordered=ordered,
        )  # fmt: skip
        hooks = hooks or WorkerHooks()
        others = {**arguments, "collector_class": collector_class, "hooks.handle": hooks.handle}
        check_sendable(env, policy, arguments.get("num_envs"), others)
        BaseCollector.__init__(self)

        self.total_steps = total_steps
        self.steps_per_batch = arguments.get("steps_per_batch")
        self.trajectories_per_batch = arguments.get("trajectories_per_batch")
        self.groups_per_batch = arguments.get("groups_per_batch")
        self.replay_buffer, self.queue, self.postproc = replay_buffer, queue, postproc
        self._sink = make_ray_sink(replay_buffer, queue)
        batcher = plan.batcher()
        books = ClusterBooks()
        events: queue_module.SimpleQueue[Event | None] = queue_module.SimpleQueue()
        control = Control(wake=lambda: events.put(None))

        def make_order(worker: int, life: int) -> Order:
            return Order(
                collector_class,
                env=share_of(env, worker, wanted.num_workers),
                policy=share_of(policy, worker, wanted.num_workers),
                arguments=plan.arguments_for(life),
                worker=worker,
                life=life,
                prefetch=prefetch,
                handle=hooks.handle,
                list_to_stack=bool(list_to_stack()),
                prompts=None if prompts is None else prompts.connection,
            )

        with contextlib.ExitStack() as undo:
            connect(ray_init_config)
            undo.callback(disconnect)
            placed = Placement(placement, wanted.demands)
            undo.callback(placed.remove)
            prompts = None if source is None else ClusterPrompts(source, whole_groups=not plan.spread)
            undo.pop_all()
        schedule: Schedule[Arrival] = RoundRobin() if ordered else FirstCome()
        fleet = self._fleet = Fleet(
            make_order=make_order, arguments=wanted, placement=placed, books=books, schedule=schedule,
            hooks=hooks, events=events, max_restarts=max_restarts, worker_timeout=worker_timeout, prompts=prompts,
        )  # fmt: skip
        self._roster = fleet.roster
        weights = ClusterWeights(self._roster, lambda: events.put(None))
        lag = make_lag(arguments.get("max_policy_lag"), batcher, lambda: weights.version)
        try:
            fleet.start()
        except BaseException:
            fleet.close(deadline=0.0)
            raise
        self._rollout = RayRollout(
            fleet=fleet, batcher=batcher, budget=Budget(total_steps, batcher.whole_trajectories), books=books,
            control=control,
            groups=None if prompts is None else Groups(prompts, prompts.repeats if plan.groups else None, plan.spread),
            lag=lag,
        )  # fmt: skip
        self._plan, self._prompts, self._seed = plan, prompts, plan.seed
        self._weights = self._cluster_weights = weights  # type: ignore[assignment]
        self._ledger = books  # type: ignore[assignment]
        self._control = control
        changing = None if lag is None else weights.changing
        finish = _RayFinish(BatchFinish(self, lag is not None), self._rollout)
        self._collection = Collection(self._rollout, control, books, finish, self._sink, changing)  # type: ignore[arg-type]
        self._rollout.send_to(self._sink)
        self._finalizer = weakref.finalize(self, self._collection.shutdown, EXIT_SECONDS)
        _running.add(self)

    def start(self, target: Any = None) -> None:
        """Collects in the background, into a replay buffer or a queue.

        Args:
            target: a replay buffer (has ``extend``) or a queue (has ``put``); defaults to the constructor's. Into a
                ``RayReplayBuffer`` or a ``ray.util.queue.Queue`` the turns go from the workers' nodes directly.

        Raises:
            TypeError: if there is no target, or it cannot be written to.
            CollectorError: if the collection runs already, failed, or has ended, or the engines sleep.
        """
        self._cluster_weights.asleep.check_ready()
        sink = self._sink
        if target is not None:
            is_buffer = callable(getattr(target, "extend", None))
            sink = make_ray_sink(target if is_buffer else None, None if is_buffer else target)
        if sink is None:
            raise TypeError("start() needs a target: pass a replay buffer or a queue, here or to the constructor")
        if not self._collection.is_running():
            self._rollout.send_to(sink)
        self._sink = sink
        self._collection.start(sink)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Brings all workers to rest inside the ``with`` block; see :meth:`LLMCollector.pause`."""
        with self._control.pause(), self._roster.pause():
            yield

    # Workers

    def call_workers(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> dict[int, Any]:
        """Calls a method of every worker's collector, also while they collect.

        Args:
            method: name of a method of the collector that a worker is.
            args: its arguments; an object reference (``ray.put``) is read by each worker, and sent once.
            timeout: seconds to wait for all workers together; ``None`` for as long as it takes.
            kwargs: its keyword arguments.

        Returns:
            What each worker returned, by the worker's number.

        Raises:
            WorkerError: naming the workers that failed, were lost or did not answer in time. Its ``results`` and
                ``failures`` hold what each worker gave.
        """
        return self._roster.call(method, args, kwargs, timeout)

    def add_workers(self, n: int = 1) -> list[int]:
        """Starts more workers, which join in when they are built. Returns their numbers at once.

        Raises:
            CollectorError: if the collection is over.
        """
        return self._fleet.add(local_arguments.check_int("n", n, "an int of at least 1", minimum=1))

    def remove_workers(self, n: int = 1) -> list[int]:
        """Ends the workers with the highest numbers, and waits for that. What they have finished is still delivered.

        Returns:
            The numbers of the workers that were removed.

        Raises:
            ValueError: if no worker would be left.
        """
        return self._fleet.remove(local_arguments.check_int("n", n, "an int of at least 1", minimum=1))

    def stats(self) -> dict[str, Any]:
        """The books of the whole cluster at this moment: sums over all workers, also those that are gone.

        The two equations of :meth:`LLMCollector.stats` hold. What a worker has begun is known from its last report,
        which comes with each batch, and about once a second while the driver waits.

        Returns:
            The keys of :meth:`LLMCollector.stats`, and ``worker_restarts``, ``turns_lost_with_workers`` (finished turns
            that were lost with a worker's process), and ``workers``: for each worker its ``state``, ``restarts``,
            ``turns`` and ``trajectories`` that have arrived, and its own counters.
        """
        return self._ledger.snapshot() | self._weights.stats()

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        version: int | None = None,
        update_mode: str | None = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Gives the policies of all workers new weights; returns when each makes its next tokens with them.

        The weights are put into Ray's object store once. A worker that is restarted or added begins with the newest.

        Args:
            policy_or_weights: see :meth:`LLMCollector.update_policy_weights_`; the path of a LoRA adapter is read by
                each worker.

        Keyword Args:
            weights: the same, by its other TorchRL name.
            policy: the same, by its other TorchRL name.
            version: number of the new weights, greater than that of the last; one more by default.
            update_mode: see :meth:`LLMCollector.update_policy_weights_`.
            worker_ids: for ``weight_updater=`` and ``weight_sync_schemes=``, in each worker.
            model_id: likewise.
            weights_dict: likewise.
            timeout: seconds to wait for all workers together; ``None`` for as long as it takes.

        Raises:
            ValueError: if the weights do not fit: all workers keep their old ones.
            WorkerError: naming the workers that have not switched.
        """
        others = {"worker_ids": worker_ids, "model_id": model_id, "weights_dict": weights_dict}
        given = {name: value for name, value in others.items() if value is not None}
        source = one_source(policy_or_weights, weights, policy)
        self._collection.check_open()
        self._cluster_weights.update(source, version, update_mode, given, timeout)

    def evaluate(self, prompts: Any, n: int = 1, key: str | None = None) -> TensorDictBase:
        """Runs a list of prompts on the workers' policies, each on one of them; see :meth:`LLMCollector.evaluate`.

        The share of a worker that dies meanwhile goes to the others.
        """
        local_arguments.check_int("n", n, "an int of at least 1", minimum=1)
        self._collection.check_open()
        shares = shares_of(prompts, n, key, max(1, len(self._roster.lives())))
        return together(evaluate_on(self._roster, shares), sum(len(share.prompts) for share in shares))

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds all workers, and the order of prompts that has not begun; see :meth:`LLMCollector.set_seed`.

        Where prompts are shared, a prompt has the same seeds on whichever worker it is answered; else each worker has
        seeds of its own.
        """
        check_seed(seed)
        self._seed, first = seed, self._fleet.first_life
        self._roster.order(SEED, "set_seed", lambda life: (self._plan.seed_for(seed, first + life),))
        return seed if static_seed else next_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """What another process needs to go on, as plain data; see :meth:`LLMCollector.state_dict`.

        Whatever has not reached the reader is handed out again by the collector that loads it, wherever it is now: with
        a worker, on its way, or at the driver.
        """
        with self.pause():
            return {
                "policy_version": self.policy_version,
                "ledger": self._ledger.state_dict(),
                "fleet": self._fleet.state_dict(),
                "seed": self._seed,
                "prompts": None if self._prompts is None else self._prompts.state_dict(),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a state, before the collector is read; see :meth:`LLMCollector.load_state_dict`.

        Raises:
            CollectorError: if the collector has begun.
            ValueError: if the state does not fit.
        """
        if (state_dict["prompts"] is None) != (self._prompts is None):
            raise ValueError("the state and the collector do not both have a PromptSource: build it like the saved one")
        self._plan.check_state(state_dict["prompts"])
        self._fleet.load_state_dict(state_dict["fleet"])
        if self._prompts is not None:
            self._prompts.load_state_dict(state_dict["prompts"])
        self._ledger.load_state_dict(state_dict["ledger"])
        self._cluster_weights.restore(state_dict["policy_version"])
        if state_dict["seed"] is not None:
            self.set_seed(state_dict["seed"])


class _RayFinish:
    """Makes the reader's batch of arrived turns; lets one that nobody has to see on the driver pass unread."""

    def __init__(self, finish: BatchFinish, rollout: RayRollout) -> None:
        self._finish = finish
        self._rollout = rollout

    def __call__(self, turns: list[Any]) -> Any:
        if self._rollout.stay_away and not self._finish.looks:
            delivery = whole_delivery(turns)
            if delivery is not None:
                return delivery
        return self._finish(turns)
