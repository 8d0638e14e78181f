"""Weights for all workers: put into Ray's object store once, taken from there by each.

Invariants: the version of the cluster grows with each update; a worker that is restarted or added has the newest
weights before it collects; an update returns when all workers make their next tokens with them, or names those that do
not.

Threads: any may update, one at a time. :meth:`ClusterWeights.on_worker_ready` is called by the thread that sees that a
worker is built, under the fleet's lock.
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
from torchrl_llm.weight_forms import Weights, read_weights
from torchrl_llm.weights import check_mode

Call = Callable[..., Any]


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
        call: calls a function of every worker's collector, see :meth:`RayCollector.call_workers`.
        on_update: called after each update.

    Attributes:
        changing: held while the version changes.
    """

    def __init__(self, call: Callable[..., dict[int, Any]], on_update: Callable[[], None]) -> None:
        self.changing = threading.Lock()
        self._call = call
        self._on_update = on_update
        self._updating = threading.Lock()
        self._version = 0
        self._newest: tuple[int, Any, Mapping[str, Any] | None] | None = None
        self._updates = 0
        self._seconds = 0.0
        self._level = 0

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
            WorkerError: naming the workers that have not switched, or not in ``timeout`` seconds.
        """
        if mode is not None:
            check_mode(mode)
        weights = None if source is None else read_weights(source)
        begun = time.monotonic()
        with self._updating:
            before = self._newest
            new = self._new_version(version)
            what = None if weights is None else _parcel(weights)
            self._newest = (new, what, others)
            try:
                self._call(adopt, what, new, mode, others, timeout=timeout)
            except WorkerError as error:
                refused = self._refused(error)
                if refused is not None:
                    self._newest = before
                    raise refused from error
                self._become(new)
                raise
            finally:
                if weights is not None:
                    weights.dispose()
            self._become(new)
            self._updates += 1
            self._seconds += time.monotonic() - begun
        return new

    def _become(self, version: int) -> None:
        with self.changing:
            self._version = version
        self._on_update()

    def _refused(self, error: WorkerError) -> Exception | None:
        """Why all workers refused the weights, if they did: then nothing has changed."""
        failures = getattr(error, "failures", {})
        if getattr(error, "results", None) or not failures:
            return None
        causes = list(failures.values())
        if all(isinstance(cause, (TypeError, ValueError)) for cause in causes):
            first: Exception = causes[0]
            return type(first)(str(first))
        return None

    def _new_version(self, version: int | None) -> int:
        if version is None:
            return self.version + 1
        if not isinstance(version, int) or isinstance(version, bool):
            raise TypeError(f"version={version!r} is not allowed: pass an int, or None for {self.version + 1}")
        if version <= self.version:
            raise ValueError(
                f"version={version} is not allowed: versions grow, and the weights in use have {self.version}"
            )
        return version

    def on_worker_ready(self, worker: int, call: Call) -> None:
        """Gives a worker that was just built the newest weights."""
        newest = self._newest
        if newest is not None:
            version, what, others = newest
            call(adopt, what, version, None, others)

    def restore(self, version: int) -> None:
        """Goes on counting from the version of a saved state."""
        self._version = max(self._version, version)

    # Sleep

    @property
    def asleep(self) -> ClusterWeights:
        """Who says whether the engines can answer: see :meth:`check_ready`."""
        return self

    def sleep(self, level: int) -> None:
        """Puts the engines of all workers to sleep."""
        self._call("sleep", level, timeout=None)
        self._level = level

    def wake_up(self) -> None:
        """Wakes the engines of all workers."""
        self._call("wake_up", timeout=None)
        self._level = 0

    def check_ready(self) -> None:
        """Refuses a reader whose engines cannot answer.

        Raises:
            CollectorError: if they sleep.
        """
        if self._level:
            raise CollectorError("the collector's engines sleep: call wake_up() before it is read")

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
