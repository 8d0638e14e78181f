"""What ``import torchrl_llm`` costs, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys

import torchrl_llm


def test_importing_the_package_imports_no_engine_and_no_cluster() -> None:
    code = (
        "import sys, torchrl_llm; "
        "heavy = [m for m in ('vllm', 'ray', 'transformers', 'torchrl.collectors') if m in sys.modules]; "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_imports_no_more_than_torchrl_does() -> None:
    code = "import sys, {}; print(*sorted(m.split('.')[0] for m in sys.modules))"
    loaded = {
        name: set(
            subprocess.run(
                [sys.executable, "-c", code.format(name)], check=True, capture_output=True, text=True
            ).stdout.split()
        )
        for name in ("torchrl", "torchrl_llm")
    }
    assert loaded["torchrl_llm"] - loaded["torchrl"] <= {"torchrl_llm"}


def test_every_public_name_is_there_and_is_listed() -> None:
    assert dir(torchrl_llm) == sorted(torchrl_llm.__all__)
    for name in torchrl_llm.__all__:
        assert getattr(torchrl_llm, name).__name__ == name
