"""A file that workers meet in is theirs alone. One that torch makes is open to all on the host."""

import os

from telegrad.errors import RendezvousError


def make_private(path: str) -> None:
    """See that `path` exists and is a file that this user alone can read and write. RendezvousError if it is not ours.

    A path that cannot be opened is left to the store, which says what is wrong with it."""
    if not path:
        return
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError as error:
        raise RendezvousError(f"cannot meet at {path!r}: {error}. Is it the file of another user?") from error
    except OSError:
        return
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid():
            raise RendezvousError(
                f"cannot meet at {path!r}: the file belongs to another user (uid {found.st_uid}), who may change what "
                "the workers say there. Remove it, or meet elsewhere"
            )
        if found.st_mode & 0o077:
            os.fchmod(fd, 0o600)
    finally:
        os.close(fd)
