"""Weights that the user's own transport brings to the engines: TorchRL's objects, and vLLM's weight transfer.

The collector does what only it can do: it lets all its policies rest, calls the transport, empties the prefix caches,
counts the version, and lets the policies go on. What the transport sends is not checked; if it raises, nobody knows
what the engines hold, so that they are given up.

A transport is called in the thread that updates, while the threads that own the engines rest; it may call the engines.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.weight_update.weight_sync_schemes import WeightSyncScheme


class Transport(Protocol):
    """Brings weights to all policies of a collector."""

    def check(self, weights: Any, arguments: Mapping[str, Any]) -> None:
        """Refuses arguments that mean nothing here, before anything rests. Raises ``ValueError`` or ``KeyError``."""

    def send(self, weights: Any, arguments: Mapping[str, Any]) -> None:
        """Sends what ``update_policy_weights_`` was given; returns when the policies have it.

        Args:
            weights: its weights, untouched; ``None`` if it was called without.
            arguments: its other arguments, as TorchRL's collectors take them (``worker_ids``, ``model_id``,
                ``weights_dict``).
        """


class UpdaterTransport:
    """TorchRL's ``WeightUpdaterBase``, called as TorchRL's collectors call it.

    Args:
        updater: the updater, or a constructor of one.
        collector: where it is registered.
    """

    def __init__(self, updater: Any, collector: Any) -> None:
        if not isinstance(updater, WeightUpdaterBase):
            updater = updater()
        if not isinstance(updater, WeightUpdaterBase):
            raise TypeError(
                f"weight_updater gave {type(updater).__name__}: pass a WeightUpdaterBase or a constructor of one"
            )
        updater.register_collector(collector)
        self.updater = updater

    def check(self, weights: Any, arguments: Mapping[str, Any]) -> None:
        """See :class:`Transport`."""
        for name in ("model_id", "weights_dict"):
            if arguments.get(name) is not None:
                raise ValueError(f"{name}={arguments[name]!r} is not allowed with weight_updater=")

    def send(self, weights: Any, arguments: Mapping[str, Any]) -> None:
        """See :class:`Transport`."""
        self.updater(policy_or_weights=weights, worker_ids=arguments.get("worker_ids"))


class SchemeTransport:
    """TorchRL's ``WeightSyncScheme`` objects by model id, called as TorchRL's collectors call them.

    Args:
        schemes: model id -> scheme.
        collector: their context.
    """

    def __init__(self, schemes: Any, collector: Any) -> None:
        is_mapping = isinstance(schemes, Mapping)
        if not is_mapping or not schemes or not all(isinstance(s, WeightSyncScheme) for s in schemes.values()):
            raise TypeError(f"weight_sync_schemes={schemes!r} is not allowed: pass a dict model_id -> WeightSyncScheme")
        self.schemes = dict(schemes)
        for model_id, scheme in self.schemes.items():
            if not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=model_id, context=collector)
            if not scheme.synchronized_on_sender:
                scheme.connect()

    def check(self, weights: Any, arguments: Mapping[str, Any]) -> None:
        """See :class:`Transport`."""
        given = arguments.get("weights_dict")
        if given is not None and (weights is not None or arguments.get("model_id") is not None):
            raise ValueError("weights_dict= is not allowed together with other weights or with model_id=")
        unknown = [model_id for model_id in self._by_model(weights, arguments) if model_id not in self.schemes]
        if unknown:
            raise KeyError(f"no weight_sync_schemes for {unknown}; there are {list(self.schemes)}")

    def _by_model(self, weights: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        given = arguments.get("weights_dict")
        return given if given is not None else {arguments.get("model_id") or "policy": weights}

    def send(self, weights: Any, arguments: Mapping[str, Any]) -> None:
        """See :class:`Transport`."""
        for model_id, model_weights in self._by_model(weights, arguments).items():
            self.schemes[model_id].send(weights=model_weights, worker_ids=arguments.get("worker_ids"))


class VLLMTransfer:
    """vLLM's own weight transfer (``LLM(weight_transfer_config=...)``: NCCL, IPC), as a collector's ``weight_updater``.

    Args:
        make_trainer: called at the first update, and again when an engine has been rebuilt, with a client for all
            engines of the collector; returns vLLM's trainer side, which has ``send_weights()``. The one before it is
            shut down, if it has a ``shutdown()``.

    Examples:
        >>> def make_trainer(client):
        ...     from vllm.distributed.weight_transfer.base import ModuleSource
        ...     from vllm.distributed.weight_transfer import ipc_engine as ipc
        ...
        ...     info, source = ipc.IPCTrainerInitInfo(rank=0), ModuleSource(model)
        ...     return ipc.IPCTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
        >>> updater = VLLMTransfer(make_trainer)  # LLMCollector(..., weight_updater=updater)
    """

    def __init__(self, make_trainer: Callable[[EnginesClient], Any]) -> None:
        self._make_trainer = make_trainer
        self._trainer: Any = None
        self._connected: list[weakref.ref[Any]] = []
        self.engines: list[Any] = []

    def check(self, weights: Any, arguments: Mapping[str, Any]) -> None:
        """See :class:`Transport`."""
        if weights is not None or any(value is not None for value in arguments.values()):
            raise ValueError("vLLM's weight transfer has its own source: call update_policy_weights_() without weights")

    def send(self, weights: Any, arguments: Mapping[str, Any]) -> None:
        """See :class:`Transport`. The trainer side has its own source of weights."""
        engines = [weakref.ref(engine) for engine in self.engines]
        if self._trainer is None or engines != self._connected:
            self._connect()
            self._connected = engines
        self._trainer.send_weights()

    def _connect(self) -> None:
        """Makes the trainer side for the engines that there are now."""
        old, self._trainer = self._trainer, None
        if old is not None and hasattr(old, "shutdown"):
            old.shutdown()
        self._trainer = self._make_trainer(EnginesClient(self.engines))


class EnginesClient:
    """vLLM's ``VLLMWeightSyncClient`` over the ``vllm.LLM`` objects of a collector.

    Args:
        engines: the engines; each gets every call. They are not kept alive: one that died gives its memory back.
    """

    def __init__(self, engines: list[Any]) -> None:
        self._references = [weakref.ref(engine) for engine in engines]

    @property
    def _engines(self) -> list[Any]:
        engines = [reference() for reference in self._references]
        if any(engine is None for engine in engines):
            raise RuntimeError("an engine to which this client was connected is gone")
        return engines

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connects the engines with the trainer."""
        for engine in self._engines:
            engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        """Prepares the engines."""
        for engine in self._engines:
            engine.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Lets the engines receive."""
        for engine in self._engines:
            engine.collective_rpc("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends the update."""
        for engine in self._engines:
            engine.collective_rpc("finish_weight_update")


def make_transport(updater: Any, schemes: Any, collector: Any) -> Transport | None:
    """The transport for the collector's ``weight_updater`` and ``weight_sync_schemes`` arguments.

    Raises:
        TypeError: if one of them is not what it must be.
        ValueError: if both are given.
    """
    if updater is not None and schemes is not None:
        raise ValueError("weight_updater and weight_sync_schemes were both passed; a collector has one of them")
    if schemes is not None:
        return SchemeTransport(schemes, collector)
    if updater is None or isinstance(updater, VLLMTransfer):
        return updater
    if not callable(updater):
        raise TypeError(f"weight_updater={updater!r} is not allowed: pass a WeightUpdaterBase or a constructor of one")
    return UpdaterTransport(updater, collector)
