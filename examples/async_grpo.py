"""GRPO while the collector goes on: vLLM answers, a trainer learns beside it, and new weights enter the running engine.

The collector writes groups of answers into a replay buffer, from a thread of its own. The trainer learns from as many
answers as arrive, and after every few optimisation steps gives the engine its weights, without stopping it. Nobody
waits for the other, except that ``max_policy_lag`` bounds how old an answer may be when it is delivered. The task and
the model are those of ``grpo.py``.

    python examples/async_grpo.py

Prints how old the answers were that the trainer learned from (in versions of the weights), tokens per second, and the
time that updates took from the trainer. Writes ``metrics.csv`` and ``reward.png`` into the folder ``--out``.
"""

from __future__ import annotations

import os

# Settings of vLLM on a CPU, read at its import; the last one spares it 15 s of compiling a small function.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from grpo import GROUP_ID, TRAINED_ON, Learner, save, score
from sorting import ANSWER_TOKENS, make_env, make_model, make_tokenizer, problems
from tensordict import set_list_to_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm import vLLMWrapper
from torchrl.objectives.llm import MCAdvantage
from tqdm import trange
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from vllm import LLM

from torchrl_llm import LLMCollector, PromptSource


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="optimisation steps")
    parser.add_argument("--groups", type=int, default=4, help="prompts in a batch of the collector")
    parser.add_argument("--group-size", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--minibatch", type=int, default=64, help="answers in an optimisation step")
    parser.add_argument("--update-every", type=int, default=2, help="optimisation steps from one update to the next")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate; falls to 0 in the second half")
    parser.add_argument("--entropy", type=float, default=0.03, help="weight of the entropy bonus")
    parser.add_argument("--out", type=Path, default=Path("async_grpo_run"), help="folder for the results")
    return parser.parse_args(argv)


def make_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, slots: int) -> vLLMWrapper:
    """An engine in this process that begins with the model's weights."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        llm = LLM(
            folder, dtype="float32", enforce_eager=True, max_model_len=32, max_num_seqs=slots, disable_log_stats=True
        )
    return vLLMWrapper(
        llm,
        tokenizer=tokenizer,
        input_mode="history",
        return_log_probs=True,
        generate_kwargs={"max_tokens": ANSWER_TOKENS, "temperature": 1.0},
    )


def wait_for(answers: int, buffer: ReplayBuffer, collector: LLMCollector) -> None:
    """Waits until so many answers have been written in all."""
    while buffer.write_count < answers:
        if not collector.is_running():
            collector.join()  # raises what stopped it
        time.sleep(0.002)


def train(args: argparse.Namespace) -> list[dict[str, float]]:
    tokenizer = make_tokenizer()
    learner = Learner(make_model(args.seed, tokenizer), tokenizer, args.lr, args.entropy)
    source = PromptSource(problems(), repeats=args.group_size, shuffle=True, seed=args.seed)
    slots = args.groups * args.group_size
    # It holds the newest answers only: whatever waits here grows old.
    buffer = ReplayBuffer(
        storage=LazyStackStorage(max(2 * slots, args.minibatch)),
        batch_size=args.minibatch,
        transform=MCAdvantage(grpo_size=args.group_size, prompt_key=GROUP_ID),
    )
    collector = LLMCollector(
        source.env(make_env),
        make_policy(learner.model, tokenizer, slots),
        num_envs=slots,
        groups_per_batch=args.groups,
        max_policy_lag=2,
        postproc=lambda batch: batch.select(*TRAINED_ON),
    )
    rows: list[dict[str, float]] = []
    lags: Counter[int] = Counter()
    updating = 0.0
    with collector, trange(args.steps, unit="step") as bar:
        collector.start(buffer)
        start = time.perf_counter()
        for step in bar:
            wait_for((step + 1) * args.minibatch, buffer, collector)
            minibatch = buffer.sample()
            lag = collector.policy_version - minibatch["collector", "policy_version"]
            losses = learner.step(minibatch, progress=step / args.steps)
            if (step + 1) % args.update_every == 0:
                before = time.perf_counter()
                collector.update_policy_weights_(learner.model)
                updating += time.perf_counter() - before

            lags.update(lag.tolist())
            seconds = time.perf_counter() - start
            speed = collector.stats()["response_tokens"] / seconds
            clocks = {"tokens_per_second": speed, "updating": updating, "seconds": seconds}
            ages = {"mean_lag": lag.float().mean().item(), "max_lag": lag.max().item()}
            rows.append({"seed": args.seed, "step": step, **score(minibatch), **losses, **ages, **clocks})
            bar.set_postfix(reward=f"{rows[-1]['reward']:.3f}", lag=f"{ages['mean_lag']:.1f}", tokens_s=f"{speed:.0f}")
        books = collector.stats()

    shares = ", ".join(f"{lag}: {count / lags.total():.0%}" for lag, count in sorted(lags.items()))
    print(f"lag of what was learned from, in versions: {shares}")
    print(f"{books['response_tokens']} response tokens in {seconds:.0f} s: {speed:.0f} tokens/s")
    print(f"{books['weight_updates']} weight updates took {updating:.1f} s, {updating / seconds:.1%} of the time")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    set_list_to_stack(True).set()  # torchrl's LLM environments need it
    torch.set_num_threads(1)
    save(train(args), args.out, "optimisation step")


if __name__ == "__main__":
    main()
