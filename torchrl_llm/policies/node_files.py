"""Safetensors files on the machines of a Ray cluster that have an engine, for as long as an update takes.

The updating thread's own machine has them from :meth:`Weights.as_folder`; the others get the tensors through Ray's
object store, once each, and write them into their own shared memory, under the same path.

Run by the thread that updates. The package must be installed on the other machines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from torchrl_llm.weight_forms import Weights


class NodeFiles:
    """A folder that lies under one path on several Ray nodes.

    Args:
        nodes: their ids.
    """

    def __init__(self, nodes: set[str]) -> None:
        import ray

        self._others = sorted(nodes - {ray.get_runtime_context().get_node_id()})
        self._written: str | None = None

    def place(self, weights: Weights, tensors: dict[str, torch.Tensor]) -> str:
        """The path of a folder with ``tensors`` that every node sees.

        Args:
            weights: what they are of; its own folder is used if it has these names and every node sees it.
            tensors: by the names of the checkpoint.
        """
        own = weights.own_folder(tensors)
        if own is not None and all(self._on_others(lambda path: os.path.isdir(path), own)):
            return own
        folder = weights.as_folder(tensors)
        if self._others:
            import ray

            self._written = folder
            self._on_others(_write, folder, ray.put({name: tensor.cpu() for name, tensor in tensors.items()}))
        return folder

    def remove(self) -> None:
        """Removes what was written on other nodes."""
        if self._written is not None:
            self._on_others(_remove, self._written)
            self._written = None

    def _on_others(self, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Runs a task on each of the other nodes."""
        if not self._others:
            return []
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = ray.remote(num_cpus=0)(task)
        places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in self._others]
        return ray.get([remote.options(scheduling_strategy=place).remote(*arguments) for place in places])


def _write(folder: str, tensors: dict[str, torch.Tensor]) -> None:
    """On another node: writes the folder, unless the node is the same machine and has it."""
    from torchrl_llm.weight_files import write_safetensors

    try:
        os.mkdir(folder)
    except FileExistsError:
        return
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
