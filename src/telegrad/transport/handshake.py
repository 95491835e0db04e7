"""How two workers prove to each other that they belong to one job, before any other byte is read.

    dialler                                   listener
    MAGIC version nonce_d          ------>
                                   <------    MAGIC version nonce_l proof_l
    proof_d hello                  ------>
                                   <------    welcome, or a refusal in words

A proof is an HMAC of both nonces under the job's secret, so a recorded one is worthless. Until it is verified a
listener reads fixed sizes only and allocates nothing for the stranger. No I/O here: bytes in, bytes out.
"""

import hashlib
import hmac
import os
import struct

import msgspec

from telegrad.errors import AuthenticationError, ProtocolError, TelegradError
from telegrad.wire.frames import MAX_FRAME

MAGIC = b"TGRD"
PROTOCOL = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_HELLO = 8192
_OPENING = struct.Struct(f"<4sB{NONCE_BYTES}s")
_LENGTH = struct.Struct("<BI")

ACCEPTED = 0
REFUSED = 1


class Refused(AuthenticationError):
    """A listener that proved itself does not want this caller: it leaves, is another incarnation, or holds the caller
    for dead. A caller without the secret never gets so far: the listener's own proof fails first."""


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who is calling, whom it wants, and on which of its links."""

    worker_id: int
    name: str
    incarnation: int
    wanted_incarnation: int  # 0: whoever answers at this address
    link: int  # the same number again asks to resume that link after a lost connection
    shared_memory: bool  # the dialler will pass a lane for descriptors next
    main_module: str  # fingerprint of __main__, so that its functions may travel by name
    takes_bytes: int = MAX_FRAME  # a larger message it would refuse, so none should be sent


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who answers."""

    worker_id: int
    name: str
    incarnation: int
    resumed: bool
    shared_memory: bool
    main_module: str
    takes_bytes: int = MAX_FRAME


_encode = msgspec.msgpack.Encoder().encode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_welcome = msgspec.msgpack.Decoder(Welcome).decode


def _proof(secret: bytes, role: bytes, nonce_d: bytes, nonce_l: bytes) -> bytes:
    return hmac.new(secret, b"telegrad " + role + nonce_d + nonce_l, hashlib.sha256).digest()


def _check_opening(raw: bytes) -> bytes:
    magic, version, nonce = _OPENING.unpack(raw)
    if magic != MAGIC:
        raise ProtocolError(f"it opened with {bytes(raw[:16])!r}, which is not this protocol")
    if version != PROTOCOL:
        raise ProtocolError(f"it speaks version {version} of the protocol, this worker version {PROTOCOL}")
    return bytes(nonce)


class DiallerHandshake:
    """The dialling side: `opening` first, then each answer of `needs` bytes through the step of its name."""

    opening_answer_bytes = _OPENING.size + PROOF_BYTES
    verdict_header_bytes = _LENGTH.size

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = os.urandom(NONCE_BYTES)
        self.opening = _OPENING.pack(MAGIC, PROTOCOL, self._nonce)

    def answer(self, raw: bytes, hello: Hello) -> bytes:
        """Check the listener's proof; what to send next."""
        nonce_l = _check_opening(raw[: _OPENING.size])
        if not hmac.compare_digest(raw[_OPENING.size :], _proof(self._secret, b"listener", self._nonce, nonce_l)):
            raise AuthenticationError("the listener does not know this job's secret")
        body = _encode(hello)
        return _proof(self._secret, b"dialler", self._nonce, nonce_l) + _LENGTH.pack(ACCEPTED, len(body)) + body

    @staticmethod
    def verdict_length(raw: bytes) -> tuple[int, int]:
        """Verdict code and length of the body that follows."""
        code, length = _LENGTH.unpack(raw)
        if length > MAX_HELLO:
            raise ProtocolError(f"a welcome of {length} bytes is over the limit of {MAX_HELLO}")
        return code, length

    @staticmethod
    def verdict(code: int, body: bytes) -> Welcome:
        """The listener's welcome; raises what it said if it refused."""
        if code != ACCEPTED:
            raise Refused(f"it refused the connection: {body.decode('utf-8', 'replace')}")
        try:
            return _decode_welcome(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"its welcome is malformed: {error}") from error


class ListenerHandshake:
    """The listening side as a state machine: feed it bytes, send what it returns, until `hello` is set."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._buffer = bytearray()
        self._nonce_l = os.urandom(NONCE_BYTES)
        self._nonce_d = b""
        self._state = "opening"
        self._hello_bytes = 0
        self.hello: Hello | None = None

    @property
    def needs(self) -> int:
        """How many bytes to read at most: never more than the step in hand."""
        return {"opening": _OPENING.size, "proof": PROOF_BYTES + _LENGTH.size, "hello": self._hello_bytes}[
            self._state
        ] - len(self._buffer)

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
            self._nonce_d = _check_opening(raw)
            self._state = "proof"
            proof = _proof(self._secret, b"listener", self._nonce_d, self._nonce_l)
            return _OPENING.pack(MAGIC, PROTOCOL, self._nonce_l) + proof
        if self._state == "proof":
            expected = _proof(self._secret, b"dialler", self._nonce_d, self._nonce_l)
            if not hmac.compare_digest(raw[:PROOF_BYTES], expected):
                raise AuthenticationError("it does not know this job's secret")
            _, self._hello_bytes = _LENGTH.unpack(raw[PROOF_BYTES:])
            if not 0 < self._hello_bytes <= MAX_HELLO:
                raise ProtocolError(f"a hello of {self._hello_bytes} bytes is not within 1..{MAX_HELLO}")
            self._state = "hello"
            return b""
        try:
            self.hello = _decode_hello(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"its hello is malformed: {error}") from error
        return b""

    @staticmethod
    def welcome(welcome: Welcome) -> bytes:
        """What tells the dialler that it is in."""
        body = _encode(welcome)
        return _LENGTH.pack(ACCEPTED, len(body)) + body

    @staticmethod
    def refusal(error: TelegradError) -> bytes:
        """What tells the dialler why it is not."""
        body = str(error).encode()[:MAX_HELLO]
        return _LENGTH.pack(REFUSED, len(body)) + body
