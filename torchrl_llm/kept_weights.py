"""The newest weights of a collector, for policies that are rebuilt.

A copy of what was switched, since the trainer goes on changing its own; of a LoRA adapter its files, and the base
weights beside it. What a transport of the user's brought cannot be copied: kept is what it was called with.

Invariant: immutable, so that an update which is refused or fails leaves what is kept as it was. Used under the update
lock of :mod:`torchrl_llm.weights`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torchrl_llm.errors import PolicyError
from torchrl_llm.weight_forms import Weights, read_weights

Sent = tuple[Any, Mapping[str, Any]]


@dataclass(frozen=True)
class KeptWeights:
    """What a policy that is rebuilt needs, to have the newest weights.

    Args:
        whole: the model's, on the CPU; ``None`` if they are those of its constructor.
        adapter: the files of a LoRA adapter over them, by name.
        sent: what the user's transport was called with: weights and arguments, by the parts that they are for.

    Examples:
        >>> mine = {"w": torch.zeros(1)}
        >>> kept = KeptWeights().followed_by(Weights(mine))
        >>> mine["w"] += 1
        >>> with kept.parts() as [copy]:
        ...     print(copy.tensors)
        {'w': tensor([0.])}
    """

    whole: Weights | None = None
    adapter: Mapping[str, bytes] | None = None
    sent: Mapping[str, Sent] = field(default_factory=dict)

    def followed_by(self, weights: Weights) -> KeptWeights:
        """With a copy of ``weights``, in memory of its own: a switch to them may still fail."""
        if weights.adapter:
            assert weights.folder is not None
            folder = Path(weights.folder)
            files = [folder / "adapter_config.json", *folder.glob("*.safetensors")]
            return replace(self, adapter={file.name: file.read_bytes() for file in files})
        copy = {name: torch.empty_like(t, device="cpu").copy_(t) for name, t in weights.tensors.items()}
        return replace(self, whole=Weights(copy), adapter=None)

    def sent_by(self, source: Any, arguments: Mapping[str, Any]) -> KeptWeights:
        """With what the user's transport is called with, in place of what was for the same models and workers."""
        models = sorted(arguments.get("weights_dict") or ()) or arguments.get("model_id")
        part = repr((models, arguments.get("worker_ids")))
        others = {key: sent for key, sent in self.sent.items() if key != part}
        return replace(self, sent=others | {part: (source, arguments)})

    @contextlib.contextmanager
    def parts(self) -> Iterator[list[Weights]]:
        """The weights, in the order in which a policy takes them; the files that they need live as long as this."""
        whole = [] if self.whole is None else [self.whole]
        try:
            if self.adapter is None:
                yield whole
                return
            with tempfile.TemporaryDirectory(prefix="torchrl_llm-adapter-") as folder:
                for name, content in self.adapter.items():
                    (Path(folder) / name).write_bytes(content)
                yield [*whole, read_weights(folder)]
        finally:
            for weights in whole:
                weights.dispose()

    def to_send_again(self) -> list[Sent]:
        """What the user's transport is to be called with again.

        Raises:
            PolicyError: if that was an iterator, which it has used up.
        """
        for source, arguments in self.sent.values():
            given = [source, *(arguments.get("weights_dict") or {}).values()]
            if any(isinstance(one, Iterator) for one in given):
                raise PolicyError(
                    "the newest weights were passed as an iterator, which the collector's transport has used up, so "
                    "that a policy that is rebuilt cannot have them: pass a module or a state dict"
                )
        return list(self.sent.values())
