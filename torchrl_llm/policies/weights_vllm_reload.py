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
from torchrl_llm.policies.weights_lora import check_adapter, load_adapter, remove_adapter
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
        self._begin_anew = False

    @property
    def gone(self) -> bool:
        """See :class:`WeightTarget`."""
        return self.owner.dead is not None or self.owner.closed

    def stage(self, weights: Weights) -> Switch:
        """See :class:`WeightTarget`."""
        spec = spec_of_engine(self._llm)
        if weights.adapter:
            check_adapter(weights, spec, self._llm)
            self._begin_anew |= self.owner.adapter is None
            return lambda version: self._swap_adapter(weights.folder, version)
        new = spec.match(weights.tensors)
        new = {name: tensor for name, tensor in new.items() if name not in spec.tied}
        self._begin_anew |= self.owner.adapter is not None
        engine = self._llm.llm_engine
        repack = must_repack(spec, packs_on_cpu(), takes_functions(engine))
        if shares_memory(engine):
            arguments: dict[str, Any] = {"weights_iterator": list(new.items())}
        else:
            arguments = {"weights_path": weights.own_folder(new) or weights.as_folder(new)}

        def switch(version: int) -> None:
            if "weights_path" in arguments and engine.vllm_config.load_config.load_format == "dummy":
                engine.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
            engine.collective_rpc("reload_weights", kwargs=arguments)
            if repack:
                engine.collective_rpc(pack_output_heads)
            if self.owner.adapter is not None:
                # It was trained over the old weights.
                self.owner.adapter = None
                remove_adapter(engine)
            self.refreshed(version)

        return switch

    def _swap_adapter(self, folder: str | None, version: int) -> None:
        assert folder is not None
        self.owner.adapter = load_adapter(self._llm.llm_engine, folder)
        self.refreshed(version)

    def refreshed(self, version: int) -> None:
        """The engine's weights have been changed: empties its caches, and notes the version."""
        forget_old_weights(self._llm.llm_engine)
        self.owner.switched(version)

    def hold(self, mode: str) -> Hold:
        """See :class:`WeightTarget`."""
        # A request keeps the adapter with which it began, or goes on without one if it began with none.
        return self.owner.hold("restart" if self._begin_anew and mode == "continue" else mode)

    def sleep(self, level: int) -> None:
        """Puts the engine to sleep with the requests that are in it; in its thread."""
        self._llm.sleep(level=level, mode="keep")

    def wake_up(self) -> None:
        """Wakes the engine; in its thread."""
        self._llm.wake_up()

    @property
    def engine(self) -> Any:
        """The ``vllm.LLM``."""
        return self._llm

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


def must_repack(spec: WeightSpec, on_cpu: bool, functions: bool) -> bool:
    """Whether a reload leaves old weights in a packed output head.

    Args:
        spec: the engine's weights.
        on_cpu: whether it keeps packed copies of them.
        functions: whether a function can be sent to its workers.

    Raises:
        ValueError: if it does, and nothing can be done about it.
    """
    if not (spec.tied and on_cpu):
        return False
    if not functions:
        raise ValueError(
            "the engine runs on CPU in its own process, where vLLM keeps a packed copy of a tied output head that a "
            "reload leaves as it was: build the engine in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), or with "
            "VLLM_ALLOW_INSECURE_SERIALIZATION=1, which lets it be packed anew"
        )
    return True


def packs_on_cpu() -> bool:
    """Whether engines keep packed copies of their weights, as vLLM does on CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def takes_functions(engine: Any) -> bool:
    """Whether a function can be sent to the engine's workers."""
    from vllm import envs

    return shares_memory(engine) or bool(envs.VLLM_ALLOW_INSECURE_SERIALIZATION)


def pack_output_heads(worker: Any) -> None:
    """In a vLLM worker on CPU: packs output heads anew.

    A reload packs what it loads. A tied output head loads nothing, and would go on with the old weights (vLLM 0.32).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in worker.get_model().modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


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
