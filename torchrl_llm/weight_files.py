"""Named tensors -> a safetensors folder in shared memory, from which engines in other processes load.

safetensors' own ``save_file`` first makes bytes of every tensor, a second copy of the whole model. The format is a
header and the tensors' memory one after the other, so the tensors are written as they lie.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile

import torch

SHARED_MEMORY = "/dev/shm"

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write_folder(tensors: dict[str, torch.Tensor]) -> str:
    """Writes ``model.safetensors`` into a new folder, in shared memory where the system has it; the caller removes it.

    Returns:
        The folder.
    """
    place = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None
    folder = tempfile.mkdtemp(prefix="torchrl_llm-weights-", dir=place)
    try:
        write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def write_safetensors(path: str, tensors: dict[str, torch.Tensor]) -> None:
    """Writes tensors, from any device, into one safetensors file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            if tensor.numel():
                _write_all(file.fileno(), tensor)


def _write_all(descriptor: int, tensor: torch.Tensor) -> None:
    left = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    while left:
        left = left[os.write(descriptor, left) :]
