"""Saving batches and replay buffers of text rows, exactly and without pickled code.

A file is what ``torch.save`` makes of plain data, so that ``torch.load(weights_only=True)`` reads it. It is a dict:

``format``, ``version``
    ``"torchrl_llm batch"`` and 1.
``rows``, ``values``, ``shapes``
    a tree per row, and the tensors of all trees: see :mod:`torchrl_llm.encoding`.

Functions that read and write files, in the thread that calls them.
"""

from __future__ import annotations

import os

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torchrl.data import ReplayBuffer, RoundRobinWriter

from torchrl_llm.encoding import Decoder, Encoder

FORMAT, VERSION = "torchrl_llm batch", 1


def save_batch(batch: TensorDictBase, path: str | os.PathLike[str]) -> None:
    """Saves a batch of turns, or any one-dimensional TensorDict.

    Args:
        batch: of shape ``(T,)``; tensors are saved from wherever they are, and loaded to the CPU.
        path: the file.

    Raises:
        TypeError: if an entry cannot be saved: see :func:`~torchrl_llm.encoding.plain` for what can.
        ValueError: if the batch is not one-dimensional.
    """
    if batch.ndim != 1:
        raise ValueError(f"the batch has batch_size={tuple(batch.batch_size)}; a one-dimensional one is needed")
    encoder = Encoder()
    rows = [encoder.encode(row) for row in batch.unbind(0)]
    # Written beside its place first, so that a file under its name is always whole.
    partial = f"{os.fspath(path)}.part"
    torch.save({"format": FORMAT, "version": VERSION, "rows": rows, **encoder.columns()}, partial)
    os.replace(partial, path)


def load_batch(path: str | os.PathLike[str]) -> LazyStackedTensorDict:
    """Loads what :func:`save_batch` saved: a one-dimensional lazy stack of its rows, equal in every entry.

    Raises:
        ValueError: if the file holds something else.
    """
    content = torch.load(path, weights_only=True)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{os.fspath(path)} holds no batch of turns: it was not made by save_batch")
    if content["version"] != VERSION:
        raise ValueError(f"{os.fspath(path)} has version {content['version']} of the format; known is {VERSION}")
    decode = Decoder(content)
    return LazyStackedTensorDict(*[decode(row) for row in content["rows"]], stack_dim=0)


def save_replay_buffer(buffer: ReplayBuffer, path: str | os.PathLike[str]) -> None:
    """Saves all rows of a replay buffer, the oldest first; torchrl's own ``dumps`` and ``state_dict`` fail on text.

    Rows of a buffer whose writer does not write round and round are saved as they lie in its storage.

    Raises:
        ValueError: if the buffer is empty.
        TypeError: see :func:`save_batch`.
    """
    if not len(buffer):
        raise ValueError("the replay buffer is empty: there is nothing to save")
    rows = torch.arange(len(buffer))
    if isinstance(buffer._writer, RoundRobinWriter) and buffer._storage._is_full:
        rows = rows.roll(-buffer._writer._cursor)  # The writer stands at the oldest row, which it overwrites next.
    save_batch(buffer._storage[rows], path)


def load_replay_buffer(buffer: ReplayBuffer, path: str | os.PathLike[str]) -> None:
    """Puts the rows of a file at the end of a replay buffer, as they are: its transforms are not applied to them.

    What :func:`save_replay_buffer` saved of a full buffer goes on in a new one of its size: the oldest rows are
    overwritten first.

    Raises:
        ValueError: if the file holds no batch.
    """
    buffer._extend(load_batch(path))
