"""Weight files on the nodes of a Ray cluster: two nodes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchrl_llm.policies import node_files
from torchrl_llm.policies.node_files import NodeFiles
from torchrl_llm.weight_forms import Weights, read_weights

ray = pytest.importorskip("ray")

TENSORS = {"a": torch.arange(6).view(2, 3), "b": torch.tensor([0.5])}


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    """The ids of the driver's own node and of the other one."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield ray.get_runtime_context().get_node_id(), other.node_id
    ray.shutdown()
    cluster.shutdown()


def test_the_own_node_reads_what_was_written_here(nodes: Any) -> None:
    weights = Weights(TENSORS)
    files = NodeFiles({nodes[0]})
    folder = files.place(weights, TENSORS)
    assert load_file(os.path.join(folder, "model.safetensors"))["a"].tolist() == TENSORS["a"].tolist()
    files.remove()
    weights.dispose()
    assert not os.path.exists(folder)


def test_another_node_gets_the_tensors_under_the_same_path(nodes: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Both nodes are on this machine, so the other one is sent elsewhere."""
    elsewhere = str(tmp_path / "other node")

    def write(folder: str, tensors: dict[str, torch.Tensor]) -> str:
        node_files._write(elsewhere, tensors)
        return ray.get_runtime_context().get_node_id()

    written: list[Any] = []
    on_others = NodeFiles._on_others
    monkeypatch.setattr(
        NodeFiles, "_on_others", lambda self, task, *given: written.append(on_others(self, write, *given)) or []
    )
    weights = Weights(TENSORS)
    folder = NodeFiles(set(nodes)).place(weights, TENSORS)
    assert written == [[nodes[1]]]
    for place in (folder, elsewhere):
        loaded = load_file(os.path.join(place, "model.safetensors"))
        assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
            name: tensor.tolist() for name, tensor in TENSORS.items()
        }
    weights.dispose()


def test_a_folder_that_every_node_sees_is_read_where_it_is(nodes: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    weights = read_weights(tmp_path)
    files = NodeFiles(set(nodes))
    assert files.place(weights, weights.tensors) == str(tmp_path)
    files.remove()
    assert (tmp_path / "model.safetensors").exists()


def test_what_was_written_elsewhere_is_removed(nodes: Any) -> None:
    weights = Weights(TENSORS)
    files = NodeFiles(set(nodes))
    folder = files.place(weights, TENSORS)
    assert os.path.exists(folder)
    files.remove()
    assert not os.path.exists(folder)
    weights.dispose()


def test_a_folder_whose_names_have_a_prefix_is_written_anew(nodes: Any, tmp_path: Path) -> None:
    save_file({"module." + name: tensor for name, tensor in TENSORS.items()}, tmp_path / "model.safetensors")
    weights = read_weights(tmp_path)
    matched = {name: weights.tensors["module." + name] for name in TENSORS}
    folder = NodeFiles({nodes[0]}).place(weights, matched)
    assert folder != str(tmp_path)
    assert load_file(os.path.join(folder, "model.safetensors")).keys() == TENSORS.keys()
    weights.dispose()
