"""Stands in for `torch.distributed.rpc.rref_proxy`."""

from collections.abc import Callable
from typing import Any

from telegrad.compat.rpc import api
from telegrad.compat.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.rref import RRef

__all__ = ["RRefProxy"]


class RRefProxy:
    """Methods of a reference's value, called by `rpc_sync`, `rpc_async` or `remote`."""

    def __init__(self, rref: RRef[Any], rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Any:
        proxies = {api.rpc_sync: self.rref.rpc_sync, api.rpc_async: self.rref.rpc_async, api.remote: self.rref.remote}
        return getattr(proxies[self.rpc_api](self.rpc_timeout), func_name)
