"""The forms in which weights may be passed -> one internal form, :class:`Weights`.

Pure apart from reading the safetensors files of a folder; run by the thread that updates.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_llm.weight_files import write_folder

ALLOWED = (
    "pass a module, a TensorDict, a state dict, an iterator of (name, tensor), or the path of a folder of safetensors"
)


@dataclass
class Weights:
    """Named tensors, as they were given.

    Args:
        tensors: by name; detached, on whatever device they were.
        folder: where they lie as safetensors files, if a path was passed.
        adapter: whether ``folder`` holds a LoRA adapter (a ``peft`` folder).
        only: whether a loader that is given ``folder`` finds these tensors there and no others.
    """

    tensors: dict[str, torch.Tensor]
    folder: str | None = None
    adapter: bool = False
    only: bool = False
    _files: dict[tuple[str, ...], str] = field(default_factory=dict, repr=False)

    def as_folder(self, named: dict[str, torch.Tensor]) -> str:
        """A folder with ``named`` in one safetensors file, in shared memory; the same for the same names."""
        names = tuple(named)
        if names not in self._files:
            self._files[names] = write_folder(named)
        return self._files[names]

    def own_folder(self, named: dict[str, torch.Tensor]) -> str | None:
        """The folder that was passed, if it has ``named`` under just these names; ``None`` if it is no good for that.

        Args:
            named: what :meth:`WeightSpec.match` made of the tensors: a loader would not find a name that was changed.
        """
        unchanged = all(self.tensors.get(name) is tensor for name, tensor in named.items())
        return self.folder if self.only and unchanged else None

    def check_whole(self, policy: str) -> None:
        """Refuses an adapter, for a policy that takes whole weights only.

        Raises:
            ValueError: if these are one.
        """
        if self.adapter:
            raise ValueError(
                f"weights={self.folder!r} is a LoRA adapter; {policy} takes whole weights: pass the merged model"
            )

    def dispose(self) -> None:
        """Removes what :meth:`as_folder` wrote."""
        while self._files:
            shutil.rmtree(self._files.popitem()[1], ignore_errors=True)


def read_weights(source: Any) -> Weights:
    """The internal form of what was passed to ``update_policy_weights_``.

    Raises:
        TypeError: if it is none of the allowed forms, or holds something else than tensors.
        FileNotFoundError: if it is a path where no safetensors files are.
        ValueError: if a name comes twice, or there are no tensors at all.
    """
    if isinstance(source, Weights):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _from_folder(Path(source))
    if isinstance(source, nn.Module):
        pairs: Iterable[Any] = module_of(source).state_dict().items()
    elif isinstance(source, TensorDictBase):
        pairs = source.flatten_keys(".").items()
    elif isinstance(source, Mapping):
        pairs = source.items()
    elif isinstance(source, Iterable):
        pairs = source
    else:
        raise TypeError(f"weights={type(source).__name__} is not allowed: {ALLOWED}")
    tensors = _named_tensors(pairs)
    if not tensors:
        raise ValueError(f"the weights that were passed hold no tensors: {ALLOWED}")
    return Weights(tensors)


def one_source(*given: Any) -> Any:
    """The weights, which ``update_policy_weights_`` takes under one of several names; ``None`` if under none.

    Raises:
        TypeError: if they were passed under several.
    """
    passed = [value for value in given if value is not None]
    if len(passed) > 1:
        raise TypeError(
            "update_policy_weights_ takes its weights once: positionally, as weights= or as policy=; "
            f"got {len(passed)} of them"
        )
    return passed[0] if passed else None


def module_of(policy: nn.Module) -> nn.Module:
    """The model of a language-model wrapper, whose names are the checkpoint's; any other module itself."""
    model = policy.model if isinstance(policy, LLMWrapperBase) else policy
    return model if isinstance(model, nn.Module) else policy


def _named_tensors(pairs: Iterable[Any]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"the weights hold {type(pair).__name__} where (name, tensor) is needed: {ALLOWED}")
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"the weights hold ({name!r}, {type(tensor).__name__}) where (name, tensor) is needed: {ALLOWED}"
            )
        if name in tensors:
            raise ValueError(f"the weights hold the name {name!r} twice")
        tensors[name] = tensor.detach()
    return tensors


def _from_folder(folder: Path) -> Weights:
    if not folder.is_dir():
        raise FileNotFoundError(f"weights={str(folder)!r} is no folder: {ALLOWED}")
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    files = _safetensors_of(folder)
    for file in files:
        tensors.update(load_file(file))
    # Loaders go by the index of this name, or else take every file.
    only = (folder / "model.safetensors.index.json").is_file() or files == sorted(folder.glob("*.safetensors"))
    return Weights(tensors, str(folder), adapter=(folder / "adapter_config.json").is_file(), only=only)


def _safetensors_of(folder: Path) -> list[Path]:
    """The files of a folder that hold its weights, by its index if it has one.

    Mistral's folders hold the weights twice: ``model*`` has the names of the checkpoint, ``consolidated*`` their own.
    """
    found = sorted(folder.glob("*.safetensors"))
    indices = sorted(folder.glob("*.safetensors.index.json"), key=lambda path: (path.name[:6] != "model.", path))
    if any(not _is_consolidated(file) for file in found):
        found, indices = ([file for file in files if not _is_consolidated(file)] for files in (found, indices))
    for index in indices:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / file for file in files]
    if not found:
        raise FileNotFoundError(f"weights={str(folder)!r} has no *.safetensors files")
    return found


def _is_consolidated(file: Path) -> bool:
    return file.name.startswith("consolidated")
