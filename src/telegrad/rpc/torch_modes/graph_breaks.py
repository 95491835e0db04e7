"""`torch.compile` does not look into Telegrad: a call breaks the graph, and runs as it is.

Dynamo is told so when it is imported, which takes it a second: never on Telegrad's account.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"


def install() -> None:
    """Let Dynamo pass over this package, now or when it comes."""
    if _DYNAMO in sys.modules:
        _pass_over()
    else:
        sys.meta_path.insert(0, _DynamoImport())


def _pass_over() -> None:
    from torch._dynamo import trace_rules  # noqa: PLC0415 - see above

    trace_rules.add("telegrad")


class _DynamoImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself. When Dynamo is asked for, it leaves, and sees to it that what is found is told."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _DYNAMO:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                _pass_over()

            loader.exec_module = execute_and_tell
        return spec
