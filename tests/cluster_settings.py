"""How the tests start Ray, and what its workers are told."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


def settings(num_cpus: int | None) -> dict[str, Any]:
    """Arguments of ``ray.init``; without a number of CPUs, for a cluster that runs already."""
    own = {} if num_cpus is None else {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    return {
        **own,
        "log_to_driver": False,
        "configure_logging": False,
        "runtime_env": runtime_env(),
    }


def runtime_env() -> dict[str, Any]:
    """Workers import what the tests import; without vLLM, whose import takes half of a worker's start."""
    paths = [TESTS.parent, TESTS, TESTS / "ray", TESTS.parent / "examples"]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    return {"env_vars": variables, "worker_process_setup_hook": hide_vllm}


def hide_vllm() -> None:
    """Runs in each of Ray's worker processes, before anything else."""
    sys.modules["vllm"] = None  # type: ignore[assignment]
