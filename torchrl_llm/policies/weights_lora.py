"""LoRA adapters of a ``vllm.LLM``: a ``peft`` folder is swapped in, the base model stays as it is.

The adapter is loaded in place under one and the same id, so that requests in the engine go on with the new one between
two tokens. The first adapter is different: requests that began without one begin again with it. Whole weights take the
adapter off: what began with it begins again without.

Runs in the engine's thread, apart from the checks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from torchrl_llm.weight_forms import Weights
from torchrl_llm.weight_spec import WeightSpec, first_of

ADAPTER_ID = 1
ADAPTER_NAME = "torchrl_llm"
_BASE = "base_model.model."


def check_adapter(weights: Weights, spec: WeightSpec, llm: Any) -> None:
    """Checks an adapter against the engine.

    Raises:
        ValueError: if the engine takes no adapters, or not this one; the first mismatches are listed.
    """
    lora = llm.llm_engine.vllm_config.lora_config
    if lora is None:
        raise ValueError(
            f"weights={weights.folder!r} is a LoRA adapter, and the engine takes none: build it with enable_lora=True"
        )
    assert weights.folder is not None
    rank = json.loads((Path(weights.folder) / "adapter_config.json").read_text())["r"]
    if rank > lora.max_lora_rank:
        raise ValueError(
            f"weights={weights.folder!r} has rank {rank}; the engine's max_lora_rank is {lora.max_lora_rank}"
        )
    problems = [problem for name, tensor in weights.tensors.items() if (problem := _mismatch(name, tensor, spec))]
    if problems:
        raise ValueError("the adapter does not fit the policy, which keeps its old weights: " + first_of(problems))


def _mismatch(name: str, tensor: torch.Tensor, spec: WeightSpec) -> str | None:
    module, _, kind = name.removeprefix(_BASE).rpartition(".lora_")
    base = spec.tensors.get(f"{module}.weight")
    if base is None or not name.startswith(_BASE):
        return f"{name!r} adapts nothing that the policy has"
    if kind not in ("A.weight", "B.weight"):
        return f"{name!r} is neither a lora_A nor a lora_B weight"
    wanted = base[0][1] if kind == "A.weight" else base[0][0]
    side = 1 if kind == "A.weight" else 0
    if tensor.dim() != 2 or tensor.shape[side] != wanted:
        return f"{name!r} has shape {tuple(tensor.shape)}; dimension {side} must be {wanted}"
    return None


def load_adapter(engine: Any, folder: str) -> Any:
    """Loads an adapter in place of the last one; returns the ``LoRARequest`` that requests need to use it."""
    from vllm.lora.request import LoRARequest

    engine.add_lora(LoRARequest(ADAPTER_NAME, ADAPTER_ID, folder, load_inplace=True))
    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, folder)


def remove_adapter(engine: Any) -> None:
    """Removes what :func:`load_adapter` has loaded."""
    engine.remove_lora(ADAPTER_ID)
