"""References as torch's programs see them: the class under both its names, and what is done with them at the end."""

from datetime import timedelta
from typing import Any

from telegrad.errors import RRefError
from telegrad.rpc.current import require_agent
from telegrad.rpc.futures import Future
from telegrad.rref import RRef, debug_info, rrefs_of
from telegrad.rref.closing import leak_report

__all__ = ["PyRRef", "RRef"]

PyRRef = RRef


def _rref_context_get_debug_info() -> dict[str, str]:
    """References of this worker, counted."""
    return debug_info(rrefs_of(require_agent()))


def _delete_all_user_and_unforked_owner_rrefs(timeout: timedelta = timedelta(seconds=100)) -> None:
    """Let go of every reference to another worker's value; all workers must have come to their shutdown."""
    rrefs_of(require_agent()).before_shutdown()


def _destroy_rref_context(ignore_rref_leak: bool) -> None:
    """References end here. Raises if values are still named by others, unless that is to be ignored."""
    report = leak_report(rrefs_of(require_agent()))
    if report and not ignore_rref_leak:
        raise RRefError(report)


def _rref_typeof_on_owner(rref: RRef[Any], blocking: bool = True) -> Any:
    """The type of a value of this worker, or a future of it."""
    if blocking:
        return type(rref.local_value())
    future: Future[type] = Future(what=f"the type of {rref}")
    future.set_result(type(rref.local_value()))
    return future


def _rref_typeof_on_user(rref: RRef[Any], timeout: float = -1.0, blocking: bool = True) -> Any:
    """The type of another worker's value, or a future of it."""
    return rref._get_type(timeout=timeout, blocking=blocking)
