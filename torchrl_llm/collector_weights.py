"""The part of ``LLMCollector`` that is about weights: versions, updates, sleep.

Thin: what happens is in :mod:`torchrl_llm.weights` and :mod:`torchrl_llm.sleep`. All of it may be called by any thread.
"""

from __future__ import annotations

import warnings
from typing import Any

from tensordict import TensorDictBase

from torchrl_llm.errors import CollectorError
from torchrl_llm.reading import Reading
from torchrl_llm.weight_forms import one_source
from torchrl_llm.weights import PolicyWeights


class WeightMethods(Reading):
    """Methods of :class:`~torchrl_llm.LLMCollector`, which owns the state."""

    _weights: PolicyWeights

    def __next__(self) -> TensorDictBase | None:
        """See :meth:`Reading.__next__`. Refused while the engines sleep."""
        self._weights.asleep.check_ready()
        return super().__next__()

    def start(self, target: Any = None) -> None:
        """See :meth:`Reading.start`. Refused while the engines sleep."""
        self._weights.asleep.check_ready()
        super().start(target)

    def _serve(self, target: Any) -> None:
        """What a worker of a :class:`RayCollector` is started by: it may begin while its engines sleep."""
        if self._weights.asleep.level:
            super().start(target)
        else:
            self.start(target)

    @property
    def policy_version(self) -> int:
        """Version of the policies' weights: from 0, or the number that :meth:`update_policy_weights_` was given."""
        return self._weights.version

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
    ) -> None:
        """Gives all policies new weights; returns when each makes its next tokens with them. Safe from any thread.

        Args:
            policy_or_weights: a module, a TensorDict, a state dict, an iterator of (name, tensor), or the path of a
                folder of safetensors. Names are those of the policy's model (for vLLM those of the Hugging Face
                checkpoint); what wrappers put before them is ignored. float32 weights are cast to a narrower policy.

        Keyword Args:
            weights: the same, by its other TorchRL name.
            policy: the same, by its other TorchRL name.
            version: number of the new weights, greater than that of the last; one more by default.
            update_mode: what becomes of the responses that are being made; by default the collector's. ``"continue"``:
                they go on with the new weights between two tokens. ``"wait"``: they are finished first, and new ones
                wait. ``"restart"``: they begin again, and their tokens are thrown away.
            worker_ids: for ``weight_updater=`` and ``weight_sync_schemes=``, as in TorchRL.
            model_id: for ``weight_sync_schemes=``, as in TorchRL.
            weights_dict: for ``weight_sync_schemes=``, as in TorchRL.

        Raises:
            ValueError: if the weights do not fit; the first mismatches are listed, and the old weights stay in use.
            TypeError: if the weights have none of the allowed forms, or a policy has no weights.
            CollectorError: if the collection failed or was shut down.
            PolicyError: if a policy failed while it switched.

        Warns:
            RuntimeWarning: if the collection has come to its end, and its policies with it: nothing is updated.
        """
        source = one_source(policy_or_weights, weights, policy)
        self._collection.check_open()
        if self._collection.finished:
            # A trainer beside it may still be at its last batches.
            warnings.warn(
                "the collector has come to its end, and its policies with it: no weights were updated",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        others = {"worker_ids": worker_ids, "model_id": model_id, "weights_dict": weights_dict}
        self._weights.update(source, version, update_mode, others)

    def increment_version(self) -> None:
        """What TorchRL's weight updaters call; :meth:`update_policy_weights_` counts the version itself."""
        self._weights.increment()

    def sleep(self, level: int = 1) -> None:
        """Puts the ``vllm.LLM`` engines to sleep, so that training has their GPU; requests wait. From any thread.

        An engine that several collectors share sleeps for all of them, and each of them can wake it.

        Args:
            level: vLLM's: 1 moves the weights to CPU memory, 2 discards them.

        Raises:
            ValueError: for another level, or if no policy is a ``vllm.LLM``.
            CollectorError: if they sleep already, or the collection is over.
        """
        self._collection.check_open()
        if self._collection.finished:
            raise CollectorError("the collector has come to its end, and its policies with it: none can sleep")
        self._weights.sleep(level)

    def wake_up(self) -> None:
        """Wakes the engines; requests go on. After level 2 they go on when :meth:`update_policy_weights_` was called.

        Raises:
            CollectorError: if the engines do not sleep.
        """
        self._weights.wake_up()
