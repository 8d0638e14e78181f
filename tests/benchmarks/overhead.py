"""What a turn costs besides the engine and the environment.

The engine's outputs are canned (real ``vllm.RequestOutput`` objects with log-probs, no model), and so is the
environment in the rows named ``runner + collector``; the rows named ``whole turn`` have torchrl's own environments.
Times are per turn, medians over ``--repeats`` runs in one process: ``wall_ms`` by the clock, ``cpu_ms`` of all threads.

    python tests/benchmarks/overhead.py
    python tests/benchmarks/overhead.py --profile history --tokens 64
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import io
import pstats
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
from torchrl.collectors.llm import LLMCollector as TorchRLCollector
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import ChatEnv, LLMEnv

from torchrl_llm import LLMCollector

MakeEnv = Callable[[int], EnvBase]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--turns", type=int, default=320, help="turns measured per run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--many-slots", type=int, default=1024, help="for the flatness; 0 leaves it out")
    parser.add_argument("--no-torchrl", action="store_true", help="leave torchrl's collector out")
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 1024])
    parser.add_argument("--modes", nargs="*", choices=harness.MODES, default=list(harness.MODES))
    parser.add_argument(
        "--profile",
        choices=(*harness.MODES, "llmenv", "chatenv"),
        help="print a profile of one mode (the first of --tokens) instead, of both threads",
    )
    parser.add_argument("--top", type=int, default=30, help="lines of the profile")
    parser.add_argument("--sort", default="tottime", help="order of the profile: tottime, cumtime, ...")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def prompts(seed: int) -> list[dict[str, list[str]]]:
    """A small dataset, which torchrl's primer starts over for ever."""
    return [{"query": [harness.question(seed + index)]} for index in range(8)]


def llm_env(seed: int) -> EnvBase:
    """torchrl's ``LLMEnv`` with its default keys, one turn a trajectory."""
    data = [{"text": [f"{harness.SYSTEM} {row['query'][0]}"]} for row in prompts(seed)]
    return LLMEnv.from_dataloader(data, batch_size=(1,), from_text=True).append_transform(StepCounter(max_steps=1))


def chat_env(seed: int, mode: str = "history", rows: int = 1) -> EnvBase:
    """torchrl's ``ChatEnv``, one turn a trajectory."""
    data = [{"query": [harness.question(seed + 8 * row + index) for row in range(rows)]} for index in range(8)]
    env = ChatEnv.from_dataloader(data, batch_size=(rows,), input_mode=mode, system_prompt=harness.SYSTEM)
    return env.append_transform(StepCounter(max_steps=1))


def ours(make_env: MakeEnv, mode: str, tokens: int, slots: int, tokenizer: Any) -> LLMCollector:
    """Our collector over a canned engine."""
    llm = harness.canned_llm(tokenizer, tokens)
    return LLMCollector(
        [functools.partial(make_env, seed) for seed in range(slots)],
        harness.vllm_policy(llm, tokenizer, mode),
        steps_per_batch=16,
    )


def torchrls(make_env: Callable[[], EnvBase], mode: str, tokens: int, tokenizer: Any) -> TorchRLCollector:
    """torchrl's collector over a canned engine."""
    llm = harness.canned_llm(tokenizer, tokens)
    return TorchRLCollector(
        make_env, policy=harness.vllm_policy(llm, tokenizer, mode), dialog_turns_per_batch=16
    )


def measure(collector: Any, turns: int, repeats: int, warmup: int) -> tuple[float, float]:
    """Wall and CPU milliseconds per turn: medians over ``repeats`` runs of at least ``turns`` turns."""
    batches = iter(collector)
    walls, cpus = [], []
    for repeat in range(repeats + 1):
        done, wanted = 0, warmup if repeat == 0 else turns
        wall, cpu = time.perf_counter(), time.process_time()
        while done < wanted:
            done += next(batches).numel()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if repeat:
            walls.append(1000 * wall / done)
            cpus.append(1000 * cpu / done)
    collector.shutdown()
    return statistics.median(walls), statistics.median(cpus)


def profile(collector: LLMCollector, turns: int, top: int, order: str) -> str:
    """The profile of ``turns`` turns, of the thread that reads and of the engine's thread."""
    batches = iter(collector)
    for _ in range(8):
        next(batches)
    profiles: list[cProfile.Profile] = []
    main = cProfile.Profile()
    # Threads that run already are reached through the engine: its next call in the thread switches a profile on.
    engine = next(iter(collector._collection._rollout.pool.runners))._engine._engine
    step = engine.step

    def profiled_step() -> Any:
        if threading.current_thread() is not threading.main_thread() and not profiles:
            profiles.append(cProfile.Profile())
            profiles[0].enable()
        return step()

    engine.step = profiled_step
    main.enable()
    done = 0
    while done < turns:
        done += len(next(batches))
    main.disable()
    engine.step = step
    collector.shutdown()
    out = io.StringIO()
    for name, result in (("the reader's thread", main), *(("the engine's thread", p) for p in profiles)):
        print(f"== {name}, {done} turns (milliseconds a turn = seconds * 1000 / {done})", file=out)
        pstats.Stats(result, stream=out).sort_stats(order).print_stats(top)
    return out.getvalue()


def row(what: str, mode: str, tokens: int, slots: int, collector: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Measures one line of the table."""
    wall, cpu = measure(collector, max(args.turns, 2 * slots), args.repeats, warmup=max(64, 2 * slots))
    return {"what": what, "mode": mode, "tokens": tokens, "slots": slots, "wall_ms": wall, "cpu_ms": cpu}


def main() -> None:
    """Measures and prints."""
    args = parse_args()
    torch.set_num_threads(1)
    harness.quiet()
    _, tokenizer = harness.tiny()

    def canned(mode: str) -> MakeEnv:
        return lambda seed: harness.canned_env(mode, seed, tokenizer)

    if args.profile:
        mode, make_env = {"llmenv": ("text", llm_env), "chatenv": ("history", chat_env)}.get(
            args.profile, (args.profile, None)
        )
        collector = ours(make_env or canned(mode), mode, args.tokens[0], args.slots, tokenizer)
        print(profile(collector, args.turns, args.top, args.sort))
        return

    rows = []
    for mode in args.modes:
        for tokens in args.tokens:
            collector = ours(canned(mode), mode, tokens, args.slots, tokenizer)
            rows.append(row("runner + collector", mode, tokens, args.slots, collector, args))
    if args.many_slots:
        for slots in (args.slots, args.many_slots):
            collector = ours(canned("text"), "text", 64, slots, tokenizer)
            rows.append(row("runner + collector, flatness", "text", 64, slots, collector, args))
    for what, mode, make_env in (("LLMEnv", "text", llm_env), ("ChatEnv", "history", chat_env)):
        if mode in args.modes:
            collector = ours(make_env, mode, 64, args.slots, tokenizer)
            rows.append(row(f"whole turn, {what}", mode, 64, args.slots, collector, args))
    if not args.no_torchrl:
        for tokens in args.tokens:
            make_batched = functools.partial(chat_env, 0, "history", args.slots)
            collector = torchrls(make_batched, "history", tokens, tokenizer)
            rows.append(row("torchrl, whole turn, ChatEnv", "history", tokens, args.slots, collector, args))
    result: dict[str, Any] = {"rows": rows}
    flat = [r["wall_ms"] for r in rows if r["what"].endswith("flatness")]
    if flat:
        result["flatness"] = flat[1] / flat[0]
    harness.report(result, args.json)


if __name__ == "__main__":
    main()
