"""A rollout collector for LLM reinforcement learning, native to TorchRL.

The public names are loaded when they are first used: ``import torchrl_llm`` imports neither torchrl's collectors nor,
through them, vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_llm.batches import split_trajectories
    from torchrl_llm.collector import LLMCollector
    from torchrl_llm.errors import CollectorError, EnvError, PolicyError, PromptsExhausted, WorkerError
    from torchrl_llm.policies.options import RunnerOptions
    from torchrl_llm.weight_transports import VLLMTransfer

__all__ = [
    "CollectorError",
    "EnvError",
    "LLMCollector",
    "PolicyError",
    "PromptsExhausted",
    "RunnerOptions",
    "VLLMTransfer",
    "WorkerError",
    "split_trajectories",
]

_MODULES = {
    "CollectorError": "errors",
    "EnvError": "errors",
    "LLMCollector": "collector",
    "PolicyError": "errors",
    "PromptsExhausted": "errors",
    "RunnerOptions": "policies.options",
    "VLLMTransfer": "weight_transports",
    "WorkerError": "errors",
    "split_trajectories": "batches",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'torchrl_llm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"torchrl_llm.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
