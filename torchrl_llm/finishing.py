"""The last thing that is done to a batch before it is delivered: the user's ``postproc`` and hooks.

Run by the thread that drives the rollout. It does not keep the collector alive.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from tensordict import TensorDictBase

from torchrl_llm.batches import Turn, stack_turns
from torchrl_llm.errors import CollectorError

if TYPE_CHECKING:
    from torchrl_llm.collector import LLMCollector


class BatchFinish:
    """Stacks turns and runs the collector's ``postproc`` and hooks, without keeping the collector alive.

    Args:
        collector: whose.
        may_come_back: whether a batch may be taken back after this, when it has become too old for its delivery. What
            the user's functions get is then a copy, or what they change would be changed twice.
    """

    def __init__(self, collector: LLMCollector, may_come_back: bool = False) -> None:
        self._collector = weakref.ref(collector)
        self._postproc = collector.postproc
        self._may_come_back = may_come_back

    @property
    def looks(self) -> bool:
        """Whether anybody sees batches before they are delivered."""
        collector = self._collector()
        return self._postproc is not None or (collector is not None and collector.post_collect_hook is not None)

    def __call__(self, turns: list[Turn]) -> TensorDictBase | None:
        """The batch as it is to be delivered; ``None`` for nothing. Raises what the user's functions raise."""
        batch = stack_turns(turns)
        if self._may_come_back and self.looks:
            batch = batch.clone()
        finished = batch if self._postproc is None else self._postproc(batch)
        if finished is not None and not isinstance(finished, TensorDictBase):
            raise CollectorError(f"postproc returned {type(finished).__name__}; a TensorDict or None is needed")
        collector = self._collector()
        if finished is not None and collector is not None and collector.post_collect_hook is not None:
            collector.post_collect_hook(finished)
        return finished
