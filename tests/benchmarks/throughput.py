"""How much of an engine's speed a collector keeps: response tokens per second on real vLLM.

In one run, on one engine, with the very same requests (prompts and response lengths):

* ``llm.generate``: all requests given at once, the best that the engine can do with this ``max_num_seqs``;
* ``LLMCollector``: this package's collector;
* ``torchrl LLMCollector``: torchrl's own, with the same environments and the same policy.

The three run one after the other in each of ``--repeats`` rounds, in changing order; ratios are medians over rounds.
Lengths are enforced in the engine, for all three alike: a request stops after the tokens drawn (or recorded) for its
prompt, so that no path is favoured by what it happens to sample. Scenarios:

* ``lognormal``: one turn a trajectory, lengths log-normal (median 33, sigma 1, at most 512);
* ``countdown``: torchrl's ``CountdownEnv``, natural lengths (recorded in the first run), at most 128 tokens;
* ``tools``: three turns a trajectory with a tool between them that takes 0.3 s; lengths as in ``lognormal``.
  torchrl's collector calls the tool once for all its rows, which is the best case for a batched environment.

* ``batching``: no engine; what ``batch_wait`` and ``max_batch`` gain under ``TransformersWrapper`` (``batching.py``).

    python tests/benchmarks/throughput.py
    python tests/benchmarks/throughput.py --slots 32
    python tests/benchmarks/throughput.py --scenario countdown --repeats 1
    python tests/benchmarks/throughput.py --scenario tools --slots 32
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import math
import os
import random
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import batching
import harness
import models
from tensordict import TensorDictBase, lazy_stack
from torchrl.collectors.llm import LLMCollector as TorchRLCollector
from torchrl.data.llm import History
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv, DataLoadingPrimer
from torchrl.envs.llm.datasets.countdown import CountdownEnv

from torchrl_llm import LLMCollector

PATHS = ("llm.generate", "LLMCollector", "torchrl LLMCollector")
MEDIAN, SIGMA, LONGEST = 33, 1.0, 512  # of the log-normal lengths
TOOL_TURNS = 3


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=("lognormal", "countdown", "tools", "batching"), default="lognormal")
    parser.add_argument(
        "--model", help="tiny, smollm2, a local folder or a hub name (default: tiny; smollm2 for countdown)"
    )
    parser.add_argument("--slots", type=int, default=16, help="environments")
    parser.add_argument("--max-num-seqs", type=int, help="of the engine (default: as many as slots)")
    parser.add_argument(
        "--mode", choices=("history", "text"), default="history", help="of env and policy; text for lognormal only"
    )
    parser.add_argument("--turns", type=int, help="turns per run (default: 128; 64 for countdown; 288 for tools)")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest response in the countdown scenario")
    parser.add_argument("--tool-seconds", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine-process", action="store_true", help="run the engine in a process of its own")
    parser.add_argument("--no-torchrl", action="store_true", help="leave torchrl's collector out")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


class Meter:
    """Sits in the engine: sets each request's length, records requests, counts tokens. The same for every path.

    Args:
        llm: a ``vllm.LLM`` in this process.
        length_of: tokens for a prompt's ids; ``None`` to let the response end by itself.
    """

    def __init__(self, llm: Any, length_of: Callable[[list[int]], int | None]) -> None:
        self.length_of = length_of
        self.cap: int | None = None
        self.natural: dict[int, int] = {}
        self.reset()
        engine = llm.llm_engine
        self._add, self._step = engine.add_request, engine.step
        engine.add_request, engine.step = self.add_request, self.step

    def reset(self) -> None:
        """Forgets what was recorded."""
        self.requests: list[tuple[list[int], Any]] = []
        self.tokens = self.steps = 0

    def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """The engine's method, with the length set."""
        ids = list(prompt["prompt_token_ids"])
        length = self.length_of(ids)
        if self.cap is not None:
            length = min(self.cap, length or self.cap)
        if length is not None:
            params = params.clone()
            params.max_tokens, params.ignore_eos = length, True
        self.requests.append((ids, params))
        return self._add(request_id, prompt, params, *args, **kwargs)

    def step(self) -> list[Any]:
        """The engine's method, counting."""
        outputs = self._step()
        self.steps += 1
        for output in outputs:
            if output.finished:
                length = len(output.outputs[0].token_ids)
                self.tokens += length
                self.natural.setdefault(hash(tuple(output.prompt_token_ids)), length)
        return outputs


class Tasks:
    """Prompts that several environments share: each is handed out once, or in a circle.

    Args:
        items: the prompts, as a data loader yields them.
        circle: whether to begin again at the end.
    """

    def __init__(self, items: Iterable[Any], circle: bool = False) -> None:
        self._items = itertools.cycle(items) if circle else iter(items)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._lock:
            item = next(self._items)
        return item.copy() if isinstance(item, TensorDictBase) else dict(item)

    def feed(self, env: EnvBase) -> EnvBase:
        """Makes ``env`` take its prompts from here."""
        [primer] = [t for t in env.transform if isinstance(t, DataLoadingPrimer)]
        primer._queue.clear()
        primer.dataloader = primer.endless_dataloader = self
        return env


