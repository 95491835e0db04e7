"""The two ends of a reference: `OwnerHandle` beside the value, `UserHandle` anywhere else.

A handle is what the ledgers count. It is gone when Python has collected it, and then its references are told.
"""

from functools import partial
from typing import Any

from telegrad.errors import CallRefused, RpcTimeout, RRefError
from telegrad.ids import ForkId, RRefId, show_id
from telegrad.rpc.client.function_table import name_of
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.futures import Future
from telegrad.rpc.options import UNSET_RPC_TIMEOUT, as_timeout
from telegrad.rpc.round_trip import start_call, start_request, value_of, wait_for_value
from telegrad.rpc.workers import Member, peer_of
from telegrad.rref.creation import Creation
from telegrad.rref.outcome import Outcome
from telegrad.rref.rref_context import RRefContext
from telegrad.wire.messages import PythonRemoteCall, RRefFetch


class OwnerHandle:
    """A handle on the worker where the value lives."""

    __slots__ = ("__weakref__", "_counted", "_rrefs", "creation", "rref_id", "value")

    def __init__(self, rrefs: RRefContext, rref_id: RRefId, value: Outcome, *, counted: bool = True) -> None:
        self._rrefs = rrefs
        self.rref_id = rref_id
        self.value = value
        self.creation: Creation | None = None
        self._counted = counted  # whether the ledger knows this handle

    def __repr__(self) -> str:
        return f"OwnerRRef({show_id(self.rref_id)})"

    def __del__(self) -> None:
        if self._counted:
            self._rrefs.handle_gone(self.rref_id, None)

    @property
    def rrefs(self) -> RRefContext:
        """The references of the agent this handle belongs to."""
        return self._rrefs

    @property
    def owner(self) -> Member:
        """The worker where the value lives: this one."""
        return self._rrefs.agent.member

    def kind(self) -> str:
        """What the value is, in words."""
        if self.value.failure is not None:
            return "could not be made"
        return type(self.value.value).__name__ if self.value.done else "still being made"

    def check_usable(self, _: str) -> None:
        """Raise if the value was to be made by a call that is known to have failed."""
        if self.creation is not None:
            self.creation.check()

    def fetch(self, timeout: float) -> Any:
        """The value itself."""
        self.check_usable("to_here()")
        agent = self._rrefs.agent
        timeout = agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
        if not self.value.wait(timeout or None):
            self.check_usable("to_here() on it")
            raise RpcTimeout(
                f"RPC ran for more than set timeout ({round(timeout * 1000)} ms): the value of {self} is still being "
                f"made on this worker, {agent.info.name!r}"
            )
        return self.value.get()


class UserHandle:
    """A handle on any other worker. The owner keeps the value for it while it exists."""

    __slots__ = ("__weakref__", "_rrefs", "creation", "fetched", "fork_id", "owner", "rref_id", "type")

    def __init__(self, rrefs: RRefContext, rref_id: RRefId, fork_id: ForkId, owner: Member) -> None:
        self._rrefs = rrefs
        self.rref_id = rref_id
        self.fork_id = fork_id
        self.owner = owner
        self.creation: Creation | None = None  # for the handle that `remote` returned
        self.type: Future[type] | None = None
        self.fetched: type | None = None  # what `to_here` brought

    def __repr__(self) -> str:
        return f"UserRRef(RRefId = {show_id(self.rref_id)}, ForkId = {show_id(self.fork_id)})"

    def __del__(self) -> None:
        self._rrefs.handle_gone(self.rref_id, self.fork_id)

    @property
    def rrefs(self) -> RRefContext:
        """The references of the agent this handle belongs to."""
        return self._rrefs

    def kind(self) -> str:
        """What the value is, in words, as far as that is known here: nobody is asked."""
        known, fetched = self.type, self.fetched
        if known is not None and known.done() and not known.failed:
            fetched = known.value()
        if fetched is not None:
            return fetched.__name__
        return "" if self.creation is None else self.creation.kind()

    def check_usable(self, use: str) -> None:
        """Raise if the value cannot be reached any more: `use` is what was tried."""
        rrefs = self._rrefs
        if rrefs.closed:
            raise RRefError(
                f"{self} has been deleted by the shutdown of worker {rrefs.agent.info.name!r}. "
                f"Cannot call {use} after deletion."
            )
        if self.creation is not None:
            self.creation.check()
        if self.fork_id in rrefs.lost or rrefs.agent.is_dead(self.owner):
            owner = peer_of(self.owner)
            died = rrefs.lost.get(self.fork_id, owner)
            if died == owner:
                raise rrefs.death_of(died, f"the value of {self} with it", self.owner)
            raise rrefs.death_of(died, f"{self} came from it too late")

    def fetch(self, timeout: float) -> Any:
        """A copy of the value, asked of its owner."""
        self.check_usable("to_here() on it")
        agent = self._rrefs.agent
        timeout = agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
        slot = start_request(
            agent,
            agent.link(self.owner),
            RRefFetch(self.rref_id),
            timeout=timeout,
            what=self._fetching,
        )
        value = wait_for_value(slot)
        self.fetched = type(value)
        return value

    def _fetching(self) -> str:
        made = self.kind()
        return f"to_here() of {self}{made and f' ({made})'} on worker {self.owner.name!r}"

    def is_known(self) -> bool:
        """Whether the owner is known to keep the value for this handle. Asks nobody, and waits for nothing."""
        return self._rrefs.used.confirmed(self.fork_id)

    def confirmed(self) -> bool:
        """Whether the owner knows this handle. One that came in a call is waited for: its owner has been asked."""
        rrefs = self._rrefs
        known = partial(rrefs.used.confirmed, self.fork_id)
        if self.creation is not None or known():
            return known()
        seconds = rrefs.agent.rpc_timeout or None
        rrefs.wait_until(lambda: known() or self.fork_id in rrefs.lost or rrefs.closed, seconds)
        return known()


