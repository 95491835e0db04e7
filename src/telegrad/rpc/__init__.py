"""Calls to other workers: who they are, how to call them, and how it begins and ends.

The names are those of `torch.distributed.rpc`. Remote references live in the layer above and are found here lazily, so
that `rpc.RRef` and `rpc.remote` work as they do in torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from telegrad.rpc import functions
from telegrad.rpc.calls import rpc_async, rpc_sync
from telegrad.rpc.current import require_agent
from telegrad.rpc.futures import Future
from telegrad.rpc.job.debug_waits import debug_waits
from telegrad.rpc.job.lifecycle import init_rpc, shutdown
from telegrad.rpc.options import RpcBackendOptions, as_timeout
from telegrad.rpc.patterns.batch import batch
from telegrad.rpc.patterns.many import as_completed, gather, get_worker_infos, map
from telegrad.rpc.server.cancellation import cancelled
from telegrad.rpc.torch_modes import graph_breaks
from telegrad.rpc.torch_modes.autocast import with_autocast
from telegrad.rpc.torch_modes.seeds import seed_from_environment
from telegrad.rpc.trust.exports import Limits, export, withdraw
from telegrad.rpc.workers import WorkerInfo
from telegrad.transport.tls import Tls
from telegrad.wire.plain import register_dataclass

if TYPE_CHECKING:
    from telegrad.rref.rref import RRef, remote
    from telegrad.rref.stream import stream

__all__ = [
    "Future",
    "Limits",
    "RRef",
    "RpcBackendOptions",
    "Tls",
    "WorkerInfo",
    "as_completed",
    "batch",
    "cancelled",
    "debug_waits",
    "export",
    "functions",
    "gather",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "map",
    "register_dataclass",
    "remote",
    "rpc_async",
    "rpc_sync",
    "set_rpc_timeout",
    "shutdown",
    "stream",
    "with_autocast",
    "withdraw",
]

graph_breaks.install()
seed_from_environment()

_FROM_ABOVE = {"RRef": "telegrad.rref", "remote": "telegrad.rref", "stream": "telegrad.rref.stream"}


if not TYPE_CHECKING:  # to a checker every name would exist then

    def __getattr__(name: str) -> Any:
        if name in _FROM_ABOVE:
            found = globals()[name] = getattr(importlib.import_module(_FROM_ABOVE[name]), name)
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__  # what users use, and not the modules behind it


def is_available() -> bool:
    """Whether calls can be made on this platform; always true where Telegrad can be imported.

    Examples:
        >>> rpc.is_available()
        True
    """
    return True


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """The WorkerInfo of a worker, by default of this one.

    Examples:
        >>> rpc.get_worker_info().name
        'worker0'
    """
    agent = require_agent()
    return agent.info if worker_name is None else agent.find(worker_name).info


def get_rpc_timeout() -> float:
    """Seconds a call may take unless it says otherwise.

    Examples:
        >>> rpc.get_rpc_timeout()
        60.0
    """
    return require_agent().rpc_timeout


def set_rpc_timeout(seconds: float) -> None:
    """Change the default timeout of calls from this worker.

    Examples:
        >>> rpc.set_rpc_timeout(30)
        >>> rpc.get_rpc_timeout()
        30.0
        >>> rpc.set_rpc_timeout(60)
    """
    require_agent().rpc_timeout = as_timeout(seconds)
