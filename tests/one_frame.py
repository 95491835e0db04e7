"""One frame from a socket, for tests that speak the protocol by hand."""

import socket

from telegrad.transport.stream import receive_exactly
from telegrad.wire.frames import HEADER, LENGTHS, WITH_MEMORY, Frame, decode_record


def receive_frame(sock: socket.socket) -> Frame:
    """The next frame; what follows its record is thrown away."""
    _, _, form, record_bytes = HEADER.unpack(receive_exactly(sock, HEADER.size))
    more = sum(LENGTHS.unpack(receive_exactly(sock, LENGTHS.size))) if form == WITH_MEMORY else 0
    frame = decode_record(receive_exactly(sock, record_bytes))
    receive_exactly(sock, more)
    return frame
