"""Where a job's secret comes from. What a worker proves by it, and what it takes for proven, is in the handshake.

given       by an option, TELEGRAD_SECRET or a file: needed as soon as the workers are on several hosts
the user's  a file of 0600 in the user's state directory, made when first needed: the processes of one user on one
            host share it, and nobody else can read it
published   each worker draws its own and writes it where all meet. Whoever can read that place can call it, so this
            is for `insecure=True` alone
"""

import contextlib
import logging
import os
import secrets
import stat
import tempfile
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from telegrad.errors import AuthenticationError

if TYPE_CHECKING:
    from telegrad.rpc.options import RpcBackendOptions

log = logging.getLogger("telegrad.rpc")

SECRET_BYTES = 32
FILE_VARIABLE = "TELEGRAD_SECRET_FILE"
_LEAST_BYTES = 16  # of a secret in a file: less can be guessed

WHAT_TO_DO = (
    "Give all workers of the job the same secret: in TELEGRAD_SECRET, in a file named by TELEGRAD_SECRET_FILE, or as "
    "RpcBackendOptions(secret=...); `python -c 'import secrets; print(secrets.token_hex(32))'` makes one. On a network "
    "where everyone may run code as you, RpcBackendOptions(insecure=True) goes without"
)


class Source(Enum):
    """Where a secret came from."""

    GIVEN = "given"
    USER = "the user's"
    PUBLISHED = "published"


class JobSecret(NamedTuple):
    """A secret, and where it came from."""

    value: bytes
    source: Source

    def __repr__(self) -> str:
        return f"JobSecret({self.source.value})"


def find_secret(options: "RpcBackendOptions", *, leaves_host: bool, may_leave_host: bool) -> JobSecret:
    """The secret of a job. AuthenticationError if it needs one that nobody gave.

    `leaves_host`: some of its workers are known to be on other hosts; `may_leave_host`: that cannot be ruled out."""
    given = options.secret_bytes or _from_file(options.secret_file or os.environ.get(FILE_VARIABLE))
    if given:
        return JobSecret(given, Source.GIVEN)
    if options.insecure and may_leave_host:
        log.warning(
            "this job has no secret and may span several hosts: whoever can reach its workers or the place where they "
            "meet can run code as you. %s",
            WHAT_TO_DO,
        )
        return JobSecret(os.urandom(SECRET_BYTES), Source.PUBLISHED)
    if leaves_host:
        raise AuthenticationError(f"the workers of this job are on several hosts, and it has no secret. {WHAT_TO_DO}")
    return JobSecret(user_secret(), Source.USER)


def _from_file(path: str | None) -> bytes | None:
    if not path:
        return None
    try:
        value = Path(path).read_bytes().strip()
    except OSError as error:
        raise AuthenticationError(f"the file of the job's secret cannot be read: {error}") from error
    if len(value) < _LEAST_BYTES:
        raise AuthenticationError(
            f"the secret in {path} has {len(value)} bytes; it needs at least {_LEAST_BYTES}, or it can be guessed"
        )
    return value


def user_secret() -> bytes:
    """The secret that the processes of this user share on this host."""
    problems = []
    for folder in _folders():
        try:
            return _read_or_make(folder)
        except OSError as error:  # no home, or a read-only one: try the next
            problems.append(f"{folder}: {error.strerror or error}")
    raise AuthenticationError(
        f"there is no place for a secret that only this user can read ({'; '.join(problems)}). {WHAT_TO_DO}"
    )


def _folders() -> list[Path]:
    """Where the secret may be, in this order. All workers of a user see the same, unless a container is in between."""
    state = os.environ.get("XDG_STATE_HOME")
    home = os.path.expanduser("~")
    folders = [Path(state, "telegrad")] if state and os.path.isabs(state) else []
    if os.path.isabs(home) and os.path.isdir(home) and home != "/":
        folders.append(Path(home, ".local", "state", "telegrad"))
    return [*folders, Path(tempfile.gettempdir(), f"telegrad-{os.getuid()}")]


def _read_or_make(folder: Path) -> bytes:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder, os.lstat(folder), stat.S_ISDIR)
    path = folder / "secret"
    with contextlib.suppress(FileNotFoundError):
        return _read(path)
    # Made aside and linked into place: a reader finds all of it, and of two who make it at once the first counts.
    fd, draft = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_hex(SECRET_BYTES).encode())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
    return _read(path)


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        _check_private(path, os.fstat(fd), stat.S_ISREG)
        value = file.read().strip()
    if len(value) < _LEAST_BYTES:
        raise AuthenticationError(f"{path} holds no secret but {len(value)} bytes: remove it, and a new one is made")
    return value


def _check_private(path: Path, found: os.stat_result, is_kind: object) -> None:
    """Raise unless it is this user's alone. Somebody else may have been there first, in a folder that all can write."""
    assert callable(is_kind)
    if found.st_uid != os.getuid() or not is_kind(found.st_mode):
        raise AuthenticationError(
            f"{path} belongs to another user (uid {found.st_uid}) or is not what it should be; this worker keeps no "
            f"secret there. Remove it, or set XDG_STATE_HOME. {WHAT_TO_DO}"
        )
    if found.st_mode & 0o077:
        raise AuthenticationError(
            f"{path} can be read by others (mode {stat.S_IMODE(found.st_mode):o}), so what is in it is no secret: "
            f"`chmod go= {path}`, and remove the secret if others may have read it"
        )