Handle = OwnerHandle | UserHandle


def hold(rrefs: RRefContext, value: Any) -> OwnerHandle:
    """A handle of a value that is here."""
    rref_id = RRefId(rrefs.new_id())
    outcome = Outcome()
    outcome.set(value)
    return _hold(rrefs, rref_id, outcome)


def _hold(rrefs: RRefContext, rref_id: RRefId, outcome: Outcome) -> OwnerHandle:
    rrefs.values[rref_id] = outcome
    rrefs.feed(rrefs.owned.hold, rref_id)
    return OwnerHandle(rrefs, rref_id, outcome)


def create(
    rrefs: RRefContext, to: Member, func: Any, args: Any, kwargs: Any, timeout: float, keep: Any = None
) -> Handle:
    """Have a worker make a value. `keep` is kept until the owner has run the call."""
    agent = rrefs.agent
    timeout = agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else as_timeout(timeout)
    rref_id = RRefId(rrefs.new_id())
    handle: Handle
    if to.incarnation == agent.member.incarnation:
        fork_id = ForkId(rref_id)
        handle = _hold(rrefs, rref_id, Outcome())
    else:
        fork_id = ForkId(rrefs.new_id())
        rrefs.feed(rrefs.used.create, rref_id, fork_id, peer_of(to))
        handle = UserHandle(rrefs, rref_id, fork_id, to)
    creation = handle.creation = Creation(rrefs.deadlines, to, func, timeout, keep)
    complete = partial(_created, rrefs, to, rref_id, fork_id, creation)
    make = partial(PythonRemoteCall, rref_id, fork_id)
    try:
        # The reply confirms the fork, however late it comes, so it is waited for beyond the timeout of the creation. So
        # this is never given up, on which `Pending.is_late` counts: its reply is an `Ack`, too.
        start_call(agent, agent.link(to), func, args, kwargs, timeout, make=make, complete=complete, patience=0.0)
    except RpcTimeout as error:  # it never left, as a reply may never come: whoever uses the reference is told
        text = f"RRef creation via rpc.remote({name_of(func)}) to worker {to.name!r} failed: {error}"
        _not_created(rrefs, to, rref_id, fork_id, creation, RpcTimeout(text))
    except BaseException:
        rrefs.feed(rrefs.used.creation_failed, fork_id)
        raise
    creation.start_timeout()
    return handle


def _not_created(
    rrefs: RRefContext, owner: Member, rref_id: RRefId, fork_id: ForkId, creation: Creation, error: Exception
) -> None:
    creation.failed(error)
    refused = isinstance(error, CallRefused)
    rrefs.feed(rrefs.used.creation_refused if refused else rrefs.used.creation_failed, fork_id)
    if peer_of(owner) == rrefs.me and rref_id in rrefs.values:
        rrefs.values[rref_id].fail(creation.error)


def _created(
    rrefs: RRefContext,
    owner: Member,
    rref_id: RRefId,
    fork_id: ForkId,
    creation: Creation,
    slot: Slot,
) -> None:
    """The reply of a creation came, or will not."""
    try:
        value_of(slot)
    except Exception as error:  # it did not run: the owner died, or could not take it
        _not_created(rrefs, owner, rref_id, fork_id, creation, error)
        return
    creation.done()
    if peer_of(owner) != rrefs.me:
        rrefs.feed(rrefs.used.on_ack, peer_of(owner), rref_id, fork_id)
