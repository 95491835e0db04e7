"""Who listens at a TCP port of this machine, as far as the kernel's tables tell: for errors, and to know one's own."""

import os
from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"  # in /proc/net/tcp
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def _inodes(port: int) -> set[str]:
    """The sockets that listen at `port`, by the numbers the kernel gives them."""
    found = set()
    for table in _TABLES:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found


def _sockets_of(process: str) -> Iterator[str]:
    folder = f"/proc/{process}/fd"
    try:
        names = os.listdir(folder)
    except OSError:  # ended meanwhile, or another user's
        return
    for name in names:
        try:
            yield os.readlink(f"{folder}/{name}")
        except OSError:
            continue


def listens_in_this_process(port: int) -> bool:
    """Whether a socket of this process listens at `port`; True where the kernel does not tell."""
    if not os.path.exists(_TABLES[0]):
        return True
    inodes = _inodes(port)
    return bool(inodes) and any(link in inodes for link in _sockets_of("self"))


def who_listens(port: int) -> str | None:
    """The process that listens at `port`, in words; None if that cannot be known."""
    inodes = _inodes(port)
    if not inodes:
        return None
    for process in filter(str.isdecimal, os.listdir("/proc")):
        if any(link in inodes for link in _sockets_of(process)):
            try:
                command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                command = "?"
            return f"process {process} ({command.strip()[:120]})"
    return "a process of another user"
