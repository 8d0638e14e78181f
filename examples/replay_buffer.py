"""Fills a replay buffer in the background while a trainer samples from it.

python examples/replay_buffer.py
"""

from __future__ import annotations

import argparse
import functools
import time

from models import find_model, load_tokenizer
from quickstart import make_env, make_policy
from tensordict import set_list_to_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_llm import LLMCollector


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
    buffer = ReplayBuffer(storage=LazyStackStorage(256), batch_size=4)

    with LLMCollector(
        [functools.partial(make_env, seed, tokenizer) for seed in range(8)],
        functools.partial(make_policy, args.engine, folder, tokenizer, args.max_tokens),
        steps_per_batch=4,
        total_steps=args.turns,
    ) as collector:
        collector.start(buffer)
        while collector.is_running():
            if len(buffer) >= 4:
                batch = buffer.sample()
                lengths = [turn["tokens", "response"].numel() for turn in batch.unbind(0)]
                reward = sum(turn["next", "reward"].sum().item() for turn in batch.unbind(0)) / len(batch)
                print(f"{len(buffer):3d} turns in the buffer; sampled lengths {lengths}, reward {reward:.3f}")
            time.sleep(1.0)  # where a trainer would take its optimisation step
        collector.join()  # raises what stopped the run, if something did
    print(f"{len(buffer)} turns collected")


if __name__ == "__main__":
    main()
