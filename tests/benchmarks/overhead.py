"""What a turn costs besides the engine and the environment.

The engine's outputs are canned (real ``vllm.RequestOutput`` objects with log-probs, no model), and so is the
environment in the rows named ``runner + collector``; the rows named ``whole turn`` have torchrl's own environments.
Times are milliseconds per turn over ``--repeats`` runs: ``best_ms`` and ``median_ms`` by the clock, ``cpu_ms`` the
least of all threads' CPU time. On a machine that does other things as well, ``best_ms`` is the one to look at.

    python tests/benchmarks/overhead.py
    python tests/benchmarks/overhead.py --profile history --tokens 64
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import io
import itertools
import pstats
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    return TorchRLCollector(make_env, policy=harness.vllm_policy(llm, tokenizer, mode), dialog_turns_per_batch=16)


@dataclass
class Case:
    """A collector to measure, and what its runs took, per turn in milliseconds."""

    what: str
    mode: str
    tokens: int
    slots: int
    collector: Any
    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """One line of the table."""
        return {
            "what": self.what,
            "mode": self.mode,
            "tokens": self.tokens,
            "slots": self.slots,
            "best_ms": min(self.walls),
            "median_ms": statistics.median(self.walls),
            "cpu_ms": min(self.cpus),
        }


def measure(cases: list[Case], turns: int, repeats: int) -> list[dict[str, Any]]:
    """Runs the cases by turns, so that a busy machine meets all of them, and ends their collectors."""
    batches = [iter(case.collector) for case in cases]
    for repeat in range(repeats + 1):
        for case, source in zip(cases, batches, strict=True):
            done = 0
            wanted = max(64, 2 * case.slots) if repeat == 0 else max(turns, 2 * case.slots)
            wall, cpu = time.perf_counter(), time.process_time()
            while done < wanted:
                done += next(source).numel()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if repeat:
                case.walls.append(1000 * wall / done)
                case.cpus.append(1000 * cpu / done)
    for case in cases:
        case.collector.shutdown()
    return [case.row() for case in cases]


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

    def run(*cases: Case) -> list[dict[str, Any]]:
        return measure(list(cases), args.turns, args.repeats)

    rows = []
    for mode, tokens in itertools.product(args.modes, args.tokens):
        collector = ours(canned(mode), mode, tokens, args.slots, tokenizer)
        rows += run(Case("runner + collector", mode, tokens, args.slots, collector))
    for what, mode, make_env in (("LLMEnv", "text", llm_env), ("ChatEnv", "history", chat_env)):
        if mode in args.modes:
            collector = ours(make_env, mode, 64, args.slots, tokenizer)
            rows += run(Case(f"whole turn, {what}", mode, 64, args.slots, collector))
    if not args.no_torchrl:
        for tokens in args.tokens:
            make_batched = functools.partial(chat_env, 0, "history", args.slots)
            collector = torchrls(make_batched, "history", tokens, tokenizer)
            rows += run(Case("torchrl, whole turn, ChatEnv", "history", tokens, args.slots, collector))
    result: dict[str, Any] = {"rows": rows}
    if args.many_slots:
        pair = run(
            *(
                Case("flatness", "text", 64, slots, ours(canned("text"), "text", 64, slots, tokenizer))
                for slots in (args.slots, args.many_slots)
            )
        )
        rows += pair
        result["flatness"] = pair[1]["best_ms"] / pair[0]["best_ms"]
    harness.report(result, args.json)


if __name__ == "__main__":
    main()
