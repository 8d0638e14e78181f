"""Weights of a policy in this process: ``TransformersWrapper``, any other ``nn.Module``, or a callable that has none.

The new weights are copied into the module's own tensors by the runner's thread, between two calls of the policy, so
that "continue", "wait" and "restart" mean the same to a policy that is called on batches: a call that is under way is
finished with the weights with which it began. Runners of several collectors may have one module: they rest and switch
together, whichever collector updates, and share the version of its weights.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrl_llm.policies.hold import Hold
from torchrl_llm.policies.weight_target import Switch
from torchrl_llm.weight_forms import Weights, module_of
from torchrl_llm.weight_spec import spec_of_module

if TYPE_CHECKING:
    from torchrl_llm.policies.batched import BatchedRunner

_runners: weakref.WeakSet[BatchedRunner] = weakref.WeakSet()
_lock = threading.Lock()


def enlist(runner: BatchedRunner) -> int:
    """Notes that a runner has its policy's module; returns the version of the weights by those that have it already."""
    with _lock:
        others = _with_the_module_of(runner.policy)
        _runners.add(runner)
    return max((other.version for other, _ in others), default=0)


def _with_the_module_of(policy: Any) -> list[tuple[BatchedRunner, nn.Module]]:
    """The open runners of a policy's module, with their policies; for a thread that holds the lock."""
    if not isinstance(policy, nn.Module):
        return []
    found = [(runner, runner.policy) for runner in _runners]
    module = module_of(policy)
    return [(runner, own) for runner, own in found if isinstance(own, nn.Module) and module_of(own) is module]


class BatchedTarget:
    """A batched runner's callable that is no module: only a transport of the user's knows its weights.

    Args:
        runner: runs the callable.
        policy: the callable.
    """

    def __init__(self, runner: BatchedRunner, policy: Any) -> None:
        self.owner = runner
        self.name = type(policy).__name__

    @property
    def gone(self) -> bool:
        """See :class:`WeightTarget`."""
        return self.owner.broken or self.owner.policy is None

    def stage(self, weights: Weights) -> Switch:
        """See :class:`WeightTarget`."""
        raise TypeError(f"the policy is a {self.name} without weights that can be updated")

    def refreshed(self, version: int) -> None:
        """See :class:`WeightTarget`."""
        self.owner.version = version

    def hold(self, mode: str) -> Hold:
        """See :class:`WeightTarget`."""
        return self.owner.hold(mode)

    def fail(self, error: Exception) -> None:
        """See :class:`WeightTarget`."""
        self.owner.fail(error)

    def dispose(self) -> None:
        """Nothing was made."""


class ModuleTarget(BatchedTarget):
    """The weights of a batched runner's module.

    Args:
        runner: owns the module.
        policy: the runner's policy.
    """

    def __init__(self, runner: BatchedRunner, policy: nn.Module) -> None:
        super().__init__(runner, policy)
        self._module = module_of(policy)

    def all_with_the_module(self) -> list[ModuleTarget]:
        """The targets of all runners that have the module, of other collectors too."""
        with _lock:
            return [ModuleTarget(*found) for found in _with_the_module_of(self._module)]

    def stage(self, weights: Weights) -> Switch:
        """See :class:`WeightTarget`."""
        weights.check_whole(self.name)
        new = spec_of_module(self._module).match(weights.tensors)
        own = self._module.state_dict(keep_vars=True)

        def switch(version: int) -> None:
            with torch.no_grad():
                for name, tensor in new.items():
                    own[name].copy_(tensor)
            self.refreshed(version)

        return switch
