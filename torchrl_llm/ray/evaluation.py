"""Evaluation on a cluster: each prompt goes to one worker, and the answers come back in the order of the prompts.

Pure functions; :func:`evaluate_share` runs in the workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_llm.prompts import PromptSource


class Share(NamedTuple):
    """The prompts of one worker.

    Attributes:
        first: number of the first of them among all.
        prompts: the prompts.
        n: trajectories per prompt.
        key: the field that holds a prompt.
    """

    first: int
    prompts: list[Any]
    n: int
    key: str


def shares_of(prompts: Any, n: int, key: str | None, workers: int) -> list[Share]:
    """The prompts dealt out in runs of like length.

    Raises:
        ValueError: if there are no prompts.

    Examples:
        >>> [(share.first, len(share.prompts)) for share in shares_of(["a", "b", "c"], 1, None, 2)]
        [(0, 2), (2, 1)]
    """
    source = PromptSource(prompts, epochs=1, key=key)
    members = []
    while taken := source.take(1):
        members += taken
    if not members:
        raise ValueError("prompts is empty: pass at least one prompt")
    data = [{member.name: member.prompt, **member.fields} for member in members]
    each, more = divmod(len(data), workers)
    shares, first = [], 0
    for worker in range(workers):
        size = each + (worker < more)
        shares.append(Share(first, data[first : first + size], n, members[0].name))
        first += size
    return shares


def evaluate_share(collector: Any, share: Share | None) -> tuple[int, TensorDictBase] | None:
    """In a worker: runs its prompts; returns the number of the first, and the turns."""
    if share is None or not share.prompts:
        return None
    return share.first, collector.evaluate(share.prompts, n=share.n, key=share.key)


def together(results: Iterable[tuple[int, TensorDictBase] | None]) -> TensorDictBase:
    """The turns of all workers as one batch, in the order of the prompts."""
    rows: list[TensorDictBase] = []
    trajectories = 0
    for first, batch in sorted((result for result in results if result is not None), key=lambda result: result[0]):
        own = batch.unbind(0)
        for row in own:
            ids: Any = row.get("collector")
            ids.set("group_id", ids.get("group_id") + first)
            ids.set("traj_ids", ids.get("traj_ids") + trajectories)
        trajectories += len({int(row["collector", "traj_ids"]) for row in own})
        rows += own
    return LazyStackedTensorDict(*rows, stack_dim=0)
