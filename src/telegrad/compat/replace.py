"""`install` puts Telegrad's modules in the place of torch's, and `uninstall` puts torch's back.

Three things are changed, and each change is written down so that it can be undone: the entries of `sys.modules`, the
attributes of parent packages, and names that modules imported earlier have already bound to torch's objects.
"""

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed  # noqa: F401 - the parent of what is replaced

from telegrad.compat.failures import leave_failures_to_logging, print_failures
from telegrad.rpc.torch_modes import stand_in

# What stands in for what. Those of torch's that were not imported yet are never loaded. A submodule that is not listed
# here but lies in `telegrad/compat/rpc` is found there when it is first imported.
STAND_INS = {
    "torch.distributed.rpc": "telegrad.compat.rpc",
    "torch.distributed.rpc._utils": "telegrad.compat.rpc._utils",
    "torch.distributed.rpc.api": "telegrad.compat.rpc.api",
    "torch.distributed.rpc.backend_registry": "telegrad.compat.rpc.backend_registry",
    "torch.distributed.rpc.constants": "telegrad.compat.rpc.constants",
    "torch.distributed.rpc.functions": "telegrad.compat.rpc.functions",
    "torch.distributed.rpc.internal": "telegrad.compat.rpc.internal",
    "torch.distributed.rpc.options": "telegrad.compat.rpc.options",
    "torch.distributed.rpc.rref_proxy": "telegrad.compat.rpc.rref_proxy",
    "torch.distributed.autograd": "telegrad.compat.autograd",
    "torch.distributed.optim.optimizer": "telegrad.compat.optimizer",
    "torch.distributed.nn.api.remote_module": "telegrad.compat.remote_module",
    "torch._C._distributed_rpc": "telegrad.compat.rpc",
    "torch._C._distributed_autograd": "telegrad.compat.autograd",
}

# Single functions that stand in for torch's within a module that stays.
FUNCTIONS = {
    ("torch.futures", "collect_all"): "telegrad.compat.futures",
    ("torch.futures", "wait_all"): "telegrad.compat.futures",
}

# torch packages that bind names of the above when they are imported: their own, to be bound anew.
_BINDERS = ("torch.distributed.nn", "torch.distributed.nn.api", "torch.distributed.optim")

# TorchScript knows torch's own classes by identity, and nothing else will do for it.
_KEEP_TORCH = ("torch._jit_internal", "torch.jit", "torch._C")

_MISSING = object()
_INTERNAL = "telegrad.compat.rpc.internal"


