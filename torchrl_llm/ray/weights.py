"""Weights for all workers: put into Ray's object store once, taken from there by each.

Invariants: the version of the cluster grows with each update; a worker that is restarted or added has the newest
weights that were pushed, under the cluster's version, before it collects; an update returns when all workers make their
next tokens with them, or names those that do not.

Threads: any may update, one at a time.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import ray
import torch

from torchrl_llm.errors import CollectorError, WorkerError
from torchrl_llm.ray.calls import refusal
from torchrl_llm.ray.roster import VERSION, WEIGHTS, Roster
from torchrl_llm.ray.sleep import ClusterSleep
from torchrl_llm.weight_forms import Weights, read_weights
from torchrl_llm.weights import check_mode, next_version


class PackedWeights(Mapping[str, torch.Tensor]):
    """Named tensors as bytes, which Ray's object store keeps in shared memory and workers read in place.

    Args:
        tensors: the tensors; those that are the same under several names are packed once.

    Examples:
        >>> packed = PackedWeights({"w": torch.arange(3, dtype=torch.bfloat16)})
        >>> packed["w"]
        tensor([0., 1., 2.], dtype=torch.bfloat16)
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._places: dict[str, tuple[int, torch.dtype, torch.Size]] = {}
        self._bytes: list[np.ndarray] = []
        known: dict[tuple[Any, ...], int] = {}
        for name, tensor in tensors.items():
            same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
            if same not in known or tensor.numel() == 0:
                known[same] = len(self._bytes)
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                self._bytes.append(flat.view(torch.uint8).numpy())
            self._places[name] = (known[same], tensor.dtype, tensor.shape)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor; its memory is not to be written to."""
        place, dtype, shape = self._places[name]
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        with warnings.catch_warnings():
            # The store's memory is read-only; whoever loads weights only reads them.
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(self._bytes[place]).view(dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class ClusterWeights:
    """The weights of all workers.

    Args:
        roster: the workers.
        on_update: called after each update.

    Attributes:
        changing: held while the version changes.
        asleep: says whether the engines can answer.
    """

    def __init__(self, roster: Roster, on_update: Callable[[], None]) -> None:
        self.changing = threading.Lock()
        self.asleep = ClusterSleep(roster)
        self._roster = roster
        self._on_update = on_update
        self._updating = threading.RLock()
        self._version = 0
        self._updates = 0
        self._seconds = 0.0

    @property
    def version(self) -> int:
        """Version of the newest weights, from 0."""
        return self._version

    def update(
        self,
        source: Any,
        version: int | None = None,
        mode: str | None = None,
        others: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Gives all workers new weights; returns their version when all have switched.

        A worker whose process ends meanwhile is no failure: the one that follows begins with the new weights.

        Args:
            source: the weights; ``None`` where the workers have a transport of the user's that fetches them.
            version: number of the new weights; by default one more than the last.
            mode: what becomes of the responses that are being made; by default the collector's.
            others: keyword arguments for a transport of the user's.
            timeout: seconds to wait for all workers together.

        Raises:
            ValueError: if the weights do not fit (all workers keep their old ones), or ``version`` is not greater than
                the last.
            TypeError: if the weights have none of the allowed forms.
            CollectorError: if the engines sleep.
            WorkerError: naming the workers that have not switched, or not in ``timeout`` seconds.
        """
        if mode is not None:
            check_mode(mode)
        weights = None if source is None else read_weights(source)
        begun = time.monotonic()
        try:
            with self._updating:
                self.asleep.check_can_update()
                new = next_version(self.version, version)
                what = None if weights is None else _parcel(weights)
                try:
                    self._roster.order(WEIGHTS, adopt, lambda life: (what, new, mode, others), timeout)
                except WorkerError as error:
                    if (reason := refusal(error)) is not None:
                        raise reason from error
                    self._become(new)
                    raise
                self._become(new)
                self.asleep.pushed()
                self._updates += 1
                self._seconds += time.monotonic() - begun
        finally:
            if weights is not None:
                weights.dispose()
        return new

    def _become(self, version: int) -> None:
        with self.changing:
            self._version = version
        self._on_update()

    def restore(self, version: int) -> None:
        """Goes on counting from the version of a saved state, in all workers; the weights stay as they are."""
        with self._updating:
            # Not in the place of the last weights, which newcomers still need.
            self._roster.order(VERSION, count_from, lambda life: (version,))
            self._become(max(self.version, version))

    def increment(self) -> None:
        """See :meth:`PolicyWeights.increment`.

        Raises:
            CollectorError: always; nothing holds the workers' engines still.
        """
        raise CollectorError("push weights by collector.update_policy_weights_(), which lets the policies rest")

    def sleep(self, level: int) -> None:
        """Puts the engines of all workers to sleep; see :meth:`Sleep.sleep`."""
        with self._updating:
            self.asleep.sleep_all(level)

    def wake_up(self) -> None:
        """Wakes the engines of all workers; see :meth:`Sleep.wake_up`."""
        with self._updating:
            self.asleep.wake_up()

    def stats(self) -> dict[str, Any]:
        """``policy_version``, ``weight_updates`` and the seconds that they took."""
        return {
            "policy_version": self.version,
            "weight_updates": self._updates,
            "weight_update_seconds": self._seconds,
        }


def _parcel(weights: Weights) -> Any:
    """What travels: a reference to the tensors, or the path of an adapter, whose folder says more than its tensors."""
    return weights.folder if weights.adapter else ray.put(PackedWeights(weights.tensors))


def adopt(collector: Any, weights: Any, version: int, mode: str | None, others: Mapping[str, Any] | None) -> None:
    """In a worker: gives its collector the weights, unless it has them already, or newer ones."""
    if version > collector.policy_version:
        collector.update_policy_weights_(weights, version=version, update_mode=mode, **(others or {}))


def count_from(collector: Any, version: int) -> None:
    """In a worker: goes on counting from the version of a saved state, unless it is further already."""
    collector._weights.count_from(version)
