"""Where Telegrad cannot work, importing it says so; a newer torch than tested is a warning."""

import importlib
import subprocess
import sys

import pytest

import telegrad
from telegrad import _requirements
from telegrad._requirements import check_requirements, judge_torch


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0+cpu"])
def test_tested_versions_pass(version: str) -> None:
    assert judge_torch(version) is None


@pytest.mark.parametrize("version", ["2.10.2", "1.13.1", "unknown"])
def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(_requirements, "torch_version", lambda: version)
    with pytest.raises(ImportError, match=rf"needs torch 2\.11 or newer.*{version} is installed"):
        check_requirements()


def test_a_newer_torch_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_requirements, "torch_version", lambda: "2.14.0")
    with pytest.warns(UserWarning, match=r"tested with torch 2\.11 to 2\.13, and 2\.14\.0"):
        check_requirements()


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_requirements, "torch_version", lambda: None)
    with pytest.raises(ImportError, match="no torch is installed here"):
        check_requirements()


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ImportError, match=r"(?s)Linux only.*darwin.*container"):
        check_requirements()


def test_the_version_of_torch_is_read_without_importing_it() -> None:
    program = "import sys, telegrad; from telegrad._requirements import torch_version; v = torch_version(); \
assert 'torch' not in sys.modules; import torch; assert torch.__version__ == v"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=150)


def test_completion_shows_what_users_use() -> None:
    assert {"rpc", "autograd", "nn", "optim", "local_cluster"} <= set(dir(telegrad))
    packages = ("compat", "durable", "launch", "nn", "observe", "optim", "rpc.functions", "testing")
    others = [importlib.import_module(f"telegrad.{name}") for name in packages]
    for module in (telegrad, telegrad.rpc, telegrad.autograd, *others):
        assert all(hasattr(module, name) for name in module.__all__)
        assert set(dir(module)) <= {*module.__all__, "__version__"}
        assert [name for name in dir(module) if name.startswith("_") and name != "__version__"] == []
    assert {"agent", "importlib", "client"}.isdisjoint(dir(telegrad.rpc))
