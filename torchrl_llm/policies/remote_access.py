"""How a remote engine is reached: torchrl's ``AsyncVLLM`` through its methods, a Ray actor through a few of its own.

An ``AsyncVLLM`` is a set of replicas, each a Ray actor with a vLLM ``AsyncLLM``. Its own ``update_weights`` puts the
replicas to sleep at level 0, which ends what is in flight with the tokens made so far, and wakes them up afterwards;
:meth:`AsyncVLLMAccess.interrupt` and :meth:`~AsyncVLLMAccess.resume` do the same.

A Ray actor of the user's own, or what forwards to one, needs::

    generate(prompts, sampling_params=...) -> list[vllm.RequestOutput]    # several calls at a time, if it can

and for weight updates both of these, which ``vllm.LLM`` and ``AsyncLLM`` have::

    collective_rpc(method, timeout, args, kwargs)
    reset_prefix_cache(reset_running_requests=True) -> bool

or, if it lacks one of them (vLLM's own ``update_weights`` is something else)::

    update_weights(weights)  # a list of (name, tensor); forgets what the old ones have left in caches

It may have ``get_model_metadata() -> {name: (dtype, shape)}``, as torchrl's engines have it: what weights are checked
against. A vLLM engine in an actor is asked for its configuration.

Used by the engine's thread, and by the thread that stages an update.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, Protocol

import torch
import torchrl

from torchrl_llm.policies.weights_vllm_reload import must_repack, pack_output_heads, spec_of_config
from torchrl_llm.weight_spec import WeightSpec

logger = logging.getLogger("torchrl_llm")

# How long a replica may take to say what it is; it does that between two steps.
DESCRIBE_SECONDS = 60.0


class Access(Protocol):
    """The ways to a remote engine.

    ``name`` says what it is, for messages; ``interruptible`` whether what is in flight can be stopped with the tokens
    made so far.
    """

    name: str
    interruptible: bool

    def start(self, prompt: list[int], params: Any) -> Any:
        """Starts a call; returns the Ray reference of its result."""

    def cancel(self, ref: Any) -> None:
        """Asks for the end of a call. A reference that is done stays as it is."""

    def interrupt(self) -> None:
        """Pauses the engine; what is in flight is answered with the finish reason ``"abort"``."""

    def resume(self) -> None:
        """Ends the pause."""

    def was_cancelled(self, error: BaseException | None) -> bool:
        """Whether a call ended because of :meth:`cancel`."""

    def tells_of_death(self, error: BaseException | None) -> bool:
        """Whether a call failed because the engine is no more."""

    def longest_prompt(self) -> int | None:
        """Tokens that leave room for a response; ``None`` if the engine does not tell."""

    def spec(self) -> WeightSpec | None:
        """The weights that the engine takes; ``None`` if it does not tell."""

    def nodes(self) -> set[str]:
        """The Ray nodes where its weights are read from files, as far as they are known."""

    def methods(self) -> list[str]:
        """The ways to give it weights, the best first: ``"update_weights"``, ``"reload_weights"``."""

    def stage_weights(self, weights: list[tuple[str, torch.Tensor]]) -> Any:
        """Prepares tensors for :meth:`update_weights`."""

    def update_weights(self, staged: Any) -> None:
        """Gives it tensors; it forgets what its caches have of the old ones."""

    def reload_weights(self, folder: str) -> None:
        """Lets it read a folder of safetensors, and empties its prefix cache."""

    def forget_old_weights(self) -> None:
        """Empties its prefix cache, as far as it has one."""


class _RayCalls:
    """What is the same for every engine behind Ray."""

    def cancel(self, ref: Any) -> None:
        """See :class:`Access`."""
        import ray

        if ray.is_initialized():
            ray.cancel(ref)

    def was_cancelled(self, error: BaseException | None) -> bool:
        """See :class:`Access`."""
        from ray.exceptions import TaskCancelledError

        return isinstance(error, TaskCancelledError)

    def tells_of_death(self, error: BaseException | None) -> bool:
        """See :class:`Access`."""
        from ray.exceptions import RayActorError
        from vllm.v1.engine.exceptions import EngineDeadError

        return isinstance(error, (RayActorError, EngineDeadError))


class AsyncVLLMAccess(_RayCalls):
    """The replicas of torchrl's ``AsyncVLLM``.

    Args:
        model: the service; it has been launched.
    """

    name = "AsyncVLLM"
    interruptible = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._facts: dict[str, Any] | None = None
        self._warned = False
        self._repack = False

    def start(self, prompt: list[int], params: Any) -> Any:
        """See :class:`Access`. The replica is chosen by the service's load balancer."""
        if not self._model.actors:
            raise RuntimeError("AsyncVLLM has no replicas: it was shut down, or was never launched")
        from vllm import TokensPrompt

        return self._model._generate_impl(TokensPrompt(prompt_token_ids=prompt), params)

    def interrupt(self) -> None:
        """See :class:`Access`."""
        self._on_all("sleep", level=0)
        # Whatever it had answered until then has gone out when each answers once more.
        self._on_all("get_num_unfinished_requests")

    def resume(self) -> None:
        """See :class:`Access`."""
        self._on_all("wake_up", tags=["scheduling"])

    def longest_prompt(self) -> int | None:
        """See :class:`Access`."""
        context = self._model.engine_args.max_model_len
        if not isinstance(context, int) or context < 1:  # "auto", or by the model
            context = self._describe()["max_model_len"]
        return int(context) - 1

    def spec(self) -> WeightSpec:
        """See :class:`Access`."""
        facts = self._describe()
        spec = spec_of_config(facts["hf_config"], facts["dtype"])
        self._repack = must_repack(spec, facts["on_cpu"], facts["functions"])
        return spec

    def nodes(self) -> set[str]:
        """See :class:`Access`."""
        return {node for actor in self._model.actors if (node := node_of(actor)) is not None}

    def methods(self) -> list[str]:
        """See :class:`Access`. ``update_weights`` once ``init_weight_update_group`` has been called."""
        if getattr(self._model, "_trainer_nccl_group", None) is None:
            return ["reload_weights"]
        if not torchrl_fits_vllm():
            if not self._warned:
                self._warned = True
                import vllm

                versions = torchrl.__version__, vllm.__version__
                logger.warning("torchrl %s's AsyncVLLM.update_weights cannot use vllm %s: files are used", *versions)
            return ["reload_weights"]
        return ["update_weights", "reload_weights"]

    def stage_weights(self, weights: list[tuple[str, torch.Tensor]]) -> Any:
        """See :class:`Access`. They are sent from where they are."""
        return weights

    def update_weights(self, staged: Any) -> None:
        """See :class:`Access`. Over NCCL, by torchrl, which empties the prefix caches, too."""
        self._model.update_weights(iter(staged))

    def reload_weights(self, folder: str) -> None:
        """See :class:`Access`."""
        if self._model.engine_args.load_format == "dummy":
            self._get(self._model.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},)))
        self._get(self._model.collective_rpc("reload_weights", kwargs={"weights_path": folder}))
        if self._repack:
            self._get(self._model.collective_rpc(pack_output_heads))
        self.forget_old_weights()

    def forget_old_weights(self) -> None:
        """See :class:`Access`."""
        if not all(done is not False for done in self._on_all("reset_prefix_cache")):
            raise RuntimeError("a replica of AsyncVLLM did not reset its prefix cache: others use it, too")

    def _describe(self) -> dict[str, Any]:
        """What the first replica knows of its model."""
        if self._facts is None:
            self._facts = describe(self._model.actors[0])
        assert self._facts is not None, "a replica of AsyncVLLM holds a vLLM engine"
        return self._facts

    def _on_all(self, method: str, **arguments: Any) -> list[Any]:
        return self._get([getattr(actor, method).remote(**arguments) for actor in self._model.actors])

    @staticmethod
    def _get(refs: list[Any]) -> list[Any]:
        import ray

        return ray.get(refs)


