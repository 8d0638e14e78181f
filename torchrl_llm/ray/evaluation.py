"""Evaluation on a cluster: each prompt goes to one worker, and the answers come back in the order of the prompts.

Functions without state; :func:`evaluate_share` runs in the workers, the others in the thread that evaluates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_llm.errors import CollectorError
from torchrl_llm.evaluation import NO_TURNS, NoTurns, warn_of_missing
from torchrl_llm.prompts import PromptSource
from torchrl_llm.ray.calls import Answers, failure, is_loss
from torchrl_llm.ray.roster import Roster


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
        if size:
            shares.append(Share(first, data[first : first + size], n, members[0].name))
        first += size
    return shares


def evaluate_on(roster: Roster, shares: list[Share]) -> list[Part]:
    """Gives each share to a worker; what one did not get done that died meanwhile goes to the others.

    Raises:
        CollectorError: if no worker is there.
        WorkerError: naming the workers that failed.
    """
    parts: list[Part] = []
    dead: set[int] = set()
    while shares:
        lives = [life for life in roster.lives() if life not in dead]
        if not lives:
            raise CollectorError("there is no worker that could evaluate: all are being started, or have failed")
        given = dict(zip(lives, shares, strict=False))
        answers = roster.call_some(evaluate_share, {life: (share,) for life, share in given.items()})
        failures = {life: error for life, error in answers.failures.items() if not is_loss(error)}
        if failures:
            raise failure(evaluate_share, Answers(answers.results, failures))
        done = {part.first for part in answers.results.values()}
        parts += answers.results.values()
        dead |= {life for life, share in given.items() if share.first not in done}
        shares = [share for share in shares if share.first not in done]
    return parts


class Part(NamedTuple):
    """What came of a share: the number of its first prompt, and the turns; ``None`` if all were left out."""

    first: int
    turns: TensorDictBase | None


def evaluate_share(collector: Any, share: Share) -> Part:
    """In a worker: runs its prompts."""
    try:
        turns = collector.evaluate(share.prompts, n=share.n, key=share.key)
    except NoTurns:
        turns = None
    return Part(share.first, turns)


def together(parts: Iterable[Part], prompts: int) -> TensorDictBase:
    """The turns of all workers as one batch, in the order of the ``prompts`` prompts; a warning if some are missing.

    Raises:
        NoTurns: if no prompt gave any.
    """
    rows: list[TensorDictBase] = []
    trajectories = 0
    for first, batch in sorted(parts, key=lambda part: part.first):
        own = [] if batch is None else batch.unbind(0)
        for row in own:
            ids: Any = row.get("collector")
            ids.set("group_id", ids.get("group_id") + first)
            ids.set("traj_ids", ids.get("traj_ids") + trajectories)
        # Prompts that were left out have had ids too.
        trajectories = max((int(row["collector", "traj_ids"]) + 1 for row in own), default=trajectories)
        rows += own
    if not rows:
        raise NoTurns(NO_TURNS)
    warn_of_missing({int(row["collector", "group_id"]) for row in rows}, prompts)
    return LazyStackedTensorDict(*rows, stack_dim=0)
