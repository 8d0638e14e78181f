"""How the tests build a ``vllm.LLM`` over the tiny model, in this process and in its own."""

from __future__ import annotations

from typing import Any

ENGINE_SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 32,
    "seed": 0,
    "disable_log_stats": True,
}
