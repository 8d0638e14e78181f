"""Evaluation in between: a fixed list of prompts on the collector's own policies, beside the training stream.

An evaluation is a second rollout over the same policies, in the caller's thread, with environments, threads, books and
a prompt source of its own. The engines work on the requests of both; what the training stream has in flight goes on,
and its order, counters and prompts are not touched. Nor is it touched by what fails here: a batched policy is called on
a guest's requests apart from others, and stays in use if it raises.

Threads: the rollout belongs to the thread that calls :func:`evaluate`. A collection that ends stops it by its control.
"""

from __future__ import annotations

import queue
import time
import warnings
from collections.abc import Callable, Collection, Sized
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch.utils.data import DataLoader, IterableDataset
from torchrl.envs import EnvBase

from torchrl_llm.assembly import build_slots
from torchrl_llm.batches import Turn, stack_turns
from torchrl_llm.binding import BoundEnv
from torchrl_llm.bridge import make_bridge
from torchrl_llm.budget import Budget
from torchrl_llm.control import Control, Stopped
from torchrl_llm.deadlines import Limits
from torchrl_llm.errors import CollectorError
from torchrl_llm.launches import Launches
from torchrl_llm.ledger import Ledger
from torchrl_llm.plan import BatchPlan
from torchrl_llm.policies.pool import PolicyPool
from torchrl_llm.prompts import PromptSource
from torchrl_llm.rollout import Rollout
from torchrl_llm.routing import Route, reachable
from torchrl_llm.seeds import EVALUATION, derive
from torchrl_llm.streaks import FailuresInRow

if TYPE_CHECKING:
    from torchrl_llm import lifecycle

# How long a thread that is stuck in an environment is waited for when an evaluation ends.
CLOSE_SECONDS = 1.0

NO_TURNS = (
    "the evaluation gave no turn: its prompts are empty, or too long for the policy, or took too long "
    "(on_timeout='drop')"
)


class NoTurns(CollectorError):
    """All prompts of an evaluation were left out."""


class SharedPool:
    """A collector's policies as a guest sees them: the same runners, loads of his own, and nothing to close."""

    guest = True

    def __init__(self, pool: PolicyPool) -> None:
        self._pool = pool
        self.loads = [0] * len(pool.runners)
        self.failures_in_row = [FailuresInRow() for _ in pool.runners]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def close(self, deadline: float) -> list[str]:
        """The policies stay."""
        return []


def evaluate(
    prompts: Any,
    *,
    n: int,
    key: str | None,
    constructors: list[Callable[[], EnvBase]],
    pool: PolicyPool,
    route: str | Route,
    router: Route,
    env_threads: int,
    limits: Limits,
    seed: int | None,
    collection: lifecycle.Collection,
) -> TensorDictBase:
    """Runs each prompt ``n`` times; see :meth:`LLMCollector.evaluate`.

    Raises:
        NoTurns: if no prompt gave any.
        CollectorError: what stopped the evaluation.
    """
    source = PromptSource(prompts, repeats=n, epochs=1, key=key)
    # A DataLoader's length counts batches, and an IterableDataset's may be an estimate.
    if isinstance(prompts, Sized) and not isinstance(prompts, (DataLoader, IterableDataset)):
        constructors = constructors[: len(prompts) * n]
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    control = Control(wake=lambda: events.put(None))
    with collection.guest(control):
        bound = [
            make_env.bound_to(source) if isinstance(make_env, BoundEnv) else BoundEnv(source, make_env)
            for make_env in constructors
        ]
        slots = build_slots([(make_env, None) for make_env in bound], bound=True)
        shared: Any = SharedPool(pool)
        try:
            for slot in slots:
                ids = reachable(route, slot.env_id, len(pool.runners))
                slot.bridges = {index: make_bridge(slot.env, pool.runners[index].policy) for index in ids}
        except BaseException:
            for slot in slots:
                slot.close()
            raise
        ledger = Ledger()
        plan = BatchPlan("groups_per_batch", order="completion")
        batcher = plan.batcher()
        launches = Launches(slots, shared, router, Budget(-1, whole_trajectories=True), ledger, batcher, plan)
        if seed is not None:
            launches.set_seed(derive(seed, EVALUATION))
        rollout = Rollout(
            slots=slots,
            pool=shared,
            launches=launches,
            batcher=batcher,
            ledger=ledger,
            restart=False,
            env_threads=env_threads,
            limits=limits,
            events=events,
            control=control,
        )
        turns: list[Turn] = []
        try:
            while batch := rollout.next_batch():
                turns += batch
        except Stopped:
            raise CollectorError("the collector ended while it was evaluating") from None
        finally:
            for slot in slots:
                for row in slot.rows:
                    rollout.abandon(slot, row, "aborted")
            rollout.close(time.monotonic() + CLOSE_SECONDS)
    if not turns:
        raise NoTurns(NO_TURNS)
    present = {turn.trajectory.unit for turn in turns}
    warn_of_missing(present, len(present) + ledger.snapshot()["groups_failed"])
    return stack_turns(sorted(turns, key=lambda turn: turn.trajectory.unit))


def warn_of_missing(present: Collection[int], count: int) -> None:
    """Says which prompts an evaluation has left out, to whoever called :meth:`LLMCollector.evaluate`.

    Args:
        present: the numbers of the prompts that it has turns of.
        count: how many prompts there were.
    """
    missing = [number for number in range(count) if number not in present]
    if missing:
        warnings.warn(
            f"the evaluation has left out {len(missing)} of {count} prompts, with the numbers {missing}: too long for "
            "the policy, or they took too long (on_timeout='drop'); the log says which is the case",
            RuntimeWarning,
            stacklevel=4,
        )
