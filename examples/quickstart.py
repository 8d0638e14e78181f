"""Collects rollouts of a small language model that plays Countdown, and prints some of them.

Each environment gives four numbers and a target; the model answers with an arithmetic expression and gets
1.0 for a right one, 0.1 for a wrong one in the right form, 0.0 for anything else. (A model of 135 million
parameters is bad at it: the point is the data, which an RL trainer would take from here.)

    python examples/quickstart.py
    python examples/quickstart.py --engine transformers --model Qwen/Qwen2.5-0.5B-Instruct
"""

from __future__ import annotations

import os

# A core is left to the environments: with a thread on every core, the threads wait for each other in every operation.
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))
# Settings of vLLM on a CPU, read at its import; the last one spares it 15 s of compiling a small function.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import argparse
import functools
import importlib.util
import time

import torch
from models import DEFAULT_MODEL, find_model, load_tokenizer
from tensordict import TensorDictBase, set_list_to_stack
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.llm.datasets.countdown import CountdownEnv
from torchrl.modules.llm import TransformersWrapper
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from torchrl_llm import LLMCollector


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"local folder or hub name (default: {DEFAULT_MODEL})")
    parser.add_argument("--engine", choices=("auto", "transformers", "vllm"), default="auto")
    parser.add_argument("--turns", type=int, default=48, help="turns to collect")
    parser.add_argument("--envs", type=int, default=16, help="environments that play at once")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest response")
    parser.add_argument("--show", type=int, default=3, help="conversations to print")
    return parser.parse_args()


def make_env(seed: int, tokenizer: PreTrainedTokenizerBase) -> CountdownEnv:
    return CountdownEnv(seed=seed, tokenizer=tokenizer)


def make_policy(engine: str, folder: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> TensorDictModuleBase:
    if engine == "vllm":
        from torchrl.modules.llm import vLLMWrapper
        from vllm import LLM

        model = LLM(
            folder, dtype="auto" if torch.cuda.is_available() else "float32", max_model_len=1024,
            enforce_eager=True, disable_log_stats=True,
        )  # fmt: skip
        return vLLMWrapper(
            model,
            tokenizer=tokenizer,
            input_mode="history",
            return_log_probs=True,
            generate_kwargs={"max_tokens": max_tokens, "temperature": 0.7},
        )
    model = AutoModelForCausalLM.from_pretrained(folder)
    return TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="history",
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": max_tokens, "do_sample": True, "temperature": 0.7},
    )


def reward_of(turn: TensorDictBase) -> float:
    return turn["next", "reward"].sum().item()


def show(turn: TensorDictBase) -> None:
    history = turn["history"].full
    identity, reason = turn["collector", "traj_ids"].item(), turn["collector", "finish_reason"]
    print(f"\n--- trajectory {identity}, reward {reward_of(turn):.1f}, {reason}")
    for role, content in zip(history.role, history.content, strict=True):
        if role != "system":  # it is the same in all of them
            print(f"{role}: {content.strip()}")


def main() -> None:
    args = parse_args()
    set_list_to_stack(True).set()  # torchrl's LLM environments need it
    engine = args.engine
    if engine == "auto":
        engine = "vllm" if importlib.util.find_spec("vllm") else "transformers"

    folder = find_model(args.model)
    tokenizer = load_tokenizer(folder)
    print(f"{folder} on {engine}")

    collector = LLMCollector(
        [functools.partial(make_env, seed, tokenizer) for seed in range(args.envs)],
        functools.partial(make_policy, engine, folder, tokenizer, args.max_tokens),
        steps_per_batch=4,
        total_steps=args.turns,
    )
    turns: list[TensorDictBase] = []
    start = time.perf_counter()
    with collector, tqdm(total=args.turns, unit="turn") as bar:
        for batch in collector:
            turns.extend(batch.unbind(0))
            bar.update(len(batch))
            bar.set_postfix(reward=f"{sum(map(reward_of, turns)) / len(turns):.3f}")
    seconds = time.perf_counter() - start

    for turn in sorted(turns, key=reward_of, reverse=True)[: args.show]:
        show(turn)
    tokens = sum(turn["tokens", "response"].numel() for turn in turns)
    print(f"\n{len(turns)} turns, {tokens} response tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s")
    books = collector.stats()
    print(
        f"{books['launched']} trajectories begun = {books['delivered']} delivered + {books['recorded']} recorded "
        f"{books['recorded_by_reason'] or ''}+ {books['in_flight']} in flight"
    )


if __name__ == "__main__":
    main()