class ActorAccess(_RayCalls):
    """A Ray actor of the user's own; see the module for the methods that it may have.

    Args:
        model: has the actor's methods as attributes.
    """

    name = "Ray actor"
    interruptible = False

    def __init__(self, model: Any) -> None:
        self._model = model
        self._repack = False

    def start(self, prompt: list[int], params: Any) -> Any:
        """See :class:`Access`."""
        from vllm import TokensPrompt

        return self._model.generate.remote([TokensPrompt(prompt_token_ids=prompt)], sampling_params=params)

    def interrupt(self) -> None:
        """It cannot be."""

    def resume(self) -> None:
        """It never pauses."""

    def longest_prompt(self) -> int | None:
        """See :class:`Access`."""
        context = getattr(getattr(self._model, "engine_args", None), "max_model_len", None)
        return context - 1 if isinstance(context, int) else None

    def spec(self) -> WeightSpec | None:
        """See :class:`Access`."""
        if hasattr(self._model, "get_model_metadata"):
            metadata = self._call("get_model_metadata")
            return WeightSpec({name: (shape, dtype) for name, (dtype, shape) in metadata.items()})
        facts = describe(self._model)
        if facts is None:
            return None
        spec = spec_of_config(facts["hf_config"], facts["dtype"])
        self._repack = must_repack(spec, facts["on_cpu"], facts["functions"])
        return spec

    def nodes(self) -> set[str]:
        """See :class:`Access`."""
        node = node_of(self._model)
        return set() if node is None else {node}

    def methods(self) -> list[str]:
        """See :class:`Access`."""
        has_rpc = hasattr(self._model, "collective_rpc") and hasattr(self._model, "reset_prefix_cache")
        found = ["reload_weights"] if has_rpc else []
        return [*found, "update_weights"] if hasattr(self._model, "update_weights") else found

    def stage_weights(self, weights: list[tuple[str, torch.Tensor]]) -> Any:
        """See :class:`Access`. They go into Ray's object store."""
        import ray

        return ray.put([(name, tensor.cpu()) for name, tensor in weights])

    def update_weights(self, staged: Any) -> None:
        """See :class:`Access`."""
        self._call("update_weights", staged)

    def reload_weights(self, folder: str) -> None:
        """See :class:`Access`."""
        self._call("collective_rpc", "reload_weights", None, (), {"weights_path": folder})
        if self._repack:
            self._call("collective_rpc", pack_output_heads, None, (), {})
        self.forget_old_weights()

    def forget_old_weights(self) -> None:
        """See :class:`Access`."""
        if not hasattr(self._model, "reset_prefix_cache"):
            return
        if self._call("reset_prefix_cache", reset_running_requests=True) is False:
            raise RuntimeError("the actor did not reset its prefix cache")

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        import ray

        return ray.get(getattr(self._model, method).remote(*arguments, **named))


