"""Every public name has a place in the reference, a docstring with Examples that is executed, and types."""

import dataclasses
import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import telegrad
from telegrad import autograd, errors, nn, optim, rpc
from telegrad.nn import RemoteModule
from tests.cluster import Cluster, cluster
from tests.ports import free_port

PAGES = Path(__file__).parents[2] / "docs" / "api"
WIDEST = 94  # characters of a line of code: what a page of the site shows on a laptop without scrolling sideways
MODULES = [
    "telegrad.rpc",
    "telegrad.rpc.functions",
    "telegrad.autograd",
    "telegrad.nn",
    "telegrad.optim",
    "telegrad.launch",
    "telegrad.testing",
]
MORE = ["telegrad.observe", "telegrad.durable", "telegrad.compat"]  # whose pages show programs of their own

# Examples that start workers themselves, or make this process one.
ALONE = {"telegrad.rpc.init_rpc", "telegrad.rpc.shutdown", "telegrad.launch.local_cluster", "telegrad.launch.Cluster"}
# Their examples are whole test modules, or need what an example cannot make.
ELSEWHERE = {
    "telegrad.testing.check_distributed_grads",  # tests/testing
    "telegrad.testing.cluster",  # tests/testing
    "telegrad.nn.SharedModule",  # docs/training.md
}

NAMESPACE = {
    "DistributedOptimizer": optim.DistributedOptimizer,
    "RemoteModule": RemoteModule,
    "autograd": autograd,
    "clip_grad_norm_": optim.clip_grad_norm_,
    "dataclasses": dataclasses,
    "nn": nn,
    "rpc": rpc,
    "telegrad": telegrad,
    "time": time,
    "torch": torch,
}


def names(modules: list[str]) -> list[str]:
    found = []
    for module in modules:
        loaded = importlib.import_module(module)
        found += [f"{module}.{name}" for name in loaded.__all__ if not inspect.ismodule(getattr(loaded, name))]
    return found


def value_of(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


def test_every_name_has_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES.glob("*.md"))
    found = set(re.findall(r"^(?:::: |## )([\w.]+)$", text, flags=re.MULTILINE))
    assert set(names(MODULES + MORE)) - found == set()


def lines_of_code(text: str) -> list[str]:
    """The lines of a page that are shown as code: fenced, or indented."""
    found, fenced = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced:
            found.append(line)
        elif line.startswith("    "):
            found.append(line[4:])
    return found


def test_code_fits_the_page() -> None:
    pages = {str(path): path.read_text() for path in PAGES.parent.rglob("*.md")}
    pages |= {name: inspect.getdoc(value_of(name)) or "" for name in names(MODULES + MORE)}
    pages["telegrad.errors"] = inspect.getdoc(errors) or ""
    wide = [(page, line) for page, text in pages.items() for line in lines_of_code(text) if len(line) > WIDEST]
    # Of a docstring, what is indented is a section, and only its examples are code.
    assert [
        (page, line) for page, line in wide if page.endswith((".md", "errors")) or line.startswith((">", "."))
    ] == []


def test_every_error_is_explained() -> None:
    page = (PAGES.parent / "errors.md").read_text()
    own = [
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    ]
    assert [name for name in own if name != "TelegradError" and f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", names(MODULES))
def test_types_and_docstring(name: str) -> None:
    value = value_of(name)
    assert inspect.getdoc(value)
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        untyped = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
        assert untyped == []
        assert signature.return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize(
    "name", [name for name in names([*MODULES, "telegrad.observe"]) if name not in ALONE | ELSEWHERE]
)
def test_examples(pair: Cluster, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestFinder(recurse=False).find(value_of(name), name, globs=dict(NAMESPACE))
    tried = sum(len(each.examples) for each in examples)
    assert tried, f"{name} has no Examples"
    runner = doctest.DocTestRunner(verbose=False)
    for each in examples:
        runner.run(each)
    assert runner.failures == 0


@pytest.mark.parametrize("name", [name for name in names(MODULES + MORE) if inspect.isfunction(value_of(name))])
def test_every_function_shows_an_example(name: str) -> None:
    assert "Examples:" in (inspect.getdoc(value_of(name)) or "")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALONE))
def test_examples_that_start_workers(name: str, tmp_path: Path) -> None:
    program = f"""
        import doctest, importlib, telegrad
        from telegrad import rpc
        value = getattr(importlib.import_module({name.rpartition(".")[0]!r}), {name.rpartition(".")[2]!r})
        runner = doctest.DocTestRunner(verbose=False)
        for each in doctest.DocTestFinder(recurse=False).find(value, {name!r}, globs=dict(rpc=rpc, telegrad=telegrad)):
            assert each.examples
            runner.run(each)
        assert runner.failures == 0 and runner.tries
    """
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=150, env=environment)
