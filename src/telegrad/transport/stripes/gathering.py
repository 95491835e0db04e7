"""The side streams of an accepted connection, until all that its dialler announced have come."""

import threading

from telegrad.errors import AuthenticationError
from telegrad.transport.stream import SocketStream


class Gathering:
    """Side streams by their place, from 1 on. Several threads accept; `_lock` guards the table."""

    def __init__(self, sides: int) -> None:
        self.sides = sides
        self._lock = threading.Lock()
        self._streams: dict[int, SocketStream] = {}
        self._closed = False  # all are there, or the connection has ended

    def add(self, place: int, stream: SocketStream) -> list[SocketStream] | None:
        """One has come; all of them in order, if it was the last. It replaces one that its dialler gave up."""
        with self._lock:
            if self._closed:
                raise AuthenticationError("that connection has ended, or has all the others beside it")
            before, self._streams[place] = self._streams.get(place), stream
            whole = len(self._streams) == self.sides
            self._closed = whole
        if before is not None:
            before.close()
        return [self._streams[i + 1] for i in range(self.sides)] if whole else None

    def close(self) -> None:
        """The connection has ended: those that came belong to nobody, unless all had come."""
        with self._lock:
            streams = [] if self._closed else list(self._streams.values())
            self._closed = True
        for stream in streams:
            stream.close()