def make_access(model: Any) -> Access:
    """The way to a ``vLLMWrapper``'s remote model."""
    if type(model).__name__ == "AsyncVLLM" and type(model).__module__.startswith("torchrl."):
        return AsyncVLLMAccess(model)
    return ActorAccess(model)


def torchrl_fits_vllm() -> bool:
    """Whether torchrl's ``AsyncVLLM.update_weights`` finds what it uses of vLLM, which has changed since.

    If it did not, it would fail after it has put the engines to sleep, or wait for workers that do not listen.
    """
    from vllm.distributed.weight_transfer import nccl_engine
    from vllm.v1.engine.async_llm import AsyncLLM

    begin = getattr(AsyncLLM, "start_weight_update", None)
    takes = begin is None or "is_checkpoint_format" in inspect.signature(begin).parameters
    return takes and hasattr(nccl_engine, "NCCLTrainerSendWeightsArgs")


def describe(actor: Any) -> dict[str, Any] | None:
    """What the vLLM engine in an actor says of itself; ``None`` if there is none to be found."""
    import ray

    def look(found: Any) -> dict[str, Any] | None:  # Sent to the actor by value: it needs no package of ours.
        for name in ("llm_engine", "engine"):
            found = getattr(found, name, found)
        config = getattr(found, "model_config", None)
        if config is None:
            return None
        from vllm import envs
        from vllm.platforms import current_platform

        in_process = type(getattr(found, "model_executor", None)).__name__ == "UniProcExecutor"
        return {name: getattr(config, name) for name in ("hf_config", "dtype", "max_model_len")} | {
            "on_cpu": bool(current_platform.is_cpu()),
            "functions": in_process or bool(envs.VLLM_ALLOW_INSECURE_SERIALIZATION),
        }

    if not hasattr(actor, "__ray_call__"):
        return None
    facts: dict[str, Any] | None = ray.get(actor.__ray_call__.remote(look), timeout=DESCRIBE_SECONDS)
    return facts


def node_of(actor: Any) -> str | None:
    """The Ray node of an actor; ``None`` if it cannot be asked."""
    import ray

    if not hasattr(actor, "__ray_call__"):
        return None
    found = actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
    return str(ray.get(found, timeout=DESCRIBE_SECONDS))
