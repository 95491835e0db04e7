"""Stands in for `torch.distributed.rpc.api`: Telegrad's calls, and the private helpers that programs took from there.

A graceful shutdown is made of the same named steps as torch's, each looked up here when it runs, because programs
replace them: gather all workers, let go of all references, wait until nothing is under way, end.
"""

import functools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.jit._builtins import _find_builtin

from telegrad import rpc as calls
from telegrad.compat.rpc.agent import (
    RpcAgent,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
)
from telegrad.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from telegrad.compat.rpc.gathering import AllGatherStates
from telegrad.compat.rpc.internal import (
    PythonUDF,
    RPCExecMode,
    _build_rpc_profiling_key,
    _internal_rpc_pickler,
    run_pickled,
)
from telegrad.compat.rpc.rrefs import (
    RRef,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _rref_typeof_on_owner,
    _rref_typeof_on_user,
)
from telegrad.errors import RpcTimeout, WorkerDied
from telegrad.rpc import get_rpc_timeout, get_worker_info
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import require_agent
from telegrad.rpc.layer import Layer
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.workers import Member, WorkerInfo

__all__ = [
    "AllGatherStates",
    "PythonUDF",
    "RPCExecMode",
    "RRef",
    "WorkerInfo",
    "_build_rpc_profiling_key",
    "_get_current_rpc_agent",
    "_internal_rpc_pickler",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
    "_rref_typeof_on_owner",
    "_rref_typeof_on_user",
    "_set_and_start_rpc_agent",
    "get_rpc_timeout",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)

# Whether references that other workers still hold at the end are passed over in silence.
_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the function needs a running agent, and says so when there is none."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        require_agent()
        return func(*args, **kwargs)

    return wrapper


# --- calls ------------------------------------------------------------------------------------------------------------


@contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Calls made inside are taken apart by `rpc_pickler.serialize`."""
    global _default_pickler  # noqa: PLW0603 - torch keeps it here, and programs look
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _as_sent(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A call as the current pickler wants it."""
    if _default_pickler is _internal_rpc_pickler:
        return func, args, kwargs
    return run_pickled, _default_pickler.serialize(PythonUDF(func, tuple(args or ()), dict(kwargs or {}))), None


def _to_worker_info(to: str | int | WorkerInfo) -> WorkerInfo:
    return require_agent().find(to).info


