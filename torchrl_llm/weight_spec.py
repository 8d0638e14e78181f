"""What weights a policy takes: names, shapes, dtypes, and which of them may be left out. Pure.

The names are those of the Hugging Face checkpoint. An engine may keep its weights under other names (vLLM fuses q/k/v
and gate/up, and has no tensor for a tied output head); it does that itself when it loads checkpoint names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

MISMATCHES_SHOWN = 5

# What wrappers for training put into the names of a model that they hold.
_WRAPPED = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_PREFIXES = ("", "module.", "model.", "module.model.", "base_model.model.", "module.base_model.model.")


@dataclass(frozen=True)
class WeightSpec:
    """The weights that a policy takes.

    Args:
        tensors: shape and dtype by name.
        tied: names that share their tensor with another one: name -> the name that holds it.
        ignored: names that may be there and are not used, such as buffers that the model makes itself.

    Examples:
        >>> spec = WeightSpec({"w": (torch.Size([2]), torch.float32)})
        >>> spec.match({"module.w": torch.zeros(2)})
        {'w': tensor([0., 0.])}
    """

    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    tied: dict[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def match(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors under the policy's names: all of them, once each.

        The dtype must be the policy's own; float32 weights are also taken where the policy's dtype is narrower.

        Raises:
            ValueError: listing the first mismatches.
        """
        found = self._named(tensors)
        wrong = [self._mismatch(name, found[name]) for name in self.tensors if name in found]
        problems = [problem for problem in wrong if problem]
        problems += [f"{name!r} is missing" for name in self.tensors if name not in found and name not in self.tied]
        known = self.tensors.keys() | self.ignored
        problems += [f"{name!r} is not a name of the policy's weights" for name in found if name not in known]
        if not problems:
            for name, source in self.tied.items():
                if name in found and not _same(found[name], found[source]):
                    problems.append(f"{name!r} differs from {source!r}, to which the policy ties it")
        if problems:
            raise ValueError("the weights do not fit the policy, which keeps its old ones: " + first_of(problems))
        return {name: found[name] for name in self.tensors if name in found}

    def _named(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors without what wrappers put into their names, where they are better known without it."""
        known = self.tensors.keys() | self.ignored
        bare = {_without(name, _WRAPPED): tensor for name, tensor in tensors.items()}
        best, best_known = tensors, sum(name in known for name in tensors)
        for prefix in _PREFIXES:
            if best_known == len(tensors):
                break
            if all(name.startswith(prefix) for name in bare):
                stripped = {name.removeprefix(prefix): tensor for name, tensor in bare.items()}
                found = sum(name in known for name in stripped)
                if found > best_known:
                    best, best_known = stripped, found
        return best

    def _mismatch(self, name: str, tensor: torch.Tensor) -> str | None:
        shape, dtype = self.tensors[name]
        if tensor.shape != shape:
            return f"{name!r} has shape {tuple(tensor.shape)}, the policy's is {tuple(shape)}"
        if tensor.dtype != dtype and not _narrows(tensor.dtype, dtype):
            hint = "; cast it" if dtype.is_floating_point else ""
            return f"{name!r} is {tensor.dtype}, the policy's is {dtype}{hint}"
        return None


def _narrows(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether these are a trainer's float32 weights for a policy in lower precision."""
    return given == torch.float32 and wanted.is_floating_point and wanted.itemsize < given.itemsize


def _without(name: str, parts: tuple[str, ...]) -> str:
    for part in parts:
        name = name.replace(part, "")
    return name


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def first_of(problems: list[str]) -> str:
    """The first few of what is wrong, and how many more there are."""
    more = len(problems) - MISMATCHES_SHOWN
    return "; ".join(problems[:MISMATCHES_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def spec_of_module(model: nn.Module, dtype: torch.dtype | None = None) -> WeightSpec:
    """The weights of a module: its state dict, with the tensors that it shares under several names.

    Args:
        model: the module; may lie on the meta device.
        dtype: the dtype of its floating-point weights, if not those that the module has.
    """
    tensors: dict[str, tuple[torch.Size, torch.dtype]] = {}
    tied: dict[str, str] = {}
    by_tensor: dict[int, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        own = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        tensors[name] = (tensor.shape, own)
        if id(tensor) in by_tensor:
            tied[name] = by_tensor[id(tensor)]
        by_tensor.setdefault(id(tensor), name)
    others = {name for name, _ in model.named_buffers(remove_duplicate=False)} | parameters.keys()
    return WeightSpec(tensors, tied, frozenset(others - tensors.keys()))
