"""Where the jobs of this user on this host can be found: each worker keeps a small file that only this user can read.

It holds the worker's record (where it listens) and what to prove to it: whoever can read it could read the worker's
memory as well. It goes with the worker; that of one that was killed is removed by whoever looks next.
TELEGRAD_ANNOUNCE=0 in a worker's environment leaves it out.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from telegrad.errors import TelegradError
from telegrad.rpc.agent import Agent
from telegrad.rpc.job.rendezvous.store import describe
from telegrad.rpc.layer import Layer
from telegrad.rpc.trust.secret import FILE_VARIABLE
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import host_identity

log = logging.getLogger("telegrad.observe")

VARIABLE = "TELEGRAD_ANNOUNCE"


class Announcement(msgspec.Struct, frozen=True):
    """One worker of a job on this host."""

    job: str  # the same for all workers of a job
    program: str
    member: Member
    secret: bytes | None = None  # None: the one that this user's processes share


class Job(NamedTuple):
    """A job of which workers run on this host."""

    workers: list[Announcement]  # the latest last

    @property
    def pid(self) -> int:
        """The process of its first worker here: what it is chosen by."""
        return self._first.member.pid

    @property
    def _first(self) -> Announcement:
        return min(self.workers, key=lambda a: a.member.worker_id)

    def __str__(self) -> str:
        names = sorted((a.member.worker_id, a.member.name) for a in self.workers)
        shown = ", ".join(name for _, name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"{self.pid}: {self._first.program} ({shown})"


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Announcement).decode


def folder() -> Path:
    """Where the files are; made if it is not there, and refused if it is somebody else's."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = (
        Path(base, "telegrad")
        if base and os.path.isdir(base)
        else Path(tempfile.gettempdir(), f"telegrad-{os.getuid()}")
    )
    for each in (path, path / "workers"):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = each.lstat()
        if state.st_uid != os.getuid() or state.st_mode & 0o077 or each.is_symlink():
            raise PermissionError(f"{each} is not this user's alone; remove it")
    return path / "workers"


class Announced(Layer):
    """The file of one worker, for as long as its agent lives."""

    def __init__(self, agent: Agent) -> None:
        self._path: Path | None = None
        self._pid = os.getpid()
        try:
            if agent.member.worker_id == 0:  # somebody has to, where nobody ever looks
                _living()
            self._path = self._write(agent)
        except OSError as error:
            log.debug("`telegrad dashboard` will not find this worker: %s", error)

    def _write(self, agent: Agent) -> Path:
        options, secret = agent.options, agent.connector.secret
        given = options.secret_bytes or options.secret_file or os.environ.get(FILE_VARIABLE)
        where = "" if agent.member_log is None else describe(agent.member_log.store)
        said = Announcement(
            hmac.new(secret, b"telegrad job\0" + where.encode(), hashlib.sha256).hexdigest()[:16],
            Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python",
            agent.member,
            secret if given else None,
        )
        path = folder() / f"{_host()}-{os.getpid()}-{agent.member.incarnation:x}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_encode(said))
        return path

    def on_close(self) -> None:
        """The worker leaves."""
        if self._path is not None and os.getpid() == self._pid:
            self._path.unlink(missing_ok=True)


def _host() -> str:
    """In the names of files: a folder may be shared by containers whose processes cannot see each other."""
    return hashlib.sha256(host_identity().encode()).hexdigest()[:8]


def announcements() -> Iterator[Announcement]:
    """The workers of this user that run on this host, the latest last."""
    found = []
    for path in _living():
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append((path.stat().st_mtime_ns, _decode(path.read_bytes())))
    yield from (said for _, said in sorted(found, key=lambda each: each[0]))


def _living() -> list[Path]:
    """The files of workers on this host; those of the killed are removed."""
    files = list(folder().glob(f"{_host()}-*-*"))
    if not Path("/proc/self").exists():
        return files
    dead = {path for path in files if not Path("/proc", path.name.split("-")[1]).exists()}
    for path in dead:
        path.unlink(missing_ok=True)
    return [path for path in files if path not in dead]


def jobs() -> list[Job]:
    """The jobs that have workers here, the latest last."""
    by_job: dict[str, list[Announcement]] = {}
    for said in announcements():
        by_job.setdefault(said.job, []).append(said)
    return [Job(workers) for workers in by_job.values()]


def choose(pid: int | None = None) -> Job:
    """The job that runs here, or that of process `pid`. TelegradError if there is none, or no saying which."""
    try:
        found = jobs()
    except OSError as error:
        raise TelegradError(f"the files by which jobs are found cannot be read: {error}") from error
    listing = "\n".join(f"  {job}" for job in found)
    if pid is not None:
        mine = [job for job in found if any(a.member.pid == pid for a in job.workers)]
        if mine:
            return mine[-1]
        raise TelegradError(f"process {pid} is no worker of yours on this host. " + _what_runs(listing))
    if len(found) == 1:
        return found[0]
    raise TelegradError(_what_runs(listing) if not found else f"several jobs run here; choose by process:\n{listing}")


def _what_runs(listing: str) -> str:
    if listing:
        return f"These jobs run here:\n{listing}"
    return (
        "no job of yours runs on this host; for one that runs elsewhere give the address where its workers meet, "
        "tcp://HOST:PORT, and its secret in TELEGRAD_SECRET"
    )


def install(agent: Agent) -> None:
    """Let `telegrad dashboard`, `top` and `status` find this worker."""
    if os.environ.get(VARIABLE, "1") != "0":
        agent.install(Announced(agent))
