"""The end of an agent's references: let go of what is still held, wait until all owners have heard it, report it."""

import logging
from collections import Counter
from collections.abc import Iterable

from telegrad.errors import RRefError, TelegradError
from telegrad.ids import PeerId, RRefId, show_id
from telegrad.rpc.round_trip import start_call, wait_for_value
from telegrad.rref.ledger.lifetime import Leak
from telegrad.rref.outcome import Outcome
from telegrad.rref.rref_context import RRefContext
from telegrad.rref.value_on_owner import ValueOnOwner

log = logging.getLogger("telegrad.rref")

_PATIENCE = 5.0  # seconds that letting go may take, with all workers in their shutdown
_MOST_SHOWN = 10


def before_shutdown(rrefs: RRefContext) -> None:
    """All workers have come to their graceful shutdown, and nobody makes or sends references any more; or, in a job
    of open size, this one leaves alone, and the others are not waited for."""
    alone = rrefs.agent.world_size is None
    release_handles(rrefs)
    rrefs.wait_until(lambda: not rrefs.used and (alone or not _named(rrefs)), _PATIENCE)
    report = leak_report(rrefs)
    if report and not rrefs.ignore_leaks:
        raise RRefError(report)
    if report:
        log.warning("%s", report)


def leak_report(rrefs: RRefContext) -> str:
    """What is left of references, in words; empty if nothing is."""
    values = named(rrefs)
    if not values and not rrefs.used:
        return ""
    shown = "; ".join(_describe(rrefs, leak) for leak in values[:_MOST_SHOWN])
    return (
        f"Leaking RRef: worker {rrefs.agent.info.name!r} shuts down with {len(values)} values that others "
        f"still name ({shown}) and {len(rrefs.used)} handles whose owners have not answered"
    )


def release_handles(rrefs: RRefContext) -> None:
    """Delete all handles of other workers' values, and report those that the program still held."""
    rrefs.sweep()
    held = rrefs.look(rrefs.used.held)
    if held:
        _report(rrefs, [(owner, rref_id) for rref_id, _, owner in held])
    rrefs.closed = True  # from here on a handle that is collected has been let go already
    for _, fork_id, _ in held:
        rrefs.feed(rrefs.used.drop, fork_id)
    rrefs.sweep()


def named(rrefs: RRefContext) -> list[Leak]:
    """The values of this worker that others name."""
    return rrefs.look(lambda: _named(rrefs))


def _named(rrefs: RRefContext) -> list[Leak]:
    """Those who are gone name nothing, though what they held is kept until all others have answered for them."""
    return [leak for leak in rrefs.owned.leaks() if not all(map(rrefs.is_gone, leak.forks.values()))]


def debug_info(rrefs: RRefContext) -> dict[str, str]:
    """Counts under torch's names."""
    values = named(rrefs)
    return {
        "num_owner_rrefs": str(len(values)),
        "num_pending_users": str(rrefs.look(rrefs.used.counts)["pending"]),
        "num_forks": str(sum(len(leak.forks) for leak in values)),
        "num_pending_futures": str(len(rrefs.deadlines)),
    }


def _report(rrefs: RRefContext, held: Iterable[tuple[PeerId, RRefId]]) -> None:
    by_owner: dict[PeerId, list[RRefId]] = {}
    for owner, rref_id in held:
        by_owner.setdefault(owner, []).append(rref_id)
    lines = []
    for owner, rref_ids in by_owner.items():
        member = rrefs.member(owner)
        if member is None or rrefs.agent.is_dead(member):
            continue
        try:
            arguments = ([ValueOnOwner(rref_id) for rref_id in rref_ids],)
            agent = rrefs.agent
            slot = start_call(agent, agent.link(member), _type_names, arguments, None, _PATIENCE)
            types = wait_for_value(slot)
        except (TelegradError, OSError) as error:
            log.debug("the types of what %s owns are not known: %s", member.name, error)
            types = {"value": len(rref_ids)}
        lines.append(f"{member.name}: " + ", ".join(f"{count} {name}" for name, count in types.items()))
    if lines:
        log.info("worker %r shuts down while it holds references to %s", rrefs.agent.info.name, "; ".join(lines))


def _type_names(values: list[Outcome]) -> dict[str, int]:
    return dict(Counter(_type_name(value) for value in values))


def _type_name(value: Outcome | None) -> str:
    if value is None or not value.done:
        return "value that is not there yet"
    return "failed creation" if value.failure else type(value.value).__name__


def _describe(rrefs: RRefContext, leak: Leak) -> str:
    names = ", ".join(sorted(rrefs.name_of(peer) for peer in set(leak.forks.values())))
    return f"{show_id(leak.rref_id)}, a {_type_name(rrefs.values.get(leak.rref_id))}, by {names}"
