"""Each example runs as a user runs it: a script of its own, here with the tiny model and few turns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The package is found in the checkout whether or not it is installed.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_quickstart(engine: str, tiny_model: str) -> None:
    options = ["--turns", "10", "--envs", "4", "--max-tokens", "8", "--show", "2"]
    done = _run("quickstart.py", "--model", tiny_model, "--engine", engine, *options)
    assert f"on {engine}" in done.stdout
    assert len(re.findall(r"^--- trajectory \d+, reward [01]\.\d, (stop|length)$", done.stdout, re.MULTILINE)) == 2
    assert len(re.findall(r"^user: Using the numbers \[", done.stdout, re.MULTILINE)) == 2
    assert len(re.findall(r"^assistant: ", done.stdout, re.MULTILINE)) == 2
    totals = re.search(r"^10 turns, (\d+) response tokens in [\d.]+ s: \d+ tokens/s$", done.stdout, re.MULTILINE)
    assert totals is not None
    assert 10 <= int(totals[1]) <= 80
    assert "10/10" in done.stderr, "no progress bar"


@pytest.mark.slow
def test_replay_buffer(tiny_model: str) -> None:
    done = _run("replay_buffer.py", "--model", tiny_model, "--turns", "12", "--max-tokens", "8")
    assert done.stdout.splitlines()[-1] == "12 turns collected"


@pytest.mark.slow
def test_queue_consumer(tiny_model: str) -> None:
    done = _run("queue_consumer.py", "--model", tiny_model, "--turns", "12", "--max-tokens", "8")
    lines = re.findall(r"^trajectory (\d+): 1 turn\(s\), reward [01]\.\d$", done.stdout, re.MULTILINE)
    assert len(lines) == len(set(lines)) == 12


@pytest.mark.slow
def test_ray_cluster(tiny_model: str) -> None:
    """A worker is killed on the way; all turns come all the same, and the books say what was lost."""
    options = ["--engine", "transformers", "--envs", "4", "--turns", "60", "--max-tokens", "4", "--kill-one"]
    done = _run("ray_cluster.py", "--model", tiny_model, *options)
    assert re.search(r"^killing worker 0, process \d+$", done.stdout, re.MULTILINE) or "killing worker 0" in done.stderr
    assert re.search(r"^60 turns, [\d.]+ turns/s, mean reward 0\.\d+$", done.stdout, re.MULTILINE)
    workers = re.findall(r"^worker (\d): (\d+) turns, \d+ tokens/s, (\d) restarts$", done.stdout, re.MULTILINE)
    assert [(worker, restarts) for worker, _, restarts in workers] == [("0", "1"), ("1", "0")]
    books = re.search(r"^(\d+) trajectories begun = (\d+) delivered \+ (\d+) recorded", done.stdout, re.MULTILINE)
    assert books is not None
    assert int(books[1]) == int(books[2]) + int(books[3])
    assert int(books[2]) == 60
    assert "60/60" in done.stderr, "no progress bar"
