"""Binds this process to the life of the one that started it, then becomes the command it was given.

Run as a file, by a bare interpreter, so it imports nothing of Telegrad: `python -I -S parent_death.py PARENT
COMMAND...`. The kernel then kills it when its parent ends, however that happens. This setting survives `exec`.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Ask for the parent-death signal and become the command."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - only where it is needed: it is half of what this program costs

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the signal was asked for
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
