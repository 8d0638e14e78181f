"""Tells the rollout and its environments that the weights have changed.

Run by the thread that updates, after the switch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrl.envs import TransformedEnv
from torchrl.envs.llm.transforms import PolicyVersion

from torchrl_llm.envs import Slot


def announce_version(version: int, slots: list[Slot], wake: Callable[[None], None]) -> None:
    """Says that the weights have changed: wakes the rollout, and tells TorchRL's ``PolicyVersion`` transforms of it."""
    wake(None)
    for slot in slots:
        for transform in _transforms(slot.env):
            if not isinstance(transform, PolicyVersion):
                continue
            if transform.version_type in (int, "int"):
                transform.version = version
            else:
                transform.increment_version()


def _transforms(env: Any) -> list[Any]:
    """The transforms of an environment, and of those inside it."""
    found: list[Any] = []
    while isinstance(env, TransformedEnv):
        found += getattr(env.transform, "transforms", [env.transform])
        env = env.base_env
    return found
