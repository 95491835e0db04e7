"""A reference to a durable value: a name, and no more. It means whatever incarnation of its owner has the value now.

It does what an RRef does, so modules and optimizers take it for one. Calls that are under way when the owner dies end
with `WorkerDied`; the next ones go to its successor. It carries the epoch in which it was sent, so that a call of a
step that was given up is refused by an owner that has returned to an earlier state meanwhile.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from telegrad import rpc
from telegrad.durable.part import not_restored, part_of, parts_of
from telegrad.errors import RRefError
from telegrad.rpc.current import current_agent, require_agent
from telegrad.rpc.options import UNSET_RPC_TIMEOUT
from telegrad.rpc.workers import WorkerInfo

T = TypeVar("T")


class DurableRef(Generic[T]):
    """A reference that outlives the incarnations of its value's owner. `run.remote` and `run.module` make them."""

    __slots__ = ("_name", "_owner", "_run", "_within")

    def __init__(self, run: str, owner: str, name: str, within: str = "") -> None:
        self._run = run
        self._owner = owner
        self._name = name
        self._within = within  # a parameter of the value, if not the value itself

    def __repr__(self) -> str:
        within = f".{self._within}" if self._within else ""
        return f"DurableRef({self._run!r}: {self._name}{within} on {self._owner!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DurableRef) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, str, str, str]:
        return self._run, self._owner, self._name, self._within

    def __reduce__(self) -> tuple[Any, ...]:
        agent = current_agent()
        part = None if agent is None else parts_of(agent).by_run.get(self._run)
        return arrive, (*self._key(), None if part is None else part.holdings.epoch)

    def parameter(self, name: str) -> "DurableRef[torch.Tensor]":
        """A reference to a parameter of this module."""
        return DurableRef(self._run, self._owner, self._name, name)

    def owner(self) -> WorkerInfo:
        """The worker where the value lives, in its present incarnation."""
        return require_agent().find(self._owner).info

    def owner_name(self) -> str:
        """The name of that worker."""
        return self._owner

    def is_owner(self) -> bool:
        """Whether the value lives here."""
        return require_agent().info.name == self._owner

    def confirmed_by_owner(self) -> bool:
        """An owner keeps its durable values as long as the run lasts."""
        return True

    def local_value(self) -> T:
        """The value itself, on its owner."""
        agent = require_agent()
        if agent.info.name != self._owner:
            raise RRefError(f"{self} has its value on {self._owner!r}; local_value() was asked on {agent.info.name!r}")
        value = part_of(agent, self._run).find(self._name)
        return value.get_parameter(self._within) if self._within else value  # type: ignore[no-any-return] # typed by what it comes from

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """The value; on any worker but the owner a copy."""
        if self.is_owner():
            return self.local_value()
        return rpc.rpc_sync(self._owner, _value, (self,), timeout=timeout)

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: `ref.rpc_sync().method(x)` runs the method on the owner and returns what it returns."""
        return _Proxy(self, rpc.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: `ref.rpc_async().method(x)` runs the method on the owner and returns a future."""
        return _Proxy(self, rpc.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: `ref.remote().method(x)` returns an ordinary reference to what the method returns."""
        return _Proxy(self, rpc.remote, timeout)


class _Proxy:
    """Attributes of a proxy are methods of the value."""

    def __init__(self, ref: DurableRef[Any], how: Callable[..., Any], timeout: float) -> None:
        self._ref = ref
        self._how = how
        self._timeout = timeout

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)

    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._how(self._ref.owner_name(), _invoke, (self._ref, method, args, kwargs), timeout=self._timeout)


def arrive(run: str, owner: str, name: str, within: str, epoch: int | None) -> DurableRef[Any]:
    """What a reference is rebuilt by. One of an older epoch belongs to a step that was given up."""
    agent = current_agent()
    if epoch is not None and agent is not None and agent.info.name == owner:
        part = parts_of(agent).by_run.get(run)
        if part is not None and epoch < part.holdings.epoch:
            raise not_restored(agent, run, name)
    return DurableRef(run, owner, name, within)


def _value(ref: DurableRef[T]) -> T:
    return ref.local_value()


def _invoke(ref: DurableRef[Any], method: str, args: Any, kwargs: Any) -> Any:
    result = getattr(ref.local_value(), method)(*args, **kwargs)
    return result.wait() if isinstance(result, torch._C.Future) else result
