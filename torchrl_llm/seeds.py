"""Seeds that do not depend on the order of things: each is made of the collector's seed and of what it is for.

A request's seed is made of (seed, what its trajectory is, turn). With a prompt source a trajectory is known by its
group and its index in it, without one by its slot and its number there; so the set of trajectories is the same at every
run, whichever slot, thread or batch they happen to be in.

Pure functions, but for :func:`seed_loaders`, which belongs to the thread that builds the collector.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

# What a seed is for; the first number of an identity.
ENV, PROMPTS, LOADER, OF_SLOT, OF_GROUP, NEXT, EVALUATION = range(7)


def derive(seed: int, *identity: int) -> int:
    """A seed from 0 to 2^63 - 1 for one purpose.

    Examples:
        >>> derive(7, OF_GROUP, 0, 0) == derive(7, OF_GROUP, 0, 0) != derive(7, OF_GROUP, 0, 1)
        True
    """
    numbers = [number % 2**64 for number in (seed, *identity)]
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}Q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def next_seed(seed: int) -> int:
    """A seed for whatever is to be seeded next, as TorchRL's ``set_seed`` gives one."""
    return derive(seed, NEXT) % 2**31


def check_seed(seed: Any) -> int:
    """``seed`` if it is an int.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed={seed!r} is not allowed: pass an int")
    return seed


def seed_loaders(primers: Iterable[Any], seed: int) -> None:
    """Seeds the shuffling ``DataLoader`` of an environment that was not reset yet, and starts it over.

    One that the user gave a generator keeps it.
    """
    for primer in primers:
        loader = primer.dataloader
        if not isinstance(loader, DataLoader) or loader.generator is not None:
            continue
        sampler = loader.sampler
        if not isinstance(sampler, RandomSampler) or sampler.generator is not None:
            continue
        # The pass that was begun by the environment's constructor has an order of its own.
        sampler.generator = torch.Generator().manual_seed(derive(seed, LOADER))
        primer._queue.clear()
        primer.endless_dataloader.start_over()
