"""Run by every Python that a program started under `python -m telegrad.compat` starts: it comes along.

Python imports `sitecustomize` when it starts, and this folder is first on PYTHONPATH. Nothing is imported here but the
standard library; Telegrad is installed right after the process has imported torch, if it ever does.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
# Where the parent's Telegrad and Python are; a process of another Python is left alone.
VARIABLE = "TELEGRAD_COMPAT"


class _InstallAfter(importlib.abc.Loader):
    """Loads torch as its own loader does, then puts Telegrad in its place."""

    def __init__(self, loader: Any, root: str) -> None:
        self._loader = loader
        self._root = root

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if importlib.util.find_spec("telegrad") is None:
            sys.path.append(self._root)
        from telegrad import compat  # noqa: PLC0415 - only now that torch is there

        compat.install()


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the first import of torch, and steps aside."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            spec.loader = _InstallAfter(spec.loader, self._root)
        return spec


def _run_hidden_sitecustomize() -> None:
    """The environment may have a sitecustomize of its own, further down the path."""
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


prefix, _, root = os.environ.get(VARIABLE, "").partition(os.pathsep)
if prefix == sys.prefix and "torch" not in sys.modules:
    sys.meta_path.insert(0, _Finder(root))
_run_hidden_sitecustomize()
