"""Which of a folder's files are its weights, and when the folder itself can be given to a loader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torchrl_llm.weight_forms import read_weights
from torchrl_llm.weight_spec import WeightSpec

SPEC = WeightSpec({"model.a": (torch.Size([1]), torch.float32), "model.b": (torch.Size([1]), torch.float32)})


def folder_of(folder: Path, files: dict[str, dict[str, float]], *indexed: str) -> Path:
    """A folder of safetensors files by name, with an index for those whose names begin with each of ``indexed``."""
    for file, tensors in files.items():
        save_file({name: torch.tensor([value]) for name, value in tensors.items()}, folder / file)
    for stem in indexed:
        places = {name: file for file, tensors in files.items() if file.startswith(stem) for name in tensors}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def values(folder: Path) -> dict[str, float]:
    return {name: float(tensor) for name, tensor in read_weights(folder).tensors.items()}


MODEL = {"model-1.safetensors": {"model.a": 1.0}, "model-2.safetensors": {"model.b": 2.0}}
CONSOLIDATED = {"consolidated-1.safetensors": {"a": 3.0, "tok_embeddings": 4.0}}


@pytest.mark.parametrize("indexed", [(), ("model",), ("consolidated",), ("consolidated", "model")])
def test_of_mistrals_two_sets_of_files_the_checkpoints_is_read(indexed: tuple[str, ...], tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODEL | CONSOLIDATED, *indexed)
    assert values(folder) == {"model.a": 1.0, "model.b": 2.0}
    weights = read_weights(folder)
    assert weights.own_folder(SPEC.match(weights.tensors)) == (str(folder) if "model" in indexed else None)


def test_a_folder_with_the_consolidated_files_only_is_read_as_it_is(tmp_path: Path) -> None:
    assert values(folder_of(tmp_path, CONSOLIDATED, "consolidated")) == {"a": 3.0, "tok_embeddings": 4.0}


def test_files_that_the_index_does_not_name_are_left_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODEL, "model")
    save_file({"model.old": torch.zeros(1)}, folder / "model-3.safetensors")
    assert values(folder) == {"model.a": 1.0, "model.b": 2.0}


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_folder_is_given_to_a_loader_only_if_its_names_are_the_policys(prefix: str, tmp_path: Path) -> None:
    weights = read_weights(folder_of(tmp_path, {"x.safetensors": {prefix + "model.a": 1.0, prefix + "model.b": 2.0}}))
    matched = SPEC.match(weights.tensors)
    assert matched.keys() == {"model.a", "model.b"}
    assert weights.own_folder(matched) == (None if prefix else str(tmp_path))


def test_a_prefix_that_makes_one_name_into_another_is_seen(tmp_path: Path) -> None:
    """``model.model.a`` is the policy's ``model.a``; the file's own ``model.a`` is something else."""
    spec = WeightSpec({"a": (torch.Size([1]), torch.float32), "model.a": (torch.Size([1]), torch.float32)})
    weights = read_weights(folder_of(tmp_path, {"x.safetensors": {"model.a": 1.0, "model.model.a": 2.0}}))
    matched = spec.match(weights.tensors)
    assert {name: float(tensor) for name, tensor in matched.items()} == {"a": 1.0, "model.a": 2.0}
    assert weights.own_folder(matched) is None
