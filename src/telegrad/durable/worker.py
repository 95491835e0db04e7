"""What the driver of a run, and other members, call on a worker. Each function is one message of the protocol.

`core.py` says when each is sent; `Holdings` decides what of an older epoch is refused.
"""

import logging
from pathlib import Path
from typing import Any

from telegrad import rpc
from telegrad.durable.core import DISK
from telegrad.durable.part import Part, Recipe, State, part_of, parts_of
from telegrad.durable.snapshot import disk
from telegrad.durable.snapshot.generators import seed_generators
from telegrad.durable.snapshot.names import Report, Snapshot
from telegrad.errors import DurableError, RunSuperseded, WorkerDied
from telegrad.optim.owner import LocalOptimizer
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import require_agent

log = logging.getLogger("telegrad.durable")


def declare(
    run: str, driver: str, declaration: int, seed: int | None, resume: bool, recipes: tuple[Recipe, ...]
) -> tuple[int, Any]:
    """Make durable values. Returns who made them, this incarnation, and what the last one has to say of itself.

    A program that was started again declares all its values anew, and then asks for their states."""
    agent = require_agent()
    part = part_of(agent, run)
    result = None
    with part.lock:
        part.driver = driver
        if part.declaration != declaration:
            part.declaration = declaration
            part.values.clear()
            if not resume:
                part.holdings.forget()
            if seed is not None:
                seed_generators(seed, agent.info.name)
        part.holdings.live = True
        for recipe in recipes:
            made = part.make(recipe)
            result = made.description() if isinstance(made, LocalOptimizer) else None
    return agent.member.incarnation, result


def halt(run: str, epoch: int, seconds: float) -> Report:
    """The run begins or returns: end what is under way here, and say what snapshots there are."""
    part = part_of(require_agent(), run)
    with part.guard:
        part.holdings.halt(epoch)
    part.wait_until_quiet(seconds)
    with part.lock, part.guard:  # behind a restore that was given up
        part.holdings.check(epoch)
        return part.holdings.report()


def take(
    run: str, epoch: int, snapshot: Snapshot, holders: tuple[str, ...], folder: str | None, driver: str, seconds: float
) -> None:
    """Copy the state of everything durable here aside. What sends it on works behind the caller's back."""
    agent = require_agent()
    part = part_of(agent, run)
    with part.lock:
        state = part.state()
        with part.guard:
            part.holdings.take(epoch, snapshot, state)
            part.sending.add(snapshot)
    agent.io_threads.submit(lambda: _send_on(agent, part, epoch, snapshot, holders, folder, driver, seconds))


def _send_on(
    agent: Agent,
    part: Part,
    epoch: int,
    snapshot: Snapshot,
    holders: tuple[str, ...],
    folder: str | None,
    driver: str,
    seconds: float,
) -> None:
    """Send a copy to its holders, then to disk, and tell the driver of both."""
    me, state = agent.info.name, part.holdings.own.get(snapshot)
    try:
        if state is None:  # forgotten already: the run has returned to an older one
            return
        send_copies(part, epoch, snapshot, holders, seconds)
        if holders:
            rpc.rpc_sync(driver, note, (part.run, "arrived", me, snapshot), timeout=seconds)
        if folder is not None:
            disk.write_part(Path(folder), snapshot, me, state)
            rpc.rpc_sync(driver, note, (part.run, "written", me, snapshot), timeout=seconds)
            if not holders:
                rpc.rpc_sync(driver, note, (part.run, "arrived", me, snapshot), timeout=seconds)
    except (WorkerDied, RunSuperseded) as error:  # the driver hears of it, too, and returns to an older one
        log.debug("a copy of %r after step %d could not be delivered: %s", part.run, snapshot.step, error)
    except Exception as error:
        _complain(agent, part, snapshot, driver, error, seconds)
    finally:
        with part.guard:
            part.sending.discard(snapshot)


def _complain(agent: Agent, part: Part, snapshot: Snapshot, driver: str, error: Exception, seconds: float) -> None:
    text = (
        f"worker {agent.info.name!r} could not make its part of the snapshot after step {snapshot.step} safe: "
        f"{type(error).__name__}: {error}"
    )
    log.error("%s", text)
    try:
        rpc.rpc_sync(driver, note, (part.run, "failed", text, snapshot), timeout=seconds)
    except WorkerDied as died:
        log.debug("the driver could not be told: %s", died)


def send_copies(part: Part, epoch: int, snapshot: Snapshot, holders: tuple[str, ...], seconds: float) -> None:
    """Send this worker's own part of a snapshot to others, and wait until they have it."""
    me, state = part.agent.info.name, part.holdings.own[snapshot]
    futures = [
        rpc.rpc_async(holder, keep, (part.run, epoch, me, snapshot, state), timeout=seconds) for holder in holders
    ]
    for future in futures:
        future.wait()


def keep(run: str, epoch: int, owner: str, snapshot: Snapshot, state: State) -> None:
    """Keep the part of another worker. Its tensors stay in the memory they came in."""
    part = part_of(require_agent(), run)
    with part.guard:
        part.holdings.keep(epoch, owner, snapshot, state)


def give(run: str, owner: str, snapshot: Snapshot) -> State:
    """Give back what was kept."""
    part = part_of(require_agent(), run)
    try:
        return part.holdings.kept[owner, snapshot]
    except KeyError:
        raise DurableError(
            f"worker {part.agent.info.name!r} does not have the part of {owner!r} in snapshot {snapshot} any more"
        ) from None


def restore(
    run: str,
    epoch: int,
    driver: str,
    declaration: int,
    snapshot: Snapshot,
    source: str | None,
    holders: tuple[str, ...],
    folder: str | None,
    recipes: tuple[Recipe, ...],
    seconds: float,
) -> None:
    """Return to a snapshot, and see that those who should keep a copy of this worker's part have one."""
    agent = require_agent()
    part = part_of(agent, run)
    me = agent.info.name
    with part.lock:
        part.holdings.check(epoch)
        if source is None:
            state = part.holdings.own[snapshot]
        elif source == DISK:
            assert folder is not None
            state = disk.read_part(Path(folder), snapshot, me)
        else:
            state = rpc.rpc_sync(source, give, (run, me, snapshot), timeout=seconds)
        part.driver, part.declaration = driver, declaration
        with part.guard:
            part.holdings.take(epoch, snapshot, state)
        part.load(state, recipes)
    send_copies(part, epoch, snapshot, holders, seconds)


def commit(run: str, epoch: int, snapshot: Snapshot) -> None:
    """A snapshot is safe: what is older may go."""
    part_of(require_agent(), run).commit(epoch, snapshot)


def forget(run: str) -> None:
    """The run is over."""
    parts = parts_of(require_agent())
    parts.by_run.pop(run, None)
    parts.closed = True


# --- what members tell the driver ---


def note(run: str, what: str, who: str, snapshot: Snapshot) -> None:
    """A member's part has arrived, or was written, or could not be."""
    listener = parts_of(require_agent()).driven.get(run)
    if listener is not None:
        listener(what, who, snapshot)
