"""What a weight update costs, per mode, beside vLLM's bare ``reload_weights`` of the same weights from shared memory.

Every figure is a ratio within one run: bare reloads (the engine idle, the file written beforehand, the prefix cache
reset) and updates take turns. An update begins with the trainer's state dict and ends when all policies have switched.
"""

from __future__ import annotations

import itertools
import queue
import shutil
import statistics
import time
from typing import Any

import harness
from fakes import ScriptedEnv
from models import find_model, load_tokenizer, tiny_model
from torchrl.modules.llm import vLLMWrapper
from transformers import AutoModelForCausalLM

from torchrl_llm import LLMCollector
from torchrl_llm.weight_files import write_folder

MODES = ("continue", "wait", "restart")


def measure(model: str, slots: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds of a bare reload and of updates in each mode; medians.

    Args:
        model: ``"tiny"`` or ``"smollm2"``.
        slots: requests in flight during an update.
        tokens: of a response.
        repeats: updates per mode, and bare reloads.
    """
    from vllm import LLM

    folder = tiny_model() if model == "tiny" else find_model()
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=1024, disable_log_stats=True)
    trainer = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    state = trainer.state_dict()
    named = {
        name: tensor
        for name, tensor in state.items()
        if name != "lm_head.weight" or not trainer.config.tie_word_embeddings
    }
    written = write_folder(named)
    seconds: dict[str, list[float]] = {name: [] for name in ("bare", "idle", *MODES)}
    lost: dict[str, list[int]] = {name: [] for name in MODES}
    generate = {"max_tokens": tokens, "ignore_eos": True}
    policy = vLLMWrapper(llm, tokenizer=load_tokenizer(folder), input_mode="text", generate_kwargs=generate)

    def envs() -> list[Any]:
        return [ScriptedEnv(f"a story of {n}" for n in itertools.count()) for _ in range(slots)]

    try:
        with LLMCollector(envs(), policy, steps_per_batch=1) as collector:
            for round_ in range(repeats + 1):
                bare = _time(lambda: _reload(llm, written))
                idle = _time(lambda: collector.update_policy_weights_(state))
                if round_:
                    seconds["bare"].append(bare)
                    seconds["idle"].append(idle)
        with LLMCollector(envs(), policy, steps_per_batch=1) as collector:
            target: queue.Queue[Any] = queue.Queue()
            collector.start(target)
            for _ in range(repeats):
                for mode in MODES:
                    target.get()
                    before = collector.stats()["tokens_discarded"]
                    seconds[mode].append(
                        _time(lambda mode=mode: collector.update_policy_weights_(state, update_mode=mode))
                    )
                    lost[mode].append(collector.stats()["tokens_discarded"] - before)
        for _ in range(repeats):
            seconds["bare"].append(_time(lambda: _reload(llm, written)))
    finally:
        shutil.rmtree(written)
    bare = statistics.median(seconds["bare"])
    rows = [
        {
            "update": {"bare": "bare reload_weights", "idle": "update, idle"}.get(name, f"update, {name}"),
            "requests in flight": slots if name in MODES else 0,
            "ms": round(1000 * statistics.median(times), 1),
            "to the bare reload": round(statistics.median(times) / bare, 2),
            "tokens lost": round(statistics.mean(lost[name]), 1) if name in MODES else 0,
        }
        for name, times in seconds.items()
    ]
    return {"model": model, "rows": rows}


def _reload(llm: Any, folder: str) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    llm.reset_prefix_cache()


def _time(call: Any) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    harness.quiet()
    result = measure(arguments.model, arguments.slots, arguments.tokens, arguments.repeats)
    harness.report(result, arguments.json)


if __name__ == "__main__":
    main()
