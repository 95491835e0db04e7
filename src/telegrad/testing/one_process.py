"""A stand-in for calls between workers: everything runs here, at once, on the very tensors that were passed.

So torch's own autograd sees one unbroken graph, and what it computes is what a distributed program has to equal. The
stand-in takes the place of Telegrad's functions in every module that has imported them, for the length of a block.
"""

import asyncio
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from telegrad import rpc, rref
from telegrad.rpc.server.run_call import ASYNC_MARK

_STANDS_IN = ("rpc_sync", "rpc_async", "remote", "RRef", "get_worker_info")


class OneProcess:
    """All workers of a job, played by this process. Each has a random number generator of its own, as in the job."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._workers = [rpc.WorkerInfo(name, rank) for rank, name in enumerate(names)]
        self._playing = self._workers[0]
        self._random = {info.name: _random_state(seed + info.id) for info in self._workers}

    @contextlib.contextmanager
    def instead_of_workers(self) -> Iterator[None]:
        """Within this block Telegrad's calls are played here."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._random[self._playing.name])
        replaced = [(getattr(rpc, name), getattr(self, name)) for name in _STANDS_IN]
        changed: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for names in [vars(rpc), vars(rref), *(getattr(m, "__dict__", {}) for m in list(sys.modules.values()))]:
                for name, value in list(names.items()):
                    for original, stand_in in replaced:
                        if value is original:
                            changed.append((names, name, original))
                            names[name] = stand_in
            # Those that `rpc` would look up in a layer above when asked.
            lazily = {name: stand_in for name, (_, stand_in) in zip(_STANDS_IN, replaced, strict=True)}
            lazily = {name: stand_in for name, stand_in in lazily.items() if name not in vars(rpc)}
            vars(rpc).update(lazily)
            try:
                yield
            finally:
                for name in lazily:
                    del vars(rpc)[name]
        finally:
            for names, name, original in changed:
                names[name] = original
            torch.set_rng_state(before)

    def play(self, to: rpc.WorkerInfo, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function as worker `to` would."""
        caller, self._playing = self._playing, to
        self._random[caller.name] = torch.get_rng_state()
        torch.set_rng_state(self._random[to.name])
        try:
            result = func(*(args or ()), **(kwargs or {}))
            if inspect.iscoroutine(result):
                return asyncio.run(result)
            return result.wait() if hasattr(func, ASYNC_MARK) else result
        finally:
            self._random[to.name] = torch.get_rng_state()
            torch.set_rng_state(self._random[caller.name])
            self._playing = caller

    def find(self, who: str | int | rpc.WorkerInfo) -> rpc.WorkerInfo:
        """A worker by name, rank or info."""
        for info in self._workers:
            if who in (info, info.name, info.id):
                return info
        raise ValueError(f"no worker {who!r}; the workers are {', '.join(info.name for info in self._workers)}")

    # --- what takes the place of Telegrad's functions ---

    def get_worker_info(self, worker_name: str | None = None) -> rpc.WorkerInfo:
        """As `rpc.get_worker_info`."""
        return self._playing if worker_name is None else self.find(worker_name)

    def rpc_sync(self, to: Any, func: Any, args: Any = None, kwargs: Any = None, *_: Any, **__: Any) -> Any:
        """As `rpc.rpc_sync`."""
        return self.play(self.find(to), func, args, kwargs)

    def rpc_async(
        self, to: Any, func: Any, args: Any = None, kwargs: Any = None, *_: Any, **__: Any
    ) -> rpc.Future[Any]:
        """As `rpc.rpc_async`; the future is done."""
        future: rpc.Future[Any] = rpc.Future()
        try:
            future.set_result(self.rpc_sync(to, func, args, kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def remote(self, to: Any, func: Any, args: Any = None, kwargs: Any = None, *_: Any, **__: Any) -> "LocalRRef":
        """As `rpc.remote`."""
        return LocalRRef(self, self.find(to), self.rpc_sync(to, func, args, kwargs))

    def RRef(self, value: Any, *_: Any, **__: Any) -> "LocalRRef":  # noqa: N802 - the name it stands in for
        """As `rpc.RRef`."""
        return LocalRRef(self, self._playing, value)


class LocalRRef:
    """As `rpc.RRef`, with its value at hand."""

    def __init__(self, process: OneProcess, owner: rpc.WorkerInfo, value: Any) -> None:
        self._process = process
        self._owner = owner
        self._value = value

    def owner(self) -> rpc.WorkerInfo:
        """The worker that would hold the value."""
        return self._owner

    def owner_name(self) -> str:
        """Its name."""
        return self._owner.name

    def is_owner(self) -> bool:
        """Whether the worker being played is the owner."""
        return self._process.get_worker_info() == self._owner

    def confirmed_by_owner(self) -> bool:
        """It always is."""
        return True

    def to_here(self, timeout: float = 0.0) -> Any:
        """The value itself: a copy would cut the graph."""
        return self._value

    local_value = to_here

    def rpc_sync(self, timeout: float = 0.0) -> "_Methods":
        """Methods of the value, called as the owner."""
        return _Methods(self._process.rpc_sync, self)

    def rpc_async(self, timeout: float = 0.0) -> "_Methods":
        """The same, as futures."""
        return _Methods(self._process.rpc_async, self)

    def remote(self, timeout: float = 0.0) -> "_Methods":
        """The same, as references."""
        return _Methods(self._process.remote, self)


class _Methods:
    def __init__(self, call: Callable[..., Any], rref: LocalRRef) -> None:
        self._call = call
        self._rref = rref

    def __getattr__(self, name: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            return self._call(self._rref.owner(), getattr(self._rref.local_value(), name), args, kwargs)

        return functools.wraps(getattr(type(self._rref.local_value()), name, method))(method)


def _random_state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()
