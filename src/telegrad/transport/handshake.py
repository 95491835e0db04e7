"""How two workers prove to each other that they belong to one job, before any other byte is read.

    dialler                                   listener
    MAGIC version nonce_d          ------>
                                   <------    MAGIC version nonce_l, proof of the listener
    proof of the dialler, hello    ------>
                                   <------    proof of the verdict, welcome or a refusal in words

A proof is an HMAC under the job's secret of all that has been said so far: its sender's role, both nonces, the
certificate of the listener where there is one, the hello (who calls, which incarnation of whom it wants), and the
verdict. So a recorded proof is worthless, and one who passes the bytes on can change none of them, nor lead a dialler
to another worker than the one it wants. Until the dialler's proof is verified the listener reads fixed sizes only and
allocates nothing for the stranger. No I/O here: bytes in, bytes out.
"""

import hashlib
import hmac
import os
import struct

import msgspec

from telegrad.errors import AuthenticationError, ProtocolError, TelegradError
from telegrad.wire.frames import MAX_FRAME

MAGIC = b"TGRD"
PROTOCOL = 6  # to be raised with every change of what is said here, of frames, or of the fields of a message
NONCE_BYTES = 32
PROOF_BYTES = 32
TICKET_BYTES = 16
MAX_HELLO = 8192
_OPENING = struct.Struct(f"<4sB{NONCE_BYTES}s")
_ANSWER = struct.Struct(f"<{PROOF_BYTES}s{PROOF_BYTES}sI")  # proof, digest and length of the hello
_VERDICT = struct.Struct(f"<{PROOF_BYTES}sBI")  # proof, code, length of the body

ACCEPTED = 0
REFUSED = 1


class Refused(AuthenticationError):
    """A listener that proved itself does not want this caller: it leaves, is another incarnation, or considers the
    caller dead. A caller without the secret never gets so far: the listener's own proof fails first."""


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who is calling, whom it wants, and on which of its links."""

    worker_id: int
    name: str
    incarnation: int
    wanted_incarnation: int
    link: int  # the same number again asks to resume that link after a lost connection
    shared_memory: bool  # the dialler will pass a lane for descriptors next
    main_module: str  # fingerprint of __main__, so that its functions may travel by name
    takes_bytes: int = MAX_FRAME  # a larger message it would refuse, so none should be sent
    ticket: bytes = b""  # drawn for the link: whoever resumes it must have it, and its two ends alone do
    connection: int = 0  # drawn for the connection, so that others can be put beside it
    side: int = 0  # the place of this one beside that connection, which is 0 itself
    sides: int = 0  # how many there will be
    seal: bytes = b""  # for one beside another, over TLS: the secret under which the dialler seals what it sends there

    def __repr__(self) -> str:
        return _without_secrets(self)


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who answers."""

    worker_id: int
    name: str
    incarnation: int
    resumed: bool
    shared_memory: bool
    main_module: str
    takes_bytes: int = MAX_FRAME
    tcp_connections: int = 1  # how many it takes for one link
    sealed_connections: int = 0  # the same where those beside the first are sealed; 0 if it cannot do that
    seal: bytes = b""  # the answer to a hello with one: the secret of what the listener sends there

    def __repr__(self) -> str:
        return _without_secrets(self)


def _without_secrets(said: Hello | Welcome) -> str:
    """For logs and debuggers: whether there is a ticket and a seal, and not which."""
    fields = {name: getattr(said, name) for name in said.__struct_fields__}
    shown = (
        f"{name}={'...' if name in ('ticket', 'seal') and value else repr(value)}" for name, value in fields.items()
    )
    return f"{type(said).__name__}({', '.join(shown)})"


_encode = msgspec.msgpack.Encoder().encode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_welcome = msgspec.msgpack.Decoder(Welcome).decode


def _check_opening(raw: bytes) -> bytes:
    magic, version, nonce = _OPENING.unpack(raw)
    if magic != MAGIC:
        raise ProtocolError(f"it opened with {bytes(raw[:16])!r}, which is not this protocol")
    if version != PROTOCOL:
        raise ProtocolError(f"it speaks version {version} of the protocol, this worker version {PROTOCOL}")
    return bytes(nonce)


class _Transcript:
    """What has been said so far, and the proofs over it."""

    def __init__(self, secret: bytes, binding: bytes) -> None:
        self._secret = secret
        self._said = bytearray()
        self.say(binding)

    def say(self, part: bytes) -> None:
        """Add a part; its length too, so that no two transcripts are the same bytes."""
        self._said += len(part).to_bytes(4, "little") + part

    def proof(self, role: bytes) -> bytes:
        """That the one in `role` knows the secret and has said and heard just this."""
        return hmac.new(self._secret, b"telegrad " + role + b"\0" + self._said, hashlib.sha256).digest()

    def proves(self, role: bytes, proof: bytes) -> bool:
        """Whether a proof is the one of that role."""
        return hmac.compare_digest(proof, self.proof(role))


