"""Stands in for `torch.distributed.rpc.backend_registry`: backends by name. The one that is there from the start,
`BackendType.TENSORPIPE`, is Telegrad."""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined] # torch declares no type for it

from telegrad.compat.rpc import api, constants
from telegrad.compat.rpc.agent import TensorPipeAgent
from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions
from telegrad.rpc.job.lifecycle import start_worker
from telegrad.rpc.options import RpcBackendOptions

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """What makes a backend: how its options are made, and how its agent is started."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def _backend_type_repr(self: Any) -> str:
    return f"BackendType.{self.name}"


def _backend_types(members: dict[str, BackendValue]) -> Any:
    types: Any = enum.Enum("BackendType", members)  # type: ignore[misc] # mypy cannot type this form
    setattr(types, "__repr__", _backend_type_repr)  # noqa: B010 - mypy takes it for a method of all enums
    types.__doc__ = "The backends there are."
    return types


BackendType: Any = _backend_types({})


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of that name."""
    return backend_name in BackendType.__members__


def is_backend(backend: object) -> bool:
    """Whether it is a member of `BackendType`, as it is now or as it was before another backend was added."""
    return isinstance(backend, enum.Enum) and isinstance(backend.value, BackendValue)


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend; its member of `BackendType`, which becomes a new class."""
    global BackendType  # noqa: PLW0603 - an enum cannot grow, so torch replaces it
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    added = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _backend_types({backend_name: added, **{member.name: member.value for member in BackendType}})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Options for a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Start the agent of a backend."""
    return backend.value.init_backend_handler(*args, **kwargs)


def _construct_options(rpc_timeout: float, init_method: str, **kwargs: Any) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _start_telegrad(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> TensorPipeAgent:
    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}")
    agent = TensorPipeAgent(start_worker(name, rank, world_size or None, rpc_backend_options, store))
    api._init_rpc_states(agent)
    return agent


register_backend("TENSORPIPE", _construct_options, _start_telegrad)