class SlowTool(Transform):
    """Answers each of the model's messages after some time.

    Args:
        seconds: how long a call takes.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        time.sleep(self.seconds)
        answer = History(role="tool", content="The result is 42.")
        prompts = next_tensordict["history"].prompt.unbind(0)
        next_tensordict["history"].prompt = lazy_stack(
            [prompt.append(answer, inplace=False, dim=-1) for prompt in prompts]
        )
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset


class Scenario:
    """What is run: prompts, environments, lengths.

    Args:
        args: the command line.
        tokenizer: the model's.
    """

    def __init__(self, args: argparse.Namespace, tokenizer: Any) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.turns_each = TOOL_TURNS if args.scenario == "tools" else 1
        self.env_threads = args.slots if args.scenario == "tools" else 0
        # torchrl's collector takes its rows in whole rounds: so do all, to run the same trajectories.
        rounds = max(1, round(args.turns / (args.slots * self.turns_each)))
        self.trajectories = rounds * args.slots
        self.turns = self.trajectories * self.turns_each
        draw = random.Random(args.seed)
        self.lengths = [
            [max(1, min(LONGEST, round(draw.lognormvariate(math.log(MEDIAN), SIGMA)))) for _ in range(self.turns_each)]
            for _ in range(self.trajectories)
        ]
        self.seen: Counter[int] = Counter()
        self.tasks = self._tasks()

    def _tasks(self) -> list[Any]:
        if self.args.scenario == "countdown":
            [primer] = [t for t in self._countdown(1).transform if isinstance(t, DataLoadingPrimer)]
            return list(itertools.islice(iter(primer.dataloader), self.trajectories))
        return [
            {"query": [f"Task {index:05d}. {harness.question(self.args.seed + index)}"]}
            for index in range(self.trajectories)
        ]

    def _countdown(self, rows: int) -> EnvBase:
        return CountdownEnv(num_envs=rows, seed=self.args.seed, tokenizer=self.tokenizer)

    def make_env(self, tasks: Tasks, rows: int = 1) -> EnvBase:
        """An environment of ``rows`` rows over the shared tasks."""
        if self.args.scenario == "countdown":
            return tasks.feed(self._countdown(rows))
        env = ChatEnv.from_dataloader(
            [{"query": ["?"] * rows}],
            batch_size=(rows,),
            input_mode=self.args.mode,
            tokenizer=self.tokenizer,
        )
        if self.args.scenario == "tools":
            env = env.append_transform(SlowTool(self.args.tool_seconds))
        return tasks.feed(env.append_transform(StepCounter(max_steps=self.turns_each)))

    def length_of(self, ids: list[int]) -> int | None:
        """Tokens of the response to a prompt: drawn by the task's number and the turn's."""
        if self.args.scenario == "countdown":
            return None
        found = re.search(r"Task (\d{5})", self.tokenizer.decode(ids[:48]))
        assert found is not None, "the prompt does not begin with its task's number"
        task = int(found[1])
        turn = self.seen[task] % self.turns_each
        self.seen[task] += 1
        return self.lengths[task][turn]


class Run(NamedTuple):
    """What one run of one path took."""

    tokens: int
    steps: int
    seconds: float

    @property
    def speed(self) -> float:
        """Response tokens per second."""
        return self.tokens / self.seconds


class Bench:
    """One engine, one policy, and the three ways to run them.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        self.args = args
        folder = (
            models.tiny_model()
            if args.model == "tiny"
            else models.find_model(None if args.model == "smollm2" else args.model)
        )
        tokenizer = models.load_tokenizer(folder)
        self.llm = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=args.max_num_seqs,
            disable_log_stats=True,
            seed=args.seed,
        )
        self.scenario = Scenario(args, tokenizer)
        self.meter = Meter(self.llm, self.scenario.length_of)
        self.policy = harness.vllm_policy(self.llm, tokenizer, args.mode, max_tokens=args.max_tokens, temperature=0.7)
        self.recorded: list[tuple[list[int], Any]] = []

    def run(self, path: str, trajectories: int) -> Run:
        """Runs one path over the first ``trajectories`` tasks."""
        gc.collect()
        self.llm.reset_prefix_cache()
        self.meter.reset()
        self.scenario.seen.clear()
        seconds = {
            "llm.generate": self._generate,
            "LLMCollector": self._ours,
            "torchrl LLMCollector": self._torchrls,
        }[path](trajectories)
        return Run(self.meter.tokens, self.meter.steps, seconds)

    def _generate(self, trajectories: int) -> float:
        """All that the collector asked for, at once."""
        prompts = [{"prompt_token_ids": ids} for ids, _ in self.recorded]
        params = [params.clone() for _, params in self.recorded]
        self.meter.length_of = lambda ids: None  # they have their lengths
        start = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        self.meter.length_of = self._length_of
        return seconds

    def _length_of(self, ids: list[int]) -> int | None:
        if self.args.scenario == "countdown":
            return self.meter.natural.get(hash(tuple(ids)))
        return self.scenario.length_of(ids)

    def _ours(self, trajectories: int) -> float:
        tasks = Tasks(self.scenario.tasks[:trajectories])
        with LLMCollector(
            functools.partial(self.scenario.make_env, tasks),
            self.policy,
            num_envs=self.args.slots,
            steps_per_batch=self.args.slots,
            env_threads=self.scenario.env_threads,
        ) as collector:
            start = time.perf_counter()
            turns = sum(batch.numel() for batch in collector)
            seconds = time.perf_counter() - start
        assert turns == trajectories * self.scenario.turns_each
        # With the lengths that came out, and the engine parameters of our runner.
        self.recorded = []
        for ids, params in self.meter.requests:
            params = params.clone()
            params.max_tokens = self._recorded_length(ids, params)
            params.ignore_eos = True
            self.recorded.append((ids, params))
        return seconds

    def _recorded_length(self, ids: list[int], params: Any) -> int:
        if params.ignore_eos:
            return params.max_tokens
        return self.meter.natural[hash(tuple(ids))]

    def _torchrls(self, trajectories: int) -> float:
        tasks = Tasks(self.scenario.tasks[:trajectories], circle=True)
        collector = TorchRLCollector(
            self.scenario.make_env(tasks, self.args.slots),
            policy=self.policy,
            dialog_turns_per_batch=self.args.slots,
            total_dialog_turns=trajectories * self.scenario.turns_each,
        )
        start = time.perf_counter()
        turns = sum(batch.numel() for batch in collector)
        seconds = time.perf_counter() - start
        collector.shutdown()
        assert turns == trajectories * self.scenario.turns_each
        return seconds

    def close(self) -> None:
        """Ends the engine."""
        self.llm.llm_engine.engine_core.shutdown()


