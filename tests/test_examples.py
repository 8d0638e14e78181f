"""Each example runs as a user runs it: a script of its own, here with the tiny model and few turns."""

from __future__ import annotations

import csv
import math
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


def _metrics(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv, all finite; and beside it is a picture."""
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    with open(folder / "metrics.csv", newline="") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    return rows


def _mean(rows: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


@pytest.mark.slow
def test_grpo_learns(tmp_path: Path) -> None:
    # No entropy bonus and a high learning rate: quick at first, though not the best in the end.
    options = ["--groups", "4", "--minibatch", "32", "--lr", "2e-3", "--entropy", "0", "--steps", "40"]
    done = _run("grpo.py", "--out", str(tmp_path), *options)
    assert "40/40" in done.stderr, "no progress bar"
    rows = _metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(40))
    assert rows[0].keys() == {"seed", "step", "reward", "all_right", "loss", "entropy", "seconds"}
    # The mean over the first step's minibatches, in which it learns already.
    assert 2.0 < rows[0]["entropy"] < math.log(12) + 0.01, "the model begins with all tokens nearly alike"
    first, last = _mean(rows[:5], "reward"), _mean(rows[-5:], "reward")
    assert first < 0.17
    assert last > 2 * first, "measured: 0.08 to 0.10, and 0.29 to 0.46, in five runs"
    assert re.search(r"^seed 0: mean reward 0\.\d+ in the first 2 steps, 0\.\d+ in the last", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_grpo_with_several_seeds_repeats_none(tmp_path: Path) -> None:
    options = ["--groups", "2", "--group-size", "4", "--minibatch", "8", "--steps", "2"]
    _run("grpo.py", "--seed", "3", "4", "--out", str(tmp_path), *options)
    rows = _metrics(tmp_path)
    assert [(row["seed"], row["step"]) for row in rows] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert rows[0]["entropy"] != rows[2]["entropy"]


@pytest.mark.slow
def test_async_grpo(tmp_path: Path) -> None:
    options = ["--groups", "2", "--group-size", "8", "--minibatch", "16", "--update-every", "2", "--steps", "12"]
    done = _run("async_grpo.py", "--out", str(tmp_path), *options)
    assert "12/12" in done.stderr, "no progress bar"
    rows = _metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(12))
    clocks = {"tokens_per_second", "updating", "seconds"}
    learned = {"seed", "step", "reward", "all_right", "loss", "entropy"}
    assert rows[0].keys() == learned | {"mean_lag", "max_lag"} | clocks
    assert all(0 <= row["mean_lag"] <= row["max_lag"] for row in rows)
    assert all(row["max_lag"] <= row["step"] // 2 for row in rows), "older than the first weights"
    assert any(row["max_lag"] > 0 for row in rows), "of six updates not one found an answer in the buffer"
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert rows[0]["updating"] == 0 < rows[-1]["updating"] < rows[-1]["seconds"]

    shares = re.search(r"^lag of what was learned from, in versions: (.*)$", done.stdout, re.MULTILINE)
    assert shares is not None
    assert sum(int(share) for share in re.findall(r"(\d+)%", shares[1])) == pytest.approx(100, abs=3)
    assert re.search(r"^\d+ response tokens in \d+ s: \d+ tokens/s$", done.stdout, re.MULTILINE)
    assert re.search(r"^6 weight updates took \d+\.\d s, \d+\.\d% of the time$", done.stdout, re.MULTILINE)
