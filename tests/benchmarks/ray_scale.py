"""How many engines one driver can serve: 1 to 64 workers' worth of fake engines, and more, in a few actors.

Each actor stands for many workers: every engine in it hands over a batch of turns (made once, in torchrl's own
containers) whenever a real one would have, after log-normal latencies. So the engines and environments cost nothing,
and what is measured is the rest: packing, Ray, the driver. Engines are added until the driver no longer keeps up; the
processor time that the driver needs per turn says the same on a busy machine.

    python tests/benchmarks/ray_scale.py
    python tests/benchmarks/ray_scale.py --engines 16 64 256 --seconds 10
"""

from __future__ import annotations

import argparse
import functools
import heapq
import queue
import random
import threading
import time
from typing import Any

import harness
import ray
import torch
from ray_engines import settings
from ray_transport import a_batch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from torchrl_llm import LLMCollector, RayCollector
from torchrl_llm.ledger import Ledger

# Ids that the driver reads beside the trajectory's.
ZEROS = ("step", "env_id", "policy_id", "group_id", "group_index", "policy_version")


class ManyEngines(LLMCollector):
    """What a worker runs: not one collector, but the batches that many would send, at the times when they would.

    Args:
        env: not called.
        policy: a function that gives the turns of one batch.
        engines: how many engines it stands for.
        seconds: median seconds from one batch of an engine to its next.
    """

    def __init__(self, env: Any, policy: Any, *, engines: int, seconds: float, **arguments: Any) -> None:
        self._engines, self._seconds, self._make = engines, seconds, policy
        self._ledger = Ledger()
        self._stop = threading.Event()
        self._target: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _serve(self, target: Any) -> None:
        self._target = target
        self._thread.start()

    def _run(self) -> None:
        turns = self._make()
        draw = random.Random(0)
        due = [(time.monotonic() + self._seconds * draw.random(), index) for index in range(self._engines)]
        heapq.heapify(due)
        trajectory = 0
        while not self._stop.is_set():
            at, index = heapq.heappop(due)
            self._stop.wait(max(0.0, at - time.monotonic()))
            rows = []
            for turn in turns:
                self._ledger.launch(trajectory)
                self._ledger.finish_turn(0, 512)
                row = turn.copy()
                ids = dict.fromkeys(ZEROS, torch.tensor(0))
                row.set("collector", TensorDict({**ids, "traj_ids": torch.tensor(trajectory)}, batch_size=()))
                rows.append(row)
                trajectory += 1
            batch = LazyStackedTensorDict(*rows, stack_dim=0)
            while not self._stop.is_set():
                try:
                    self._target.put(batch, timeout=0.1)
                except queue.Full:
                    continue
                self._ledger.deliver(len(rows), list(range(trajectory - len(rows), trajectory)))
                break
            # An engine whose batch found no room has waited with its next one.
            now = max(at, time.monotonic() - self._seconds)
            heapq.heappush(due, (now + self._seconds * draw.lognormvariate(0, 0.3), index))
        self._ledger.record_rest("shutdown")
        self._target.put(None)

    def stats(self) -> dict[str, Any]:
        return self._ledger.snapshot()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[4, 16, 64, 256, 512], help="engines to simulate")
    parser.add_argument("--actors", type=int, default=2, help="actors that hold them")
    parser.add_argument("--batch", type=int, default=64, help="turns in a batch: the requests in flight of an engine")
    parser.add_argument("--batch-seconds", type=float, default=8.0, help="median seconds of an engine's batch")
    parser.add_argument("--tokens", type=int, default=512, help="tokens in a response")
    parser.add_argument("--mode", choices=harness.MODES, default="tokens")
    parser.add_argument("--seconds", type=float, default=20.0, help="to measure, per row")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def turns_of(ref: list[Any]) -> list[TensorDictBase]:
    """What every batch consists of."""
    batch: TensorDictBase = ray.get(ref[0])
    return list(batch.unbind(0))


def measure(engines: int, args: argparse.Namespace, ref: Any) -> dict[str, Any]:
    """One row."""
    actors = min(args.actors, engines)
    collector = RayCollector(
        lambda: None,
        functools.partial(turns_of, [ref]),
        collector_class=ManyEngines,
        steps_per_batch=args.batch,
        engines=engines // actors,
        seconds=args.batch_seconds,
        num_workers=actors,
        num_cpus=0,
        prefetch=4,
    )
    with collector:
        warm = time.monotonic() + args.batch_seconds
        while time.monotonic() < warm:
            next(collector)
        start, cpu, done = time.monotonic(), time.process_time(), 0
        while time.monotonic() < start + args.seconds:
            done += len(next(collector))
        seconds, cpu = time.monotonic() - start, time.process_time() - cpu
    # The mean of a log-normal distribution is above its median.
    offered = engines * args.batch / (args.batch_seconds * 1.046)
    return {
        "engines": engines,
        "offered turns/s": offered,
        "turns/s": done / seconds,
        "share": done / seconds / offered,
        "driver's cpu": cpu / seconds,
        "driver's cpu ms per turn": cpu / done * 1e3,
    }


def main() -> None:
    """Runs and prints."""
    args = parse_args()
    torch.set_num_threads(1)
    ray.init(**settings(2))
    harness.quiet()
    batch = a_batch(args.mode, args.batch, args.tokens)
    for row in batch.unbind(0):
        del row["collector"]
    ref = ray.put(batch)
    rows = [measure(engines, args, ref) for engines in args.engines]
    best = min(row["driver's cpu ms per turn"] for row in rows if row["turns/s"] > 100 or row is rows[-1])
    harness.report({"rows": rows, "turns/s of one driver, by its processor time": 1e3 / best}, args.json)
    ray.shutdown()


if __name__ == "__main__":
    main()
