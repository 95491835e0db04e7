"""How a worker's program ended that never called `shutdown`: in words, which are the last that the others hear of it.

Python says nowhere with which status a program is about to exit, so a plain `sys.exit(1)` is not told from the end of a
script. An exception that nobody caught is: the interpreter keeps it for debuggers.
"""

import sys

from telegrad.rpc.remote_errors import in_one_line

_LONGEST = 200  # characters of a text
WITHOUT_SHUTDOWN = "exited without calling rpc.shutdown()"


def ending_at_exit(tells_text: bool = True) -> str:
    """For handlers of `atexit`: what ends this program."""
    uncaught = getattr(sys, "last_value", None)
    is_prompt = hasattr(sys, "ps1") or sys.flags.interactive  # what failed at a prompt did not end the program
    return ending_by(None if is_prompt else uncaught, tells_text)


def ending_by(error: BaseException | None, tells_text: bool = True) -> str:
    """The words for an exception that ends a worker. Without `tells_text`, which may be about a user's data, they are
    its type alone."""
    if error is None:
        return WITHOUT_SHUTDOWN
    if isinstance(error, SystemExit):
        # As the interpreter does: no code is success, and what is no number is printed and is a failure.
        status = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        return f"exited with status {status} without calling rpc.shutdown()" if status else WITHOUT_SHUTDOWN
    return f"ended by {in_one_line(error)[:_LONGEST]}" if tells_text else f"ended by {type(error).__qualname__}"
