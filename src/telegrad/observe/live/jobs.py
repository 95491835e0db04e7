"""Where the pages of this user on this host can be found: a small file for each, that only this user can read."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class RunningPage(NamedTuple):
    """A page, and the process that serves it."""

    pid: int
    name: str
    url: str


def folder() -> Path:
    """Where the files are; made if it is not there, and refused if it is somebody else's."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base, "telegrad") if base else Path(tempfile.gettempdir(), f"telegrad-{os.getuid()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = path.lstat()  # not what somebody else made it point to
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise PermissionError(f"{path} is not this user's alone; remove it")
    return path


@contextlib.contextmanager
def announced(url: str, name: str) -> Iterator[None]:
    """Let `telegrad top` and `telegrad dashboard` find a page, for the length of a block."""
    path = folder() / f"{os.getpid()}.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"name": name, "url": url}, file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_pages() -> list[RunningPage]:
    """The pages of this user that run on this host, the latest last."""
    found = []
    for path in sorted(folder().glob("*.json"), key=lambda p: p.stat().st_mtime):
        with contextlib.suppress(ValueError, KeyError, OSError):
            pid = int(path.stem)
            if not Path(f"/proc/{pid}").exists():
                path.unlink(missing_ok=True)  # its process was killed
                continue
            content = json.loads(path.read_text())
            found.append(RunningPage(pid, content["name"], content["url"]))
    return found
