"""How a worker connects: how it introduces itself to those it dials, and whom it lets in.

Both sides say who they are, which incarnation they mean, and what they can take. The proofs and the bytes of this are
in `dial.py` and `accept.py`; here is what is said, and how long a worker that does not answer is dialled.
"""

import functools
import hmac
import secrets
import time
from collections.abc import Callable

from telegrad.errors import AuthenticationError, ProtocolError, WorkerDied
from telegrad.rpc.client.outcomes import Dialled, Unanswered
from telegrad.rpc.peers.accept import Acceptor, Caller
from telegrad.rpc.peers.dial import dial, dial_address, main_fingerprint
from telegrad.rpc.peers.heartbeat import REDIAL_SECONDS, cannot_answer
from telegrad.rpc.peers.peers import Peers
from telegrad.rpc.peers.widen import Widening
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.workers import Directory, Member, check_id, check_name
from telegrad.transport.addresses import TCP, Listeners
from telegrad.transport.connection import Connection
from telegrad.transport.handshake import Hello, Refused, Welcome
from telegrad.transport.stream import SocketStream
from telegrad.transport.stripes.seal import fresh_secret
from telegrad.transport.tls import TlsEnds


class Connector:
    """Dials other workers for one agent, and admits those that dial it."""

    def __init__(
        self,
        runtime: Runtime,
        me: Member,
        directory: Directory,
        peers: Peers,
        secret: bytes,
        listeners: Listeners,
        tls: TlsEnds | None = None,
    ) -> None:
        self._runtime = runtime
        self._options = runtime.options
        self._me = me
        self._directory = directory
        self._peers = peers
        self.secret = secret
        self._tls = tls
        # What is done to each connection this worker dials; tests put faults there.
        self.fit_out: Callable[[Connection], Connection] = lambda connection: connection
        self._main = "" if self._options.exports_only else main_fingerprint()  # nobody's concern there
        self._widening = Widening(runtime, functools.partial(directory.workers_here, me))
        self._acceptor = Acceptor(
            listeners,
            secret,
            self._options,
            runtime.io_threads,
            runtime.timer,
            self._admit,
            self._admitted,
            peers.give_back_place,
            self._beside,
            tls,
        )

    def open(self) -> None:
        """Begin to accept connections."""
        self._acceptor.start()

    def close(self) -> None:
        """Accept no more."""
        self._acceptor.close()

    def dial(
        self, member: Member, number: int, ticket: bytes, on_blocked: Callable[[], None], deadline: float
    ) -> Dialled | Unanswered:
        """A new connection for a link, or why there is none. TimeoutError at the deadline of whoever asked for it."""
        me, options = self._me, self._options
        hello = Hello(
            me.worker_id,
            me.name,
            me.incarnation,
            member.incarnation,
            number,
            options.shared_memory,
            self._main,
            options.max_message_bytes,
            ticket,
            secrets.randbits(63) or 1,
        )
        last_try = time.monotonic() + options.connect_timeout
        while True:
            limit = min(deadline, last_try, time.monotonic() + self._runtime.patience)
            try:
                secret = self._secret_of(member)
                connection, welcome = dial(member, hello, secret, options, limit, on_blocked, self._tls)
            except Refused as error:
                return Unanswered(str(error), gone=True)
            except (AuthenticationError, ProtocolError) as error:
                raise type(error)(f"connecting to worker {member.name!r}: {error}") from error
            except WorkerDied:
                raise
            except OSError as error:
                now = time.monotonic()
                if now >= deadline:
                    raise TimeoutError(f"worker {member.name!r} could not be reached in time: {error}") from error
                gone = cannot_answer(member, error)
                if gone or now >= last_try or self._peers.is_dead(member):
                    return Unanswered(str(error), gone)
                time.sleep(REDIAL_SECONDS)
            else:
                if connection.stream.kind == TCP:
                    self._watch(connection, member, hello, welcome)
                return Dialled(self.fit_out(connection), welcome.main_module != self._main)

    def _watch(self, connection: Connection, member: Member, hello: Hello, welcome: Welcome) -> None:
        """Have others put beside a connection over TCP when a large message comes by."""
        address = connection.address
        assert address is not None

        def dial_side(beside: Hello, deadline: float) -> SocketStream:
            secret = self._secret_of(member)
            return dial_address(address, member, beside, secret, self._options, deadline, self._tls)[0]

        encrypted = bool(member.certificate)
        sealed = min(self._widening.most_sealed(), welcome.sealed_connections) if encrypted else 0
        most = sealed or min(self._widening.most(encrypted), welcome.tcp_connections)
        self._widening.watch(connection, hello, most, dial_side, sealed=sealed > 0)

    def _secret_of(self, member: Member) -> bytes:
        """The job's secret; in an insecure job, the one that the worker has published where all meet."""
        return member.secret if self._me.secret and member.secret else self.secret

    def _admit(self, hello: Hello, caller: Caller) -> Welcome:
        """Whether a caller that proved itself is welcome, and as what."""
        me, peers = self._me, self._peers
        try:  # both appear in logs, and in the names of what is kept for it
            check_name(hello.name)
            check_id(hello.worker_id)
        except ValueError as error:
            raise AuthenticationError(str(error)) from None
        if hello.wanted_incarnation != me.incarnation:
            raise AuthenticationError(
                f"worker {me.name!r} was started again (its incarnation is {me.incarnation}, "
                f"not {hello.wanted_incarnation})"
            )
        if self._runtime.closing:
            raise AuthenticationError(f"worker {me.name!r} is shutting down")
        if peers.has_lost(hello.incarnation):
            # What it had asked has been forgotten with it: to take it back could run a request twice.
            raise AuthenticationError(
                f"worker {me.name!r} considers {hello.name!r} dead: its connection closed, or it was silent too long; "
                "start it again"
            )
        known = self._directory.by_id(hello.worker_id)
        if known is None or known.incarnation != hello.incarnation:
            peers.look_for_news(hello.worker_id)  # it was started, or started again, since the last look
            known = self._directory.by_id(hello.worker_id)
        if known is not None:
            _check_identity(known, hello, caller, me)
        elif self._options.exports_only:  # or it would have as many limits as it gives itself names
            raise AuthenticationError(f"worker {hello.name!r} is not on record where the workers of this job meet")
        if peers.is_of_another(hello):
            raise AuthenticationError(f"incarnation {hello.incarnation:x} is another's, not of worker {hello.name!r}")
        served = peers.session_for(hello)
        if served is not None and not hmac.compare_digest(served.ticket, hello.ticket):
            raise AuthenticationError(f"link {hello.link} of worker {hello.name!r} is another's")
        encrypted = caller.certificate is not None
        if hello.side:
            self._widening.check(hello, served)
        if hello.seal and not (hello.side and encrypted):
            raise AuthenticationError("only a connection beside another can be sealed, and its secret is said over TLS")
        if not hello.side:  # last: what is kept for it from here on, whoever accepts it gives back
            peers.keep_place(hello)
        shared = hello.shared_memory and self._options.shared_memory
        return Welcome(
            me.worker_id,
            me.name,
            me.incarnation,
            served is not None,
            shared,
            self._main,
            self._options.max_message_bytes,
            self._widening.most(encrypted) if caller.process is None else 1,
            self._widening.most_sealed() if encrypted else 0,
            fresh_secret() if hello.seal else b"",
        )

    def _beside(self, hello: Hello, stream: SocketStream) -> None:
        self._widening.admit(hello, self._peers.session_for(hello), stream, self._peers.sessions())

    def _admitted(self, hello: Hello, welcome: Welcome, connection: Connection) -> None:
        self._peers.serve(hello, connection, hello.main_module != self._main)


def _check_identity(known: Member, hello: Hello, caller: Caller, me: Member) -> None:
    """Raise if a caller is not the worker that it says it is: the secret alone proves no more than membership."""
    if known.name != hello.name:
        raise AuthenticationError(f"worker {hello.worker_id} is {known.name!r}, not {hello.name!r}")
    process = caller.process if known.incarnation == hello.incarnation else None
    if process is not None and known.pid and known.host == me.host and process.pid != known.pid:
        raise AuthenticationError(
            f"process {process.pid} says that it is worker {known.name!r}, which is process {known.pid}"
        )
