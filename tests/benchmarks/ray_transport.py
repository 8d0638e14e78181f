"""What it costs to bring turns from a worker to the driver: packed columns against pickling the TensorDict.

Both go through Ray's object store within one process (`ray.put` and `ray.get`), from the turns at the worker to
TensorDicts at the reader, with canned vLLM outputs in torchrl's own containers. The variants take turns; the figure is
the best of the rounds. The last table shows how many turns per second come through one driver from workers whose
engines answer at once, that is, what the driver, the worker and Ray can do together on this machine; also where the
driver has called `gc.freeze()` before, so that the garbage collector does not go over what its imports left.

    python tests/benchmarks/ray_transport.py
    python tests/benchmarks/ray_transport.py --turns 256 --tokens 512 --throughput-turns 20000
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import harness
import ray
import torch
from ray_engines import FakeEngine, fake_env, settings
from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_llm import LLMCollector
from torchrl_llm.ray.messages import Parcel
from torchrl_llm.ray.transport import pack


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=256, help="turns in a batch")
    parser.add_argument("--tokens", type=int, default=512, help="tokens in a response")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--throughput-turns", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def a_batch(mode: str, turns: int, tokens: int) -> TensorDictBase:
    """A collector's batch of so many turns."""
    _, tokenizer = harness.tiny()
    llm = harness.canned_llm(tokenizer, tokens)
    envs = [functools.partial(harness.canned_env, mode, seed, tokenizer) for seed in range(16)]
    with LLMCollector(envs, harness.vllm_policy(llm, tokenizer, mode), steps_per_batch=turns) as collector:
        return next(collector)


def by_pickle(batch: TensorDictBase) -> TensorDictBase:
    """As the TensorDict that it is."""
    return ray.get(ray.put(batch))


def by_columns(batch: LazyStackedTensorDict) -> TensorDictBase:
    """As the collector sends it."""
    return ray.get(ray.put(Parcel(pack(batch.tensordicts)))).open()


def timed(way: Callable[[Any], Any], batch: TensorDictBase) -> tuple[float, float]:
    """Milliseconds per turn, on the wall and of this process's CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    way(batch)
    return (time.perf_counter() - wall) / len(batch) * 1e3, (time.process_time() - cpu) / len(batch) * 1e3


def compare(mode: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both ways for one input mode."""
    batch = a_batch(mode, args.turns, args.tokens)
    assert isinstance(batch, LazyStackedTensorDict)
    ways = {"pickled TensorDict": by_pickle, "packed columns": by_columns}
    best = {name: (float("inf"), float("inf")) for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            now = timed(way, batch)
            best[name] = (min(best[name][0], now[0]), min(best[name][1], now[1]))
    sizes = {
        "pickled TensorDict": len(ray.cloudpickle.dumps(batch)) / len(batch),
        "packed columns": pack(batch.tensordicts).nbytes / len(batch),
    }
    slow = best["pickled TensorDict"][0]
    return [
        {
            "mode": mode,
            "way": name,
            "ms per turn": best[name][0],
            "cpu ms per turn": best[name][1],
            "bytes per turn": int(sizes[name]),
            "times faster": slow / best[name][0],
        }
        for name in ways
    ]


def throughput(turns: int, tokens: int, workers: int, frozen: bool) -> dict[str, Any]:
    """Turns per second through one driver, from engines that cost nothing."""
    gc.collect()
    gc.freeze() if frozen else gc.unfreeze()
    collector = LLMCollector(
        functools.partial(fake_env, tokens),
        functools.partial(FakeEngine, latency=0.0, tokens=tokens),
        num_envs=64,
        steps_per_batch=256,
        total_steps=turns,
        num_workers=workers,
        prefetch=2,
        num_cpus=0,
        backend="ray",
    )
    with collector:
        next(collector)
        start, cpu, done = time.perf_counter(), time.process_time(), 0
        for batch in collector:
            done += len(batch)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "workers": workers,
        "gc.freeze()": "yes" if frozen else "no",
        "turns": done,
        "turns/s": done / seconds,
        "driver's cpu ms per turn": cpu / done * 1e3,
        "turns/s of the driver's cpu": done / cpu,
    }


def main() -> None:
    """Runs and prints."""
    args = parse_args()
    torch.set_num_threads(1)
    ray.init(**settings(2))
    harness.quiet()
    rows = [row for mode in harness.MODES for row in compare(mode, args)]
    harness.report({"rows": rows}, args.json)
    rows = [
        throughput(args.throughput_turns, args.tokens, workers, frozen)
        for workers in (1, 2)
        for frozen in (False, True)
    ]
    harness.report({"rows": rows}, args.json)
    ray.shutdown()


if __name__ == "__main__":
    main()
