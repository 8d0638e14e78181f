"""Weights on their way to the workers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchrl_llm.ray.weights import PackedWeights
from torchrl_llm.weight_forms import read_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_packed_weights_hold_the_same_tensors(dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "turned": torch.arange(6).reshape(2, 3).to(dtype).T,
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 4).to(dtype),
    }
    packed = PackedWeights(tensors)
    assert list(packed) == list(tensors)
    for name, tensor in tensors.items():
        assert packed[name].dtype == dtype
        assert torch.equal(packed[name], tensor)


def test_tied_weights_are_packed_once() -> None:
    shared = torch.ones(1000)
    packed = PackedWeights({"head": shared, "embedding": shared, "other": torch.ones(1000)})
    assert len(packed._bytes) == 2
    assert packed["head"].data_ptr() == packed["embedding"].data_ptr()


def test_packed_weights_are_weights() -> None:
    model = nn.Linear(2, 3)
    weights = read_weights(PackedWeights(model.state_dict()))
    assert {name: tensor.tolist() for name, tensor in weights.tensors.items()} == {
        name: tensor.tolist() for name, tensor in model.state_dict().items()
    }
