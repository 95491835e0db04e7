"""How a worker's program ended that never called `shutdown`: in words, which are the last that the others hear of it.

Python says nowhere with which status a program is about to exit, so a plain `sys.exit(1)` is not told from the end of a
script. An exception that nobody caught is: the interpreter keeps it for debuggers. Of a process of `multiprocessing` it
does not, but up to Python 3.12 it is seen on its way out of the function that the process runs.
"""

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable

from telegrad.rpc.remote_errors import in_one_line

_LONGEST = 200  # characters of a text
WITHOUT_SHUTDOWN = "exited without calling rpc.shutdown()"


class _Child:
    """What this process is as one of multiprocessing's."""

    watched = 0  # the process whose end is looked at; a fork of it begins anew
    ending: dict[bool, str] | None = None  # how its function has ended, by whether the text is told


def watch_child(end: Callable[[], None]) -> None:
    """If this is a process of multiprocessing, have `end` called also where the handlers of `atexit` are not: one that
    was forked leaves without them, or (from Python 3.13 on) begins without those that its parent had."""
    if multiprocessing.parent_process() is None or _Child.watched == os.getpid():
        return
    _Child.watched, _Child.ending = os.getpid(), None
    spawned = "--multiprocessing-fork" in sys.orig_argv
    if sys.version_info < (3, 13):
        multiprocessing.util.Finalize(None, _function_ended, (None if spawned else end,), exitpriority=0)
    elif not spawned:
        atexit.register(end)


def _function_ended(end: Callable[[], None] | None) -> None:
    error = sys.exception()  # on its way out of the function
    _Child.ending = {tells_text: ending_by(error, tells_text) for tells_text in (False, True)}
    main = threading.main_thread()
    if end is not None and all(thread is main or thread.daemon for thread in threading.enumerate()):
        end()  # else the process waits for other threads, which may still use it


def ending_at_exit(tells_text: bool = True) -> str:
    """For what is called at the end of a program: what ends it."""
    uncaught = getattr(sys, "last_value", None)
    if uncaught is None and _Child.ending is not None and _Child.watched == os.getpid():
        return _Child.ending[tells_text]
    is_prompt = hasattr(sys, "ps1") or sys.flags.interactive  # what failed at a prompt did not end the program
    return ending_by(None if is_prompt else uncaught, tells_text)


def ending_by(error: BaseException | None, tells_text: bool = True) -> str:
    """The words for an exception that ends a worker. Without `tells_text`, which may be about a user's data, they are
    its type alone."""
    if error is None:
        return WITHOUT_SHUTDOWN
    if not isinstance(error, SystemExit):
        return f"ended by {_named(error, tells_text)}"
    # As the interpreter does: no code is success, and what is no number is printed and is a failure.
    status = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
    if not status:
        return WITHOUT_SHUTDOWN
    before = None if error.__suppress_context__ else error.__context__
    after = "" if before is None else f", after {_named(before, tells_text)}"
    return f"exited with status {status} without calling rpc.shutdown(){after}"


def _named(error: BaseException, tells_text: bool) -> str:
    if not tells_text:
        return type(error).__qualname__
    text = in_one_line(error)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
