"""A rollout collector for LLM reinforcement learning, native to TorchRL."""

from __future__ import annotations

from torchrl_llm.batches import split_trajectories
from torchrl_llm.collector import LLMCollector
from torchrl_llm.errors import CollectorError, EnvError, PolicyError, PromptsExhausted, WorkerError
from torchrl_llm.policies.options import RunnerOptions

__all__ = [
    "CollectorError",
    "EnvError",
    "LLMCollector",
    "PolicyError",
    "PromptsExhausted",
    "RunnerOptions",
    "WorkerError",
    "split_trajectories",
]
