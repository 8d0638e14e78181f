"""Reads whole trajectories from a queue that the collector fills in the background.

The queue holds two batches: when the consumer is slow the collector waits for it, and nothing is dropped.

    python examples/queue_consumer.py
"""

from __future__ import annotations

import argparse
import functools
import queue

from models import find_model, load_tokenizer
from quickstart import make_env, make_policy
from tensordict import TensorDictBase, set_list_to_stack

from torchrl_llm import LLMCollector, split_trajectories


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="local folder or hub name")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()

    set_list_to_stack(True).set()
    folder = find_model(args.model)
    tokenizer = load_tokenizer(folder)
    batches: queue.Queue[TensorDictBase | None] = queue.Queue(maxsize=2)

    with LLMCollector(
        [functools.partial(make_env, seed, tokenizer) for seed in range(8)],
        functools.partial(make_policy, args.engine, folder, tokenizer, args.max_tokens),
        trajectories_per_batch=4,
        total_steps=args.turns,
    ) as collector:
        collector.start(batches)
        for batch in iter(batches.get, None):  # one None marks the end, however it came
            for trajectory in split_trajectories(batch):
                identity = trajectory["collector", "traj_ids"][0].item()
                reward = sum(turn["next", "reward"].sum().item() for turn in trajectory.unbind(0))
                print(f"trajectory {identity}: {len(trajectory)} turn(s), reward {reward:.1f}")
        collector.join()  # raises what stopped the run, if something did


if __name__ == "__main__":
    main()
