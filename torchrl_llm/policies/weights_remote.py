"""Weights of a remote engine: torchrl's ``AsyncVLLM``, or a Ray actor that takes weights.

The tensors go over torchrl's ``update_weights`` where it is set up (NCCL, after ``init_weight_update_group``), to a Ray
actor through the object store, and otherwise through a safetensors file in the shared memory of every machine that has
an engine. All replicas of an ``AsyncVLLM`` switch while none of them generates.

Staging runs in the thread that updates, the switch in the engine's.
"""

from __future__ import annotations

from torchrl_llm.errors import PolicyError
from torchrl_llm.policies.hold import Hold
from torchrl_llm.policies.node_files import NodeFiles
from torchrl_llm.policies.remote_engine import RemoteEngine
from torchrl_llm.policies.weight_target import Switch
from torchrl_llm.weight_forms import Weights


class RemoteTarget:
    """The weights of a remote engine.

    Args:
        engine: drives the engine.
        tracks: whether the version of each token must be known.
    """

    def __init__(self, engine: RemoteEngine, tracks: bool) -> None:
        self.owner = engine
        self.name = engine.name
        self._tracks = tracks
        self._files: NodeFiles | None = None

    @property
    def gone(self) -> bool:
        """See :class:`WeightTarget`."""
        return self.owner.dead is not None or self.owner.closed

    def stage(self, weights: Weights) -> Switch:
        """See :class:`WeightTarget`."""
        weights.check_whole(self.name)
        from ray.exceptions import GetTimeoutError, RayError

        try:
            return self._stage(weights)
        except (RayError, GetTimeoutError) as error:
            raise PolicyError(f"{self.name} cannot be prepared for new weights: {error}") from error

    def _stage(self, weights: Weights) -> Switch:
        access = self.owner.access
        ways = access.methods()
        if not ways:
            raise TypeError(
                f"the {self.name} of a policy has no way to take weights: it needs collective_rpc and "
                "reset_prefix_cache, or update_weights"
            )
        way, spec = ways[0], access.spec()
        new = weights.tensors
        if spec is not None:
            new = {name: tensor for name, tensor in spec.match(new).items() if name not in spec.tied}
        if way == "update_weights":
            dtypes = {} if spec is None else {name: dtype for name, (_, dtype) in spec.tensors.items()}
            staged = access.stage_weights([(name, tensor.to(dtypes.get(name))) for name, tensor in new.items()])
        else:
            self._files = NodeFiles(access.nodes())
            staged = self._files.place(weights, new)

        def switch(version: int) -> None:
            if way == "update_weights":
                access.update_weights(staged)
            else:
                access.reload_weights(staged)
            self.owner.switched(version)

        return switch

    def refreshed(self, version: int) -> None:
        """See :class:`WeightTarget`."""
        self.owner.access.forget_old_weights()
        self.owner.switched(version)

    def hold(self, mode: str) -> Hold:
        """See :class:`WeightTarget`.

        Raises:
            ValueError: if tokens are to be told by their versions, and the engine would not tell them.
        """
        if mode == "continue" and self._tracks and not self.owner.access.interruptible:
            raise ValueError(
                f"update_mode='continue' with track_token_versions=True is not allowed for a {self.name}, which does "
                "not tell the tokens that it has made when its weights change: pass update_mode='wait' or 'restart'"
            )
        return self.owner.hold(mode)

    def fail(self, error: Exception) -> None:
        """See :class:`WeightTarget`."""
        self.owner.fail(error)

    def dispose(self) -> None:
        """See :class:`WeightTarget`. The files of this machine belong to the weights."""
        if self._files is not None:
            self._files.remove()
