"""Stand in for `torch.distributed.rpc` and `.autograd`, so that programs written for them run as they are.

    import telegrad.compat
    telegrad.compat.install()          # then import and run the program

or, without touching it: `python -m telegrad.compat script.py args...`, which covers the processes it starts, too.

Read `replace.py` (what is put in the place of what), then `rpc/` (torch's names over Telegrad's calls), then
`__main__.py` and `children/` (how child processes come along).
"""

import importlib
from typing import Any

from telegrad.compat.replace import install, is_installed, uninstall
from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions

__all__ = ["faulty_fixture", "install", "is_installed", "make_backend_options", "rpc_backend", "uninstall"]


def __dir__() -> list[str]:
    return __all__  # what users use, and not the modules behind it


def rpc_backend() -> Any:
    """The backend to give to torch's `init_rpc`, as torch's own tests do.

    Examples:
        ```python
        rpc.init_rpc("worker0", backend=telegrad.compat.rpc_backend(), rank=0, world_size=2)
        ```
    """
    from telegrad.compat.rpc import backend_registry  # noqa: PLC0415 - as it is now: registering another replaces the enum

    return backend_registry.BackendType["TENSORPIPE"]


def faulty_fixture() -> Any:
    """What torch's tests of failing messages mix into their classes: torch's own fixture, over Telegrad's faults.

    Examples:
        ```python
        class TestFaults(telegrad.compat.faulty_fixture()): ...
        ```
    """
    name = "torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture"
    return importlib.import_module(name).FaultyRpcAgentTestFixture


def make_backend_options(**options: Any) -> TensorPipeRpcBackendOptions:
    """Options to give to torch's `init_rpc`, under their names there.

    Examples:
        ```python
        options = telegrad.compat.make_backend_options(num_worker_threads=4)
        ```
    """
    return TensorPipeRpcBackendOptions(**options)