class Replacement:
    """All that one `install` changed."""

    def __init__(self) -> None:
        self._modules: list[tuple[str, Any]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._absent = [name for name in _BINDERS if name not in sys.modules]
        # By identity, what to bind instead: of torch's objects, and of Telegrad's by the name torch has for them.
        self._there: dict[int, Any] = {}
        self._back: dict[int, Any] = {}
        self._kept: list[Any] = []  # alive, so that their identity stays their own
        self.refuse_script_modules: Callable[[], None] = lambda: None  # set once they travel

    def apply(self) -> None:
        """Change everything."""
        for torch_name in [name for name in sys.modules if name.startswith("torch.distributed.rpc.")]:
            if torch_name not in STAND_INS:  # torch's own, which would not fit the rest
                self._modules.append((torch_name, sys.modules.pop(torch_name)))
        for torch_name, our_name in STAND_INS.items():
            ours = importlib.import_module(our_name)
            theirs = sys.modules.get(torch_name)
            if theirs is not None:
                self._pair(theirs, ours)
            self._modules.append((torch_name, theirs))
            sys.modules[torch_name] = ours
            parent_name, _, child = torch_name.rpartition(".")
            parent = sys.modules.get(parent_name)
            if parent is not None and parent.__name__.startswith("torch"):
                self._set(parent, child, ours)
        for (module, name), our_name in FUNCTIONS.items():
            self._note(getattr(sys.modules[module], name), getattr(importlib.import_module(our_name), name))
        self._rebind(self._there, record=True)
        print_failures()

    def undo(self) -> None:
        """Change everything back, also in modules that were imported meanwhile."""
        leave_failures_to_logging()
        self._rebind(self._back, record=False)
        for target, name, value in reversed(self._attributes):
            if value is _MISSING:
                if name in vars(target):
                    delattr(target, name)
            else:
                setattr(target, name, value)
        for torch_name in [name for name in sys.modules if name.startswith("torch.distributed.rpc.")]:
            del sys.modules[torch_name]
        for torch_name, theirs in reversed(self._modules):
            if theirs is None:
                sys.modules.pop(torch_name, None)
            else:
                sys.modules[torch_name] = theirs
        for name in self._absent:  # they hold Telegrad's classes; torch's come when they are imported next
            _forget(name)

    def _pair(self, theirs: ModuleType, ours: ModuleType) -> None:
        """Note a module of torch's, and each function and class in it, with what stands for it."""
        self._note(theirs, ours)
        public = set(getattr(theirs, "__all__", ()))
        for name, value in sorted(vars(theirs).items(), key=lambda item: item[0] not in public):
            defined_there = str(getattr(value, "__module__", "")).startswith(("torch.distributed", "torch._C"))
            if name in vars(ours) and callable(value) and defined_there:
                self._note(value, getattr(ours, name))

    def _note(self, theirs: Any, ours: Any) -> None:
        self._kept.append(theirs)
        self._there.setdefault(id(theirs), ours)
        self._back.setdefault(id(ours), theirs)  # the first counts: public names come before private ones

    def _rebind(self, substitutes: dict[int, Any], record: bool) -> None:
        """Go through all modules for names bound to what is replaced."""
        own = {id(theirs) for _, theirs in self._modules if theirs is not None}
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType) or id(module) in own:
                continue
            if module.__name__.startswith(("telegrad.", *_KEEP_TORCH)):
                continue
            for name, value in list(vars(module).items()):
                substitute = substitutes.get(id(value))
                if substitute is None or name.startswith("__"):
                    continue
                if record:
                    self._set(module, name, substitute)
                else:
                    setattr(module, name, substitute)

    def _set(self, target: Any, name: str, value: Any) -> None:
        self._attributes.append((target, name, vars(target).get(name, _MISSING)))
        setattr(target, name, value)


def _forget(name: str) -> None:
    if sys.modules.pop(name, None) is not None:
        parent = sys.modules.get(name.rpartition(".")[0])
        child = name.rpartition(".")[2]
        if parent is not None and child in vars(parent):
            delattr(parent, child)


_lock = threading.Lock()
_installed: list[Replacement] = []


def install() -> None:
    """Put Telegrad in the place of torch.distributed.rpc and what belongs to it. Once is enough; more does no harm.

    Examples:
        ```python
        import telegrad.compat

        telegrad.compat.install()
        import torch.distributed.rpc as rpc  # Telegrad's, under torch's names
        ```
    """
    with _lock:
        if not _installed:
            replacement = Replacement()
            replacement.apply()
            _installed.append(replacement)
            stand_in.use(stand_in.TORCHS)
            replacement.refuse_script_modules = importlib.import_module(_INTERNAL).send_script_modules()


def uninstall() -> None:
    """Undo `install`. A worker that is running goes on as it is.

    Examples:
        ```python
        telegrad.compat.uninstall()
        import torch.distributed.rpc as rpc  # torch's own again
        ```
    """
    with _lock:
        if _installed:
            replacement = _installed.pop()
            replacement.refuse_script_modules()
            replacement.undo()
            stand_in.use(stand_in.OURS)


def is_installed() -> bool:
    """Whether Telegrad stands in for torch now.

    Examples:
        ```python
        if telegrad.compat.is_installed(): ...
        ```
    """
    return bool(_installed)
