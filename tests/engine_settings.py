"""How the tests build a ``vllm.LLM`` over the tiny model, in this process and in its own."""

from __future__ import annotations

from typing import Any

import pytest

ENGINE_SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 32,
    "seed": 0,
    "disable_log_stats": True,
}


def make_multiprocess_llm(folder: str, **settings: Any) -> Any:
    """A ``vllm.LLM`` whose engine runs in a process of its own."""
    import vllm.envs
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        vllm.envs.disable_envs_cache()  # an engine made before has fixed what vLLM reads of the environment
        llm = LLM(folder, **(ENGINE_SETTINGS | settings))
    assert type(llm.llm_engine.engine_core).__name__ == "SyncMPClient"
    return llm