def rpc_sync(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """See `telegrad.rpc.rpc_sync`."""
    sent, sent_args, sent_kwargs = _as_sent(func, args, kwargs)
    try:
        return calls.rpc_sync(to, sent, sent_args, sent_kwargs, timeout)
    except TypeError as error:
        if _find_builtin(func) is None:  # type: ignore[no-untyped-call] # torch's own, without types
            raise
        raise RuntimeError(
            f"Overloaded torch operator invoked from Python failed to match any schema:\n{error}"
        ) from error


def rpc_async(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """See `telegrad.rpc.rpc_async`. Within `_wait_all` the future is also kept to be waited for."""
    func, args, kwargs = _as_sent(func, args, kwargs)
    future = calls.rpc_async(to, func, args, kwargs, timeout)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def remote(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> RRef[Any]:
    """See `telegrad.rpc.remote`."""
    func, args, kwargs = _as_sent(func, args, kwargs)
    return calls.remote(to, func, args, kwargs, timeout)


@contextmanager
def _wait_all() -> Iterator[None]:
    """Waits, at its end, for every future that `rpc_async` returned in this thread meanwhile."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# --- gathering --------------------------------------------------------------------------------------------------------


_ALL_WORKER_NAMES: set[str] = set()
_all_gather_dict_lock = threading.RLock()
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: defaultdict[str, AllGatherStates] = defaultdict(AllGatherStates)


def _init_rpc_states(agent: Any) -> None:
    """A new agent: note who takes part, and make it this process's own unless it already is."""
    global _ALL_WORKER_NAMES  # noqa: PLW0603 - torch keeps it here, and programs look
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if isinstance(agent, RpcAgent):
        if agent._agent.world_size is not None:  # all ranks, also those that have joined and left while this one joined
            _ALL_WORKER_NAMES |= agent._agent.directory.names_ever()
        agent._agent.install(_Gatherings(agent._agent))
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


class _Gatherings(Layer):
    """Tells the gatherings on this worker of deaths."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def awaited(self) -> list[Member]:
        """Whom gatherings wait for here: somebody has to ask whether they live."""
        with _all_gather_dict_lock:
            names = {name for states in _all_gather_sequence_id_to_states.values() for name in states.awaited}
        return [member for member in self._agent.directory.members() if member.name in names] if names else []

    def on_death(self, member: Member) -> None:
        """Go on without the dead."""
        with _all_gather_dict_lock:
            for states in _all_gather_sequence_id_to_states.values():
                states.lost(member.name)


def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None) -> None:
    """Runs on the leader: one worker's contribution."""
    with _all_gather_dict_lock:
        if worker_name not in (worker_names or _ALL_WORKER_NAMES):
            raise AssertionError(f"{worker_name} is not expected by leader.")
        states = _all_gather_sequence_id_to_states[sequence_id]
        if states.failure is not None:
            raise states.failure
        if worker_name in states.gathered_objects:
            raise AssertionError(f"{worker_name} reported intent sequence id {sequence_id} twice. ")
        states.arrived(worker_name, obj)


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """Runs on each follower: everyone's contributions."""
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    if states.proceed_signal.is_set():
        raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
    states.gathered_objects = objects_map
    states.proceed_signal.set()


def _fail_follower(sequence_id: str, failure: WorkerDied) -> None:
    """Runs on each follower that has contributed: nothing will come of it."""
    with _all_gather_dict_lock:
        _all_gather_sequence_id_to_states[sequence_id].fail(failure)


def _all_gather(obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """Everyone's `obj` by worker name, once all of `worker_names` (by default all workers) have called this.

    WorkerDied, unlike in torch, if one of them ends before."""
    return _gather(obj, worker_names, timeout, without_dead=False)


def _gather(obj: Any, worker_names: set[str] | None, timeout: float, *, without_dead: bool) -> dict[str, Any]:
    self_name = require_agent().info.name
    names = set(worker_names or _ALL_WORKER_NAMES)
    leader = min(names)
    with _all_gather_dict_lock:
        joined = "".join(sorted(names))
        number = _all_gather_sequence_id.get(joined, 0)
        _all_gather_sequence_id[joined] = number + 1
        sequence_id = f"{joined}{number}"
    rpc_timeout = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    patience = None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    if leader == self_name:
        _gather_to_leader(sequence_id, self_name, obj, names)
    else:
        try:
            rpc_sync(leader, _gather_to_leader, args=(sequence_id, self_name, obj, names), timeout=rpc_timeout)
        except WorkerDied as error:
            if not without_dead or error.worker != leader:
                raise
    states = _begin_to_wait(sequence_id, names, leader, without_dead)
    with blocking():
        arrived = states.proceed_signal.wait(patience)
    if not arrived:
        missing = ", ".join(sorted(names - states.gathered_objects.keys())) if leader == self_name else leader
        raise RpcTimeout(
            f"timed out in _all_gather after {timeout:.2f} seconds: worker {self_name!r} waited for {missing}"
        )
    if states.failure is not None:
        if leader == self_name:  # it keeps the failure, for those who come later
            _tell_of_failure(sequence_id, states, rpc_timeout)
        raise states.failure
    if leader == self_name:
        _tell_followers(sequence_id, states.gathered_objects.keys() - {leader}, states.gathered_objects, rpc_timeout)
    with _all_gather_dict_lock:
        return _all_gather_sequence_id_to_states.pop(sequence_id).gathered_objects


def _begin_to_wait(sequence_id: str, names: set[str], leader: str, without_dead: bool) -> AllGatherStates:
    """A leader waits for all contributions, a follower for its leader."""
    agent = require_agent()
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
        if not states.proceed_signal.is_set():
            leads = leader == agent.info.name
            states.wait_for(names - states.gathered_objects.keys() if leads else {leader}, without_dead=without_dead)
            for member in agent.directory.members():
                if agent.is_dead(member):  # before the wait began
                    states.lost(member.name)
        return states


def _tell_of_failure(sequence_id: str, states: AllGatherStates, timeout: float) -> None:
    for name in sorted(states.gathered_objects.keys() - {require_agent().info.name}):
        rpc_async(name, _fail_follower, args=(sequence_id, states.failure), timeout=timeout)


def _tell_followers(sequence_id: str, followers: set[str], gathered: dict[str, Any], timeout: float) -> None:
    told = {
        name: rpc_async(name, _broadcast_to_followers, args=(sequence_id, gathered), timeout=timeout)
        for name in sorted(followers)
    }
    errors = {}
    for name, future in told.items():
        try:
            future.wait()
        except RuntimeError as error:
            errors[name] = error
    if errors:
        first = next(iter(errors.values()))
        raise RuntimeError(
            f"Followers {list(errors)} timed out in _all_gather after {timeout:.2f} seconds. "
            f"The first exception is {first}"
        ) from first


def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all of these workers have called this."""
    require_agent()
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called this, except those that are gone."""
    require_agent()
    try:
        _gather(None, None, timeout, without_dead=True)
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# --- the end ----------------------------------------------------------------------------------------------------------


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """See `telegrad.rpc.shutdown`."""
    agent = _get_current_rpc_agent()
    try:
        if graceful:
            if agent.is_static_group:
                _wait_all_workers(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
            try:
                # Before anybody leaves: a reference to a worker that has left is not a leak any more.
                _destroy_rref_context(_ignore_rref_leak)
            finally:
                agent.join(shutdown=True, timeout=timeout)
    finally:
        _finalize_shutdown()


def _finalize_shutdown() -> None:
    agent = _get_current_rpc_agent()
    try:
        _destroy_rref_context(_ignore_rref_leak)
    finally:
        agent.shutdown()
        # Now, and not at the next start: by then a worker that started first may have sent its contribution.
        with _all_gather_dict_lock:
            _all_gather_sequence_id.clear()
            _all_gather_sequence_id_to_states.clear()