def measure(bench: Bench, paths: list[str], repeats: int) -> dict[str, Any]:
    """Warms up, then runs the rounds."""
    ours = "LLMCollector"
    bench.meter.cap = 8
    for path in (ours, *(path for path in paths if path != ours)):
        bench.run(path, bench.args.slots)
    bench.meter.cap = None
    bench.meter.natural.clear()
    bench.meter.length_of = bench._length_of
    rounds: list[dict[str, Run]] = []
    for index in range(repeats):
        # Ours goes first in the first round, since it is its requests that llm.generate is given.
        first = (paths.index(ours) + index) % len(paths)
        order = paths[first:] + paths[:first]
        rounds.append({path: bench.run(path, bench.scenario.trajectories) for path in order})
    rows = []
    for path in paths:
        runs = [result[path] for result in rounds]
        rows.append(
            {
                "path": path,
                "turns": bench.scenario.turns,
                "tokens": round(statistics.median(run.tokens for run in runs)),
                "engine steps": round(statistics.median(run.steps for run in runs)),
                "seconds": statistics.median(run.seconds for run in runs),
                "tokens/s": statistics.median(run.speed for run in runs),
                "turns/s": statistics.median(bench.scenario.turns / run.seconds for run in runs),
            }
        )

    def ratio(one: str, other: str) -> list[float]:
        return [runs[one].speed / runs[other].speed for runs in rounds]

    result: dict[str, Any] = {"rows": rows}
    for other in paths:
        if other != ours:
            ratios = ratio(ours, other)
            result[f"{ours} / {other}"] = statistics.median(ratios)
            result[f"{ours} / {other}, least and most"] = [round(min(ratios), 3), round(max(ratios), 3)]
    return result


def main() -> None:
    """Measures and prints."""
    args = parse_args()
    if args.scenario == "batching":
        harness.quiet()
        harness.report(batching.measure(args.slots, args.turns or 128, args.repeats), args.json)
        return
    args.model = args.model or ("smollm2" if args.scenario == "countdown" else "tiny")
    args.max_num_seqs = args.max_num_seqs or args.slots
    args.turns = args.turns or {"lognormal": 128, "countdown": 64, "tools": 288}[args.scenario]
    if args.engine_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if args.mode == "text" and args.scenario != "lognormal":
        raise SystemExit("--mode text is for --scenario lognormal")
    paths = [path for path in PATHS if not (args.no_torchrl and path.startswith("torchrl"))]
    bench = Bench(args)
    harness.quiet()
    try:
        result = measure(bench, paths, args.repeats)
    finally:
        bench.close()
    settings = {
        key: getattr(args, key)
        for key in ("scenario", "model", "mode", "slots", "max_num_seqs", "repeats", "seed", "engine_process")
    }
    harness.report({**settings, **result} if args.json else result, args.json)


if __name__ == "__main__":
    main()
