"""Weights of a ``vllm.LLM``, through the engine's own ``reload_weights``: on CPU and GPU, in process and in its own.

An engine in this process with one worker takes the tensors themselves. Any other reads them from a safetensors file in
shared memory, which lives as long as the update. ``reload_weights`` takes the names of the Hugging Face checkpoint and
fuses q/k/v and gate/up itself; what is passed is checked against the names and shapes of the ``transformers`` model of
the engine's configuration first, since a load that fails half way would leave the engine with mixed weights.

The prefix cache is emptied with the switch. The requests in the engine are put back into its queue with the tokens that
they have, and their keys and values are computed anew: what follows is what the new weights make of the whole text.

Everything but the checks runs in the engine's thread.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from torchrl_llm.policies.engine import EngineThread
from torchrl_llm.policies.hold import Hold
from torchrl_llm.policies.weight_target import Switch
from torchrl_llm.weight_forms import Weights
from torchrl_llm.weight_spec import WeightSpec, spec_of_module

_specs: weakref.WeakKeyDictionary[Any, WeightSpec] = weakref.WeakKeyDictionary()


class ReloadTarget:
    """The weights of a ``vllm.LLM``.

    Args:
        llm: the engine.
        thread: the thread that runs it.
    """

    name = "vllm.LLM"

    def __init__(self, llm: Any, thread: EngineThread) -> None:
        self.owner = thread
        self._llm = llm

    @property
    def gone(self) -> bool:
        """See :class:`WeightTarget`."""
        return self.owner.dead is not None or self.owner.closed

    def stage(self, weights: Weights) -> Switch:
        """See :class:`WeightTarget`."""
        spec = spec_of_engine(self._llm)
        new = spec.match(weights.tensors)
        new = {name: tensor for name, tensor in new.items() if name not in spec.tied}
        engine = self._llm.llm_engine
        if shares_memory(engine):
            arguments: dict[str, Any] = {"weights_iterator": list(new.items())}
        else:
            arguments = {"weights_path": weights.folder or weights.as_folder(new)}

        def switch(version: int) -> None:
            if "weights_path" in arguments and engine.vllm_config.load_config.load_format == "dummy":
                engine.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
            engine.collective_rpc("reload_weights", kwargs=arguments)
            forget_old_weights(engine)
            self.owner.switched(version)

        return switch

    def hold(self, mode: str) -> Hold:
        """See :class:`WeightTarget`."""
        return self.owner.hold(mode)

    def fail(self, error: Exception) -> None:
        """See :class:`WeightTarget`."""
        self.owner.fail(error)

    def dispose(self) -> None:
        """The files belong to the weights."""


def shares_memory(engine: Any) -> bool:
    """Whether the engine and its one worker run in this process, so that tensors can be handed over as they are."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    # Exactly this class: its subclasses may have more workers.
    return type(getattr(engine, "model_executor", None)) is UniProcExecutor


def forget_old_weights(engine: Any) -> None:
    """Empties the caches that old weights have filled; requests in the engine go on from the tokens that they have.

    Raises:
        RuntimeError: if the prefix cache could not be emptied.
    """
    if not engine.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("vLLM did not reset its prefix cache")
    if getattr(engine.model_config, "is_multimodal_model", False):
        engine.reset_encoder_cache()


def spec_of_engine(llm: Any) -> WeightSpec:
    """The weights that an engine takes: those of the ``transformers`` model of its configuration, by its dtype."""
    if llm not in _specs:
        config = llm.llm_engine.model_config
        _specs[llm] = spec_of_config(config.hf_config, config.dtype)
    return _specs[llm]


def spec_of_config(hf_config: Any, dtype: torch.dtype) -> WeightSpec:
    """The weights of the ``transformers`` model of a configuration, in a dtype."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    return spec_of_module(model, dtype=dtype)
