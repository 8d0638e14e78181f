"""The quickstart on Ray: workers in processes of their own, each with an engine, read through one collector.

On a cluster the workers lie on its machines and have their GPUs (`--gpus 1`); here two of them share this machine, with
the tiny random model (whose answers mean nothing: the point is the cluster). With `--kill-one` a worker's process is
killed on the way: the collector goes on, starts another, and counts what was lost.

    python examples/ray_cluster.py
    python examples/ray_cluster.py --kill-one
    python examples/ray_cluster.py --address auto --workers 16 --gpus 1 --model Qwen/Qwen2.5-0.5B-Instruct
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import argparse
import functools
import importlib.util
import signal
import time
from pathlib import Path
from typing import Any

from models import find_model, load_tokenizer, tiny_model
from quickstart import make_env, make_policy, reward_of
from tensordict import set_list_to_stack
from tqdm import tqdm

from torchrl_llm import LLMCollector

# What the workers' processes need of this one's environment, and where they find this folder's modules.
ROOT = Path(__file__).resolve().parents[1]
VARIABLES = ("OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE", "HF_HUB_OFFLINE")


class Worker(LLMCollector):
    """What runs in each worker: a collector that can say which process it is."""

    def pid(self) -> int:
        return os.getpid()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="local", help="of a Ray cluster; 'local' (default) starts one here")
    parser.add_argument("--model", help="local folder or hub name (default: a tiny random model)")
    parser.add_argument("--engine", choices=("auto", "transformers", "vllm"), default="auto")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each worker")
    parser.add_argument("--envs", type=int, default=8, help="environments of each worker")
    parser.add_argument("--turns", type=int, default=400, help="turns to collect")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest response")
    parser.add_argument("--kill-one", action="store_true", help="kill a worker's process on the way")
    return parser.parse_args()


def ray_config(address: str) -> dict[str, Any]:
    names = [name for name in os.environ if name in VARIABLES or name.startswith("VLLM_")]
    variables = {name: os.environ[name] for name in names}
    paths = [str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    config: dict[str, Any] = {"address": address, "log_to_driver": False, "runtime_env": {"env_vars": variables}}
    return config | ({"include_dashboard": False} if address == "local" else {})


def main() -> None:
    args = parse_args()
    if args.kill_one and args.address != "local":
        raise SystemExit("--kill-one kills a process of this machine: leave --address out")
    set_list_to_stack(True).set()  # torchrl's LLM environments need it
    engine = args.engine
    if engine == "auto":
        engine = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    folder = find_model(args.model) if args.model else tiny_model()
    tokenizer = load_tokenizer(folder)
    print(f"{folder} on {engine}, {args.workers} workers")

    start = time.perf_counter()
    collector = Worker(
        functools.partial(make_env, 0, tokenizer),
        functools.partial(make_policy, engine, folder, tokenizer, args.max_tokens),
        backend="ray",
        num_workers=args.workers,
        num_envs=args.envs,
        num_gpus=args.gpus,
        num_cpus=0 if args.address == "local" else 1,
        ray_init_config=ray_config(args.address),
        steps_per_batch=8,
        total_steps=args.turns,
    )
    print(f"ready after {time.perf_counter() - start:.0f} s")

    rewards: list[float] = []
    start = time.perf_counter()
    with collector, tqdm(total=args.turns, unit="turn") as bar:
        for batch in collector:
            rewards += [reward_of(turn) for turn in batch.unbind(0)]
            bar.update(len(batch))
            bar.set_postfix(reward=f"{sum(rewards) / len(rewards):.3f}")
            if args.kill_one and len(rewards) >= args.turns // 3:
                args.kill_one = False
                pid = collector.call_workers("pid")[0]
                bar.write(f"killing worker 0, process {pid}")
                os.kill(pid, signal.SIGKILL)
    seconds = time.perf_counter() - start

    books = collector.stats()
    print(
        f"\n{len(rewards)} turns, {len(rewards) / seconds:.1f} turns/s, mean reward {sum(rewards) / len(rewards):.3f}"
    )
    for worker, figures in books["workers"].items():
        print(
            f"worker {worker}: {figures['turns']} turns, {figures['response_tokens'] / seconds:.0f} tokens/s, "
            f"{figures['restarts']} restarts"
        )
    print(
        f"{books['launched']} trajectories begun = {books['delivered']} delivered + {books['recorded']} recorded "
        f"{books['recorded_by_reason'] or ''}+ {books['in_flight']} in flight"
    )


if __name__ == "__main__":
    main()
