"""What the benchmarks share: settings before imports, a canned vLLM engine, canned environments, tables.

Import this module first: it sets what vLLM and torch read when they are imported.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

# One core for the engine, one for everything else: two OpenMP threads that wait for each other in every operation
# come to a standstill when another process takes one of the cores, and then nothing can be compared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The checkout's own package is what is measured.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import json
from collections import deque
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from models import TINY_TEXT, load_tokenizer, tiny_model
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, set_list_to_stack
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens

set_list_to_stack(True).set()

MODES = ("text", "tokens", "history")
SYSTEM = (
    "A conversation between User and Assistant. The user gives a set of numbers and a target. The Assistant must find "
    "an arithmetic expression using each given number at most once that equals the target."
)
VARIANTS = 8  # different canned responses


def question(seed: int) -> str:
    """A prompt of a realistic length, different for every ``seed``."""
    numbers = [(seed * k + k) % 97 for k in (3, 7, 11, 13)]
    return (
        f"Using the numbers {numbers}, create an arithmetic expression that equals {sum(numbers)}. You may use each "
        "number at most once. Only use +, -, *, / and parentheses."
    )


class CannedEngine:
    """The part of ``vllm.LLM.llm_engine`` that a collector drives; answers every request at its next step.

    The answers are real ``vllm.RequestOutput`` objects with log-probs, and cost next to nothing to make.

    Args:
        tokenizer: a tokenizer.
        length: tokens in each response, the last of which is the end of turn.
        max_model_len: the model's context.
    """

    def __init__(self, tokenizer: Any, length: int, max_model_len: int = 8192) -> None:
        self.model_config = SimpleNamespace(max_model_len=max_model_len)
        self.tokens_made = 0
        self._tokenizer = tokenizer
        self._pending: dict[str, tuple[list[int], Any]] = {}
        self._prompt_scores: dict[tuple[int, ...], list[Any]] = {}
        self._completions: dict[bool, deque[Any]] = {True: deque(), False: deque()}
        self._length = length
        ids = tokenizer(TINY_TEXT)["input_ids"]
        ids *= 1 + (length + VARIANTS) // len(ids)
        for start in range(VARIANTS):
            response = [*ids[start : start + length - 1], tokenizer.eos_token_id]
            text = tokenizer.decode(response, skip_special_tokens=False)
            self._completions[True].append(self._completion(response, text))
            self._completions[False].append(self._completion(response, ""))

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        """Takes a request: ``{"prompt_token_ids": [...]}``, or a string."""
        ids = self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt["prompt_token_ids"]
        self._pending[request_id] = (list(ids), params)

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """Forgets requests."""
        for request_id in request_ids:
            self._pending.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        """Whether a step would answer something."""
        return bool(self._pending)

    def step(self) -> list[Any]:
        """Answers all that is there."""
        from vllm import RequestOutput

        outputs = []
        # Requests may be added from another thread while this goes on: popitem() is atomic, iteration is not.
        for request_id in list(self._pending):
            ids, params = self._pending.pop(request_id)
            completions = self._completions[bool(params.detokenize)]
            completions.rotate(1)
            scores = None if params.prompt_logprobs is None else self._scores(ids)
            outputs.append(RequestOutput(request_id, None, ids, scores, [completions[0]], finished=True))
        self.tokens_made += self._length * len(outputs)
        return outputs

    def _completion(self, ids: list[int], text: str) -> Any:
        from vllm import CompletionOutput
        from vllm.logprobs import Logprob

        scores = [{token: Logprob(-0.5 - (token % 64) / 64, 1)} for token in ids]
        return CompletionOutput(0, text, ids, None, scores, finish_reason="stop")

    def _scores(self, ids: list[int]) -> list[Any]:
        from vllm.logprobs import Logprob

        key = tuple(ids)
        if key not in self._prompt_scores:
            scores = [{token: Logprob(-1.0 - (token % 64) / 64, 1)} for token in ids[1:]]
            self._prompt_scores[key] = [None, *scores]
        return self._prompt_scores[key]


class _CannedLLM:
    """Stands for a ``vllm.LLM``; see :func:`canned_llm`."""

    def __init__(self, tokenizer: Any, length: int) -> None:
        self.llm_engine = CannedEngine(tokenizer, length)
        self._tokenizer = tokenizer

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def generate(self, prompts: Any, sampling_params: Any = None, **_: Any) -> list[Any]:
        prompts = prompts if isinstance(prompts, list) else [prompts]
        for index, prompt in enumerate(prompts):
            self.llm_engine.add_request(str(index), prompt, sampling_params)
        return self.llm_engine.step()


def canned_llm(tokenizer: Any, length: int) -> Any:
    """What torchrl's ``vLLMWrapper`` takes for a ``vllm.LLM`` (it looks at the type's name), without a model."""
    kind = type("LLM", (_CannedLLM,), {"__module__": "vllm.canned"})
    return kind(tokenizer, length)


def vllm_policy(llm: Any, tokenizer: Any, mode: str, **generate_kwargs: Any) -> Any:
    """A ``vLLMWrapper`` with log-probs over ``llm``."""
    from torchrl.modules.llm import vLLMWrapper

    return vLLMWrapper(
        llm, tokenizer=tokenizer, input_mode=mode, return_log_probs=True, generate_kwargs=generate_kwargs
    )


class CannedEnv(ChatEnv):
    """A ``ChatEnv`` whose ``reset`` and ``step`` only hand out what was made beforehand: one turn a trajectory."""

    # A class attribute: torchrl's metaclass looks at the constructor's arguments.
    tokens: Any = None
    seed: int = 0

    def prime(self, seed: int, tokens: torch.Tensor) -> CannedEnv:
        """Makes what the environment hands out."""
        rows = []
        for index in range(self.batch_size.numel()):
            text = f"{SYSTEM} {question(seed + index)}"
            chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(seed + index)}]
            prompt = {
                "history": lambda chat=chat: ChatHistory(prompt=History.from_chats([chat])[0]),
                "text": lambda text=text: Text(prompt=text),
                "tokens": lambda: Tokens(prompt=tokens),
            }[self.input_mode]()
            row = TensorDict({"query": question(seed + index)}, batch_size=())
            row.set(self.input_mode, prompt)
            for key in ("done", "terminated", "truncated"):
                row.set(key, torch.zeros(1, dtype=torch.bool))
            rows.append(row)
        self.first = rows
        self.after = []
        for row in rows:
            after = row.copy()
            after.set("reward", torch.zeros(1))
            for key in ("done", "terminated"):
                after.set(key, torch.ones(1, dtype=torch.bool))
            self.after.append(after)
        return self

    def reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        return LazyStackedTensorDict(*[row.copy() for row in self.first], stack_dim=0)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        for row, after in zip(tensordict.unbind(0), self.after, strict=True):
            row.set("next", after.copy())
        return tensordict

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        return self.step(tensordict), self.reset()


def canned_env(mode: str, seed: int, tokenizer: Any, rows: int = 1) -> CannedEnv:
    """A :class:`CannedEnv` of ``rows`` rows for a policy's input mode."""
    ids = tokenizer(f"{SYSTEM} {question(seed)}")["input_ids"]
    env = CannedEnv(batch_size=(rows,), input_mode=mode, tokenizer=tokenizer)
    return env.prime(seed, torch.tensor(ids))


def quiet() -> None:
    """Keeps warnings out of the output; to be called when everything is imported, since imports change the filters."""
    warnings.simplefilter("ignore")


def tiny() -> tuple[str, Any]:
    """The tiny model's folder and its tokenizer."""
    folder = tiny_model()
    return folder, load_tokenizer(folder)


def table(rows: list[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table; floats with three significant digits."""
    if not rows:
        return ""

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)

    heads = list(rows[0])
    cells = [heads, *[[cell(row.get(head)) for head in heads] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def report(result: Mapping[str, Any], as_json: bool) -> None:
    """Prints a result with its ``"rows"`` as one JSON object, or as a table with the other figures under it."""
    if as_json:
        print(json.dumps(result))
        return
    print(table(result["rows"]))
    for name, value in result.items():
        if name != "rows":
            print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
