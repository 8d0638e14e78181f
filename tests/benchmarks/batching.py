"""What ``batch_wait`` and ``max_batch`` gain for a policy that is called on batches; see ``throughput.py``.

The tiny model under ``TransformersWrapper``, prompts of very different length, responses of equal length: with
``batch_wait`` more rows share a call, with ``max_batch`` the rows of a call are of like length.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import harness  # noqa: F401  (settings and paths, before all else)
from models import load_tokenizer, tiny_model
from torchrl.envs import StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import AutoModelForCausalLM

from torchrl_llm import LLMCollector, RunnerOptions

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "batch_wait=0.05": {"batch_wait": 0.05},
    "max_batch=4": {"max_batch": 4},
    "batch_wait=0.05, max_batch=8": {"batch_wait": 0.05, "max_batch": 8},
}
RESPONSE_TOKENS = 32


def measure(slots: int, turns: int, repeats: int) -> dict[str, Any]:
    """Tokens/s of each variant, in interleaved rounds; figures are medians.

    Args:
        slots: environments.
        turns: turns per run.
        repeats: rounds.
    """
    model = AutoModelForCausalLM.from_pretrained(tiny_model()).eval()
    tokenizer = load_tokenizer(tiny_model())
    calls = 0
    generate = model.generate

    def counted(**kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return generate(**kwargs)

    model.generate = counted
    settings = {"min_new_tokens": RESPONSE_TOKENS, "max_new_tokens": RESPONSE_TOKENS, "do_sample": True}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=settings)
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    rows: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for round_ in range(repeats + 1):
        for name, options in VARIANTS.items():
            calls = 0
            begun = time.perf_counter()
            tokens = _run(policy, options, slots, turns)
            if round_:  # the first one warms up
                rates[name].append(tokens / (time.perf_counter() - begun))
                rows[name].append(turns / calls)
    base = statistics.median(rates["default"])
    table = [
        {
            "variant": name,
            "turns": turns,
            "rows per call": round(statistics.median(rows[name]), 1),
            "tokens/s": round(statistics.median(rates[name])),
            "to the default": round(statistics.median(rates[name]) / base, 2),
        }
        for name in VARIANTS
    ]
    return {"rows": table}


def _run(policy: Any, options: dict[str, Any], slots: int, turns: int) -> int:
    def make_env() -> Any:
        data = [{"query": ["word " * length]} for length in (1, 60, 3, 120, 8, 240, 2, 30)]
        return ChatEnv.from_dataloader(data, batch_size=(1,)).append_transform(StepCounter(max_steps=1))

    with LLMCollector(
        make_env, RunnerOptions(policy, **options), num_envs=slots, steps_per_batch=slots, total_steps=turns
    ) as collector:
        for _ in collector:
            pass
        return int(collector.stats()["response_tokens"])
