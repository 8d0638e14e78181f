"""Whether memory grows: many turns with a canned engine, through a queue.

Resident memory after all turns over resident memory after the first tenth. The consumer drops each batch, so whatever
stays belongs to the collector (or to what it uses).

    python tests/benchmarks/soak.py
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import queue
import time
from typing import Any

import harness
import psutil
import torch

from torchrl_llm import LLMCollector


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=50_000)
    parser.add_argument("--first", type=int, default=5_000, help="turns before the first reading")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--mode", choices=harness.MODES, default="history")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def resident() -> float:
    """Resident memory of this process, in MB."""
    gc.collect()
    return psutil.Process(os.getpid()).memory_info().rss / 1e6


def main() -> None:
    """Runs and prints."""
    args = parse_args()
    torch.set_num_threads(1)
    harness.quiet()
    _, tokenizer = harness.tiny()
    llm = harness.canned_llm(tokenizer, args.tokens)
    batches: queue.Queue[Any] = queue.Queue(maxsize=4)
    step = max(1, args.turns // 10)
    readings: list[dict[str, Any]] = []
    first = None
    start = time.perf_counter()
    with LLMCollector(
        [functools.partial(harness.canned_env, args.mode, seed, tokenizer) for seed in range(args.slots)],
        harness.vllm_policy(llm, tokenizer, args.mode),
        steps_per_batch=50,
        total_steps=args.turns,
        queue=batches,
    ) as collector:
        collector.start()
        done = 0
        for batch in iter(batches.get, None):
            before, done = done, done + len(batch)
            del batch
            if first is None and done >= args.first:
                first = resident()
            if done // step > before // step or done == args.turns:
                readings.append({"turns": done, "resident_mb": resident()})
        collector.join()
    last = resident()
    assert done == args.turns and first is not None
    result = {
        "rows": readings,
        f"MB after {args.first} turns": first,
        f"MB after {args.turns} turns": last,
        "growth": last / first - 1,
        "seconds": time.perf_counter() - start,
    }
    harness.report(result, args.json)


if __name__ == "__main__":
    main()
