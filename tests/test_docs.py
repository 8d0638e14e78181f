"""The examples in the docstrings run, and every module says what it is for."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import torchrl_llm

MODULES = sorted(module.name for module in pkgutil.walk_packages(torchrl_llm.__path__, "torchrl_llm."))


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for_and_stays_readable(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__ and len(module.__doc__) > 20
    assert len(inspect.getsource(module).splitlines()) <= 420


def test_the_examples_are_really_found() -> None:
    finder = doctest.DocTestFinder()
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) >= 8
