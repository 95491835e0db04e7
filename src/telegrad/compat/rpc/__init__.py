"""Stands in for `torch.distributed.rpc`: `init_rpc` by way of backends, and everything its submodules offer."""

import logging
import os
from numbers import Integral
from typing import Any, NoReturn

from torch.distributed import Store  # type: ignore[attr-defined] # torch's stubs lack it

from telegrad.compat import autograd as dist_autograd
from telegrad.compat.rpc import _utils, api, backend_registry, constants, functions, internal, options, rref_proxy
from telegrad.compat.rpc.agent import (
    RpcAgent,
    TensorPipeAgent,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    enable_gil_profiling,
)
from telegrad.compat.rpc.api import AllGatherStates, RRef, get_worker_info, remote, rpc_async, rpc_sync, shutdown
from telegrad.compat.rpc.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions
from telegrad.compat.rpc.rrefs import (
    PyRRef,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _rref_context_get_debug_info,
)
from telegrad.errors import AlreadyInitialized
from telegrad.observe.profiling.process_global import server_process_global_profile
from telegrad.rpc import get_rpc_timeout
from telegrad.rpc import set_rpc_timeout as _set_rpc_timeout
from telegrad.rpc.job.rendezvous.member_log import open_store
from telegrad.rpc.options import RpcBackendOptions, as_int
from telegrad.rpc.workers import WorkerInfo

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "PyRRef",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_init_rpc_backend",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_server_process_global_profile",
    "_set_and_start_rpc_agent",
    "_set_rpc_timeout",
    "_utils",
    "api",
    "backend_registered",
    "backend_registry",
    "constants",
    "construct_rpc_backend_options",
    "dist_autograd",
    "enable_gil_profiling",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "internal",
    "is_available",
    "options",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "rref_proxy",
    "shutdown",
]

logger = logging.getLogger(__name__)

_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT
_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions
_is_tensorpipe_available = True
_server_process_global_profile = server_process_global_profile


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"module 'torch.distributed.rpc' has no attribute {name!r} while Telegrad stands in for it; "
        "see 'Coming from torch.distributed.rpc' in Telegrad's documentation for what it leaves out"
    )


def is_available() -> bool:
    """Whether calls can be made on this platform; always true where Telegrad can be imported."""
    return True


def init_rpc(
    name: str, backend: Any = None, rank: int = -1, world_size: int | None = None, rpc_backend_options: Any = None
) -> None:
    """Make this process a worker, by the backend that is named or that the options belong to; see
    `telegrad.rpc.init_rpc`."""
    if backend is not None and not backend_registry.is_backend(backend):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = BackendType.TENSORPIPE if rpc_backend_options is None else _backend_of(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    rank, world_size = as_int("rank", rank), None if world_size is None else as_int("world_size", world_size)
    if _is_current_rpc_agent_set():  # asked before the rendezvous store is opened a second time
        raise AlreadyInitialized("RPC is already initialized: call rpc.shutdown() before init_rpc() again")
    rank, world_size = _from_environment(rpc_backend_options.init_method, rank, world_size)
    if rank < 0:
        by_environment = rpc_backend_options.init_method.startswith("env:")
        raise ValueError(
            f"worker {name!r} has no rank: "
            + ("environment variable RANK expected, but not set" if by_environment else "rank parameter missing")
        )
    store = open_store(rpc_backend_options.init_method, rank, world_size, rpc_backend_options.rendezvous_timeout)
    dist_autograd._init(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _from_environment(init_method: str, rank: int, world_size: int | None) -> tuple[int, int | None]:
    if init_method.startswith("env://") and world_size is None and rank < 0 and "WORLD_SIZE" in os.environ:
        return int(os.environ.get("RANK", "-1")), int(os.environ["WORLD_SIZE"])
    if world_size is not None and world_size <= 0:
        raise ValueError(f"world_size must be positive, or None for a job of open size, got {world_size}")
    return rank, world_size


def _backend_of(rpc_backend_options: RpcBackendOptions) -> Any:
    for candidate in backend_registry.BackendType:
        if isinstance(rpc_backend_options, type(backend_registry.construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {rpc_backend_options}")


def _init_rpc_backend(
    backend: Any = BackendType.TENSORPIPE,
    store: Any = None,
    name: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Make this process a worker that meets the others in `store`."""
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    if _is_current_rpc_agent_set():
        raise AlreadyInitialized("RPC is already initialized: call rpc.shutdown() before init_rpc() again")
    agent = backend_registry.init_backend(
        backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
    )
    api._init_rpc_states(agent)


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    if not backend_registry.is_backend(backend):
        raise RuntimeError(f"Argument {backend} must be of type BackendType but got type {type(backend)}")
    for argument, kind in (
        (store, Store),
        (name, str),
        (rank, Integral),
        (world_size, (Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ):
        if not isinstance(argument, kind):
            raise RuntimeError(f"Argument {argument} must be of type {kind} but got type {type(argument)}")


def _get_debug_info() -> dict[str, str]:
    """What references, agent and autograd are doing, in numbers."""
    return {
        **_rref_context_get_debug_info(),
        **api._get_current_rpc_agent().get_debug_info(),
        **dist_autograd._get_debug_info(),
    }
