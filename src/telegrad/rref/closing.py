"""The end of an agent's references: let go of what is still held, wait until all owners have heard it, report it."""

import logging
from collections import Counter
from collections.abc import Iterable

from telegrad.errors import RRefError, TelegradError
from telegrad.ids import PeerId, RRefId, show_id
from telegrad.rpc.calls import start_call, wait_for_value
from telegrad.rref.lifetime import Leak
from telegrad.rref.loan import Loan
from telegrad.rref.outcome import Outcome
from telegrad.rref.references import References

log = logging.getLogger("telegrad.rref")

_PATIENCE = 5.0  # seconds that letting go may take, with all workers in their shutdown
_MOST_SHOWN = 10


def before_shutdown(references: References) -> None:
    """All workers have come to their graceful shutdown, and nobody makes or sends references any more; or, in a job
    of open size, this one leaves alone, and the others are not waited for."""
    alone = references.agent.world_size is None
    release_handles(references)
    references.watch(lambda: not references.used and (alone or not _named(references)), _PATIENCE)
    report = leak_report(references)
    if report and not references.ignore_leaks:
        raise RRefError(report)
    if report:
        log.warning("%s", report)


def leak_report(references: References) -> str:
    """What is left of references, in words; empty if nothing is."""
    values = named(references)
    if not values and not references.used:
        return ""
    shown = "; ".join(_describe(references, leak) for leak in values[:_MOST_SHOWN])
    return (
        f"Leaking RRef: worker {references.agent.info.name!r} shuts down with {len(values)} values that others "
        f"still name ({shown}) and {len(references.used)} handles whose owners have not answered"
    )


def release_handles(references: References) -> None:
    """Delete all handles of other workers' values, and report those that the program still held."""
    references.sweep()
    held = references.look(references.used.held)
    if held:
        _report(references, [(owner, rref_id) for rref_id, _, owner in held])
    references.closed = True  # from here on a handle that is collected has been let go already
    for _, fork_id, _ in held:
        references.feed(references.used.drop, fork_id)
    references.sweep()


def named(references: References) -> list[Leak]:
    """The values of this worker that others name."""
    return references.look(lambda: _named(references))


def _named(references: References) -> list[Leak]:
    """Those who are gone name nothing, though what they held is kept until all others have answered for them."""
    return [leak for leak in references.owned.leaks() if not all(map(references.is_gone, leak.forks.values()))]


def debug_info(references: References) -> dict[str, str]:
    """Counts under torch's names."""
    values = named(references)
    return {
        "num_owner_rrefs": str(len(values)),
        "num_pending_users": str(references.look(references.used.counts)["pending"]),
        "num_forks": str(sum(len(leak.forks) for leak in values)),
        "num_pending_futures": str(len(references.deadlines)),
    }


def _report(references: References, held: Iterable[tuple[PeerId, RRefId]]) -> None:
    by_owner: dict[PeerId, list[RRefId]] = {}
    for owner, rref_id in held:
        by_owner.setdefault(owner, []).append(rref_id)
    lines = []
    for owner, rref_ids in by_owner.items():
        member = references.member(owner)
        if member is None or references.agent.is_dead(member):
            continue
        try:
            arguments = ([Loan(rref_id) for rref_id in rref_ids],)
            agent = references.agent
            slot = start_call(agent, agent.link(member), _type_names, arguments, None, _PATIENCE)
            types = wait_for_value(slot)
        except (TelegradError, OSError) as error:
            log.debug("the types of what %s owns are not known: %s", member.name, error)
            types = {"value": len(rref_ids)}
        lines.append(f"{member.name}: " + ", ".join(f"{count} {name}" for name, count in types.items()))
    if lines:
        log.info("worker %r shuts down while it holds references to %s", references.agent.info.name, "; ".join(lines))


def _type_names(values: list[Outcome]) -> dict[str, int]:
    return dict(Counter(_type_name(value) for value in values))


def _type_name(value: Outcome | None) -> str:
    if value is None or not value.done:
        return "value that is not there yet"
    return "failed creation" if value.failure else type(value.value).__name__


def _describe(references: References, leak: Leak) -> str:
    names = ", ".join(sorted(references.name_of(peer) for peer in set(leak.forks.values())))
    return f"{show_id(leak.rref_id)}, a {_type_name(references.values.get(leak.rref_id))}, by {names}"