class DiallerHandshake:
    """The dialling side: `opening` first, then each answer of the listener through the step of its name.

    `binding` is what both ends know of the channel below: the certificate of the listener, as each of them sees it."""

    opening_answer_bytes = _OPENING.size + PROOF_BYTES
    verdict_header_bytes = _VERDICT.size

    def __init__(self, secret: bytes, binding: bytes = b"") -> None:
        self._transcript = _Transcript(secret, binding)
        nonce = os.urandom(NONCE_BYTES)
        self.opening = _OPENING.pack(MAGIC, PROTOCOL, nonce)
        self._transcript.say(nonce)
        self._proof = b""

    def answer(self, raw: bytes, hello: Hello) -> bytes:
        """Check the listener's proof; what to send next."""
        self._transcript.say(_check_opening(raw[: _OPENING.size]))
        if not self._transcript.proves(b"listener", raw[_OPENING.size :]):
            raise AuthenticationError(
                "the listener does not know this job's secret (or somebody stands between it and this worker)"
            )
        body = _encode(hello)
        digest = hashlib.sha256(body).digest()
        self._transcript.say(digest + len(body).to_bytes(4, "little"))
        return _ANSWER.pack(self._transcript.proof(b"dialler"), digest, len(body)) + body

    def verdict_length(self, raw: bytes) -> tuple[int, int]:
        """Verdict code and length of the body that follows."""
        self._proof, code, length = _VERDICT.unpack(raw)
        if length > MAX_HELLO:
            raise ProtocolError(f"a welcome of {length} bytes is over the limit of {MAX_HELLO}")
        return code, length

    def verdict(self, code: int, body: bytes) -> Welcome:
        """The listener's welcome; raises what it said if it refused."""
        self._transcript.say(bytes([code]) + body)
        if not self._transcript.proves(b"verdict", self._proof):
            raise AuthenticationError("the listener's verdict was changed on its way; nothing of it was used")
        if code != ACCEPTED:
            raise Refused(f"it refused the connection: {body.decode('utf-8', 'replace')}")
        try:
            return _decode_welcome(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"its welcome is malformed: {error}") from error


class ListenerHandshake:
    """The listening side as a state machine: feed it bytes, send what it returns, until `hello` is set."""

    def __init__(self, secret: bytes, binding: bytes = b"") -> None:
        self._transcript = _Transcript(secret, binding)
        self._buffer = bytearray()
        self._state = "opening"
        self._whole = _OPENING.size  # bytes of the step in hand
        self._digest = b""
        self._hello_bytes = 0
        self.hello: Hello | None = None

    @property
    def needs(self) -> int:
        """How many bytes to read at most: never more than the step in hand."""
        return self._whole - len(self._buffer)

    @property
    def silent(self) -> bool:
        """Whether the dialler has said nothing yet."""
        return self._state == "opening" and not self._buffer

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the dialler; what to answer. Raises the error that ends this connection."""
        self._buffer += data
        # Judge a wrong opening by its first bytes: a stranger may never send as many as ours has.
        if self._state == "opening" and self._buffer[: len(MAGIC)] != MAGIC[: len(self._buffer)]:
            raise ProtocolError(f"it opened with {bytes(self._buffer[:16])!r}, which is not this protocol")
        if self.needs > 0:
            return b""
        raw, self._buffer = bytes(self._buffer), bytearray()
        if self._state == "opening":
            self._transcript.say(_check_opening(raw))
            nonce = os.urandom(NONCE_BYTES)
            self._transcript.say(nonce)
            self._state, self._whole = "proof", _ANSWER.size
            return _OPENING.pack(MAGIC, PROTOCOL, nonce) + self._transcript.proof(b"listener")
        if self._state == "proof":
            proof, self._digest, self._hello_bytes = _ANSWER.unpack(raw)
            self._transcript.say(self._digest + self._hello_bytes.to_bytes(4, "little"))
            if not self._transcript.proves(b"dialler", proof):
                raise AuthenticationError("it does not know this job's secret")
            if not 0 < self._hello_bytes <= MAX_HELLO:
                raise ProtocolError(f"a hello of {self._hello_bytes} bytes is not within 1..{MAX_HELLO}")
            self._state, self._whole = "hello", self._hello_bytes
            return b""
        if not hmac.compare_digest(hashlib.sha256(raw).digest(), self._digest):
            raise AuthenticationError("its hello is not the one it proved")
        try:
            self.hello = _decode_hello(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"its hello is malformed: {error}") from error
        return b""

    def welcome(self, welcome: Welcome) -> bytes:
        """What tells the dialler that it is in."""
        return self._verdict(ACCEPTED, _encode(welcome))

    def refusal(self, error: TelegradError) -> bytes:
        """What tells the dialler why it is not."""
        return self._verdict(REFUSED, str(error).encode()[:MAX_HELLO])

    def _verdict(self, code: int, body: bytes) -> bytes:
        self._transcript.say(bytes([code]) + body)
        return _VERDICT.pack(self._transcript.proof(b"verdict"), code, len(body)) + body
