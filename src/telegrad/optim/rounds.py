"""One round: ask all owners at once, wait for all, and only then complain.

Waiting for all before raising leaves no call running behind the caller's back, and lets the error say which owners did
what was asked and which did not.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from telegrad import rpc


def ask_all(what: str, calls: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Call `function(*args)` on each owner, `calls` being owner -> (function, *args); the replies, by owner."""
    if len(calls) == 1:
        return _ask_one(what, *calls.items())
    futures = {}
    failed: dict[str, BaseException] = {}
    for owner, (function, *args) in calls.items():
        try:
            futures[owner] = rpc.rpc_async(owner, function, args=tuple(args))
        except Exception as error:  # The other owners are asked all the same.
            failed[owner] = error
    replies = {}
    for owner, future in futures.items():
        try:
            replies[owner] = future.wait()
        except Exception as error:  # Every owner's outcome is collected first.
            failed[owner] = error
    if failed:
        _raise_first(what, failed, sorted(replies))
    return replies


def _ask_one(what: str, call: tuple[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The same where there is one owner: this thread waits for the reply itself."""
    owner, (function, *args) = call
    try:
        return {owner: rpc.rpc_sync(owner, function, args=tuple(args))}
    except Exception as error:
        _raise_first(what, {owner: error}, [])


def _raise_first(what: str, failed: Mapping[str, BaseException], done: list[str]) -> NoReturn:
    owner, cause = next(iter(failed.items()))
    error = naming(owner, what, cause)
    others = [name for name in failed if name != owner]
    if others:
        error.add_note(f"{what} failed on {_names(others)} as well")
    if done:
        error.add_note(f"{what} was completed on {_names(done)}")
    raise error from (cause if error is not cause else None)


def naming(owner: str, what: str, cause: BaseException) -> BaseException:
    """`cause` with its own type and its owner's name in its text; as it is where it says so already."""
    if owner in str(cause):
        return cause
    text = f"worker '{owner}' failed in {what}: {cause}"
    try:
        error = type(cause)(text)
    except Exception:  # A constructor that wants more than a text: the note carries the name.
        error = None
    if error is None or text not in str(error):
        cause.add_note(text)
        return cause
    return error


def _names(owners: list[str]) -> str:
    return ", ".join(f"'{owner}'" for owner in owners)
