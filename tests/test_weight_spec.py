"""Which weights fit: names, shapes, dtypes, ties."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import nn

from torchrl_llm.weight_forms import read_weights
from torchrl_llm.weight_spec import WeightSpec, spec_of_module


def spec(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> WeightSpec:
    return WeightSpec({name: (torch.Size(shape), dtype) for name, shape in shapes.items()})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("made", torch.zeros(3), persistent=False)


def test_a_modules_spec_knows_its_ties_and_what_it_makes_itself() -> None:
    found = spec_of_module(Tied())
    assert found.tensors == {
        "first.weight": (torch.Size([2, 2]), torch.float32),
        "second.weight": (torch.Size([2, 2]), torch.float32),
    }
    assert found.tied == {"second.weight": "first.weight"}
    assert found.ignored == {"made"}
    assert spec_of_module(Tied(), dtype=torch.bfloat16).tensors["first.weight"][1] == torch.bfloat16
    given = {"first.weight": torch.ones(2, 2), "made": torch.ones(3)}
    assert list(found.match(given)) == ["first.weight"]


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.", "module.model.", "base_model.model."])
def test_what_wrappers_put_before_the_names_is_ignored(prefix: str) -> None:
    given = {f"{prefix}a": torch.zeros(1), f"{prefix}b": torch.zeros(2)}
    assert list(spec(a=(1,), b=(2,)).match(given)) == ["a", "b"]


def test_a_prefix_that_is_part_of_the_names_stays() -> None:
    wanted = WeightSpec({"model.a": (torch.Size([1]), torch.float32)})
    assert list(wanted.match({"model.a": torch.zeros(1)})) == ["model.a"]
    assert list(wanted.match({"model.model.a": torch.zeros(1)})) == ["model.a"]


@pytest.mark.parametrize(
    ("given", "wanted", "fits"),
    [
        (torch.float32, torch.float32, True),
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.float16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float16, torch.bfloat16, False),
        (torch.float64, torch.float32, False),
        (torch.float32, torch.int64, False),
        (torch.int64, torch.float32, False),
    ],
)
def test_only_float32_is_cast_and_only_to_less(given: torch.dtype, wanted: torch.dtype, fits: bool) -> None:
    weights = {"a": torch.zeros(1, dtype=given)}
    if fits:
        assert spec(wanted, a=(1,)).match(weights) == weights
    else:
        with pytest.raises(ValueError, match=f"'a' is {given}, the policy's is {wanted}"):
            spec(wanted, a=(1,)).match(weights)


def test_the_first_five_mismatches_are_listed_and_the_rest_counted() -> None:
    with pytest.raises(ValueError, match=r"'n4' is missing; and 3 more$"):
        spec(**{f"n{i}": (1,) for i in range(8)}).match({})


NESTED = TensorDict({"layer": TensorDict({"weight": torch.ones(2)})})
FORMS: Mapping[str, Any] = {
    "tensordict": NESTED,
    "mapping": {"layer.weight": torch.ones(2)},
    "iterator": iter([("layer.weight", torch.ones(2, requires_grad=True))]),
    "module": nn.ModuleDict({"layer": nn.LayerNorm(2, bias=False)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_names(form: str) -> None:
    read = read_weights(FORMS[form])
    assert list(read.tensors) == ["layer.weight"]
    assert torch.equal(read.tensors["layer.weight"], torch.ones(2))
    assert not read.tensors["layer.weight"].requires_grad


def test_a_folder_is_read_by_its_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "model-2.safetensors")
    save_file({"c": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert read_weights(tmp_path).tensors.keys() == {"a", "b", "c"}
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    read = read_weights(str(tmp_path))
    assert read.tensors.keys() == {"a", "b"}
    assert not read.adapter
    (tmp_path / "adapter_config.json").write_text("{}")
    assert read_weights(tmp_path).adapter


def test_what_is_not_weights_is_refused(tmp_path: Path) -> None:
    for bad in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError):
            read_weights(bad)
    with pytest.raises(ValueError, match="'a' twice"):
        read_weights([("a", torch.zeros(1)), ("a", torch.zeros(1))])
    for bad in (object(), [3], {1: torch.zeros(1)}, {"a": [1.0]}):
        with pytest.raises(TypeError, match="pass a module, a TensorDict"):
            read_weights(bad)
