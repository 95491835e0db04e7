"""Prints what goes wrong in a called function on the worker that runs it, as torch does.

Telegrad itself tells the caller, and logs it on the callee for those who ask.
"""

import logging
import sys

_logger = logging.getLogger("telegrad.rpc.failures")


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)  # noqa: T201 - looked up now: programs replace it


_printer = _Printer()
_level_before = logging.NOTSET


def print_failures() -> None:
    """Begin to print."""
    global _level_before  # noqa: PLW0603 - to be put back
    _level_before = _logger.level
    _logger.setLevel(logging.INFO)
    _logger.addHandler(_printer)


def leave_failures_to_logging() -> None:
    """Stop printing."""
    _logger.removeHandler(_printer)
    _logger.setLevel(_level_before)
