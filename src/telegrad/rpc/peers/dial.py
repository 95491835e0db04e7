"""Dialling: a connection to another worker, made in the calling thread, with a deadline, after both proved themselves.

The other side is `accept.py`.
"""

import hashlib
import hmac
import os
import socket
import sys
import time
from collections.abc import Callable

from telegrad.errors import AuthenticationError, ProtocolError, WorkerDied
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import TCP, Address, connect, reachable
from telegrad.transport.connection import Connection
from telegrad.transport.credentials import credentials_of
from telegrad.transport.handshake import DiallerHandshake, Hello, Welcome
from telegrad.transport.stream import Lane, SocketStream, make_lane_pair, pass_lane, receive_exactly
from telegrad.transport.stripes.seal import SECRET_BYTES
from telegrad.transport.stripes.sealed_stream import SealedStream
from telegrad.transport.tls import TlsEnds, dialling_ends
from telegrad.transport.tls_stream import TlsSocket, TlsStream

HANDSHAKE_SECONDS = 10.0


def main_fingerprint() -> str:
    """What two processes share exactly if their `__main__` is the same program, so its functions can go by name."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None:
        return f"interactive {os.getpid()}"
    try:
        with open(path, "rb") as source:
            return hashlib.sha256(source.read()).hexdigest()
    except OSError:
        return f"unreadable {path}"


def dial(
    member: Member,
    hello: Hello,
    secret: bytes,
    options: RpcBackendOptions,
    deadline: float,
    on_blocked: Callable[[], None],
    tls: TlsEnds | None = None,
) -> tuple[Connection, Welcome]:
    """A connection to `member`, over the best way there is. ConnectionError if nobody answers at its addresses."""

    def connection_at(address: Address) -> tuple[Connection, Welcome]:
        stream, welcome = dial_address(address, member, hello, secret, options, deadline, tls)
        connection = Connection(stream, max_frame=options.max_message_bytes, on_blocked=on_blocked)
        connection.peer, connection.peer_takes = f"worker {welcome.name!r}", welcome.takes_bytes
        connection.number, connection.address = hello.connection, address
        return connection, welcome

    addresses = reachable(member.addresses, options.transports)
    if not addresses:
        raise WorkerDied(
            f"worker {member.name!r} cannot be reached: it listens at {list(member.addresses)}, and this worker may "
            f"use {options.transports}; allow the same transports on both.",
            worker=member.name,
            incarnation=member.incarnation,
        )
    problem: Exception | None = None
    for address in addresses:
        try:
            return connection_at(address)
        except (OSError, ProtocolError) as error:
            problem = error
    assert problem is not None
    try:
        raise problem
    finally:
        del problem  # this frame would hold the error that holds it


def dial_address(
    address: Address,
    member: Member,
    hello: Hello,
    secret: bytes,
    options: RpcBackendOptions,
    deadline: float,
    tls: TlsEnds | None,
) -> tuple[SocketStream, Welcome]:
    """A stream to `member` at one of its addresses, once both ends have proved themselves."""
    left = max(0.1, min(deadline - time.monotonic(), HANDSHAKE_SECONDS))
    plain = connect(address, left)
    sock: socket.socket | TlsSocket = plain
    ours: socket.socket | None = None
    try:
        process = credentials_of(plain)
        if process is not None and not process.is_trusted_user:
            raise ConnectionRefusedError(f"a process of another user (uid {process.uid}) listens there")
        binding = b""
        if address.kind == TCP:
            sock, binding = _encrypted(plain, member, options, tls)
        if hello.seal and not isinstance(sock, TlsSocket):
            raise AuthenticationError(f"worker {member.name!r} does not speak TLS here: no secret is said in clear")
        handshake = DiallerHandshake(secret, binding)
        sock.sendall(handshake.opening)
        answer = receive_exactly(sock, handshake.opening_answer_bytes)
        shares = sock.family == socket.AF_UNIX and hello.shared_memory
        sock.sendall(handshake.answer(answer, _with_shared_memory(hello, shares)))
        if shares:
            ours, theirs = make_lane_pair()
            with theirs:
                pass_lane(plain, theirs)
        code, length = handshake.verdict_length(receive_exactly(sock, handshake.verdict_header_bytes))
        welcome = handshake.verdict(code, receive_exactly(sock, length))
        if (welcome.worker_id, welcome.incarnation) != (member.worker_id, member.incarnation):
            raise AuthenticationError(f"it is worker {welcome.name!r}, incarnation {welcome.incarnation:x}")
        if hello.seal:
            return sealed_over(sock, hello.seal, welcome.seal, member.name), welcome
    except BaseException:
        if ours is not None:
            ours.close()
        sock.close()
        raise
    return stream_over(sock, address.kind, lane_over(ours, welcome.shared_memory)), welcome


def _encrypted(
    sock: socket.socket, member: Member, options: RpcBackendOptions, tls: TlsEnds | None
) -> tuple[socket.socket | TlsSocket, bytes]:
    """A dialled connection with TLS on it if the worker has published a certificate, and that certificate."""
    if member.certificate:
        ends = dialling_ends() if tls is None else tls
        return ends.wrap_dialled(sock, member.certificate, member.name), member.certificate
    if options.tls:
        raise AuthenticationError(f"worker {member.name!r} does not speak TLS, which this worker's options ask for")
    return sock, b""


def stream_over(sock: socket.socket | TlsSocket, kind: str, lane: Lane | None) -> SocketStream:
    """The stream over a socket that both sides have agreed on."""
    return TlsStream(sock, kind) if isinstance(sock, TlsSocket) else SocketStream(sock, kind, lane)


def sealed_over(sock: socket.socket | TlsSocket, secret: bytes, peers_secret: bytes, name: str) -> SealedStream:
    """The stream over a socket on which both ends have said, over TLS, under which secrets they seal what they send."""
    if not isinstance(sock, TlsSocket):
        raise ProtocolError(f"worker {name!r} says a secret over a connection that is not encrypted")
    if not len(secret) == len(peers_secret) == SECRET_BYTES:
        raise ProtocolError(f"the secret of a connection that is sealed has {SECRET_BYTES} bytes")
    if hmac.compare_digest(secret, peers_secret):  # or what each end sends would open at that end
        raise ProtocolError(f"worker {name!r} says the secret that it was told, which is for the other direction alone")
    return SealedStream(sock, TCP, secret, peers_secret, f"worker {name!r}")


def lane_over(sock: socket.socket | None, agreed: bool) -> Lane | None:
    """The lane for descriptors, if both sides will use it."""
    if sock is not None and not agreed:
        sock.close()
    return Lane(sock) if sock is not None and agreed else None


def _with_shared_memory(hello: Hello, shared_memory: bool) -> Hello:
    if hello.shared_memory == shared_memory:
        return hello
    fields = {f: getattr(hello, f) for f in hello.__struct_fields__}
    return Hello(**{**fields, "shared_memory": shared_memory})
