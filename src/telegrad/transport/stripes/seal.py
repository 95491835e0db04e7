"""Sealed pieces carry large tensors beside a TLS connection. All of their format and cryptography is in this file.

Python's `ssl` encrypts 16 KB at a time and needs the GIL for each. So a connection that is opened for large tensors
alone (a side stream, see `stripes.py`) goes through the handshakes of TLS 1.3 and of Telegrad as any other. In the
latter, which is said over TLS, each end says a secret that it has drawn for what it will send, once the other one has
proved itself. After that nothing goes over TLS any more: the socket carries pieces and nothing else, both ways.

    piece            = ciphertext | tag of 16 bytes                      (AES-256-GCM, one call for each piece)
    plaintext        = PIECE bytes of a part of a message, or what is left of that part
    key              = HMAC-SHA256(secret_n, "telegrad seal: key")
    nonce            = four zero bytes | number of the piece in this direction, from 0 (u64, little endian)
    additional data  = bytes of the part that are left, this piece included (u64, little endian)
    secret_0         = 32 random bytes, drawn by the sender for this direction of this connection
    secret_n+1       = HMAC-SHA256(secret_n, "telegrad seal: next"), after PIECES_PER_KEY pieces

The size of a part follows from the header of its message, which came over TLS on the main connection
(`wire/parts.py`): there is no length that a stranger could change. A key belongs to one direction of one connection
and the number of a piece never repeats, so no nonce is used twice: a new connection has new secrets, two of which are
never the same, and on one that broke nothing is sealed any more. The receiver counts as well: a piece that was
changed, repeated, left out, exchanged with another, or comes from another connection or from the other direction does
not open, and neither does one of a part of another size. Nothing of a message is given out before all of its pieces
have opened. After the first that does not, the connection ends.

One key encrypts 64 GiB at most, 2**32 blocks: the chance to tell that from noise stays below 2**-64, and that to forge
a piece with one try below 2**-112. TLS 1.3 asks for a new key after about 360 GiB.
"""

import functools
import hmac
import importlib
import itertools
import os
import struct
from typing import Any

from telegrad.errors import SealBroken

PIECE = 2**20  # bytes; with less the threads of a connection wait for the interpreter, more is left to do at the end
PIECES_PER_KEY = 2**16
TAG_BYTES = 16
SECRET_BYTES = 32
_SINCE = 50  # version of `cryptography` that encrypts into given memory, and without the GIL
_NONCE = struct.Struct("<IQ")
_LEFT = struct.Struct("<Q")


@functools.cache
def can_seal() -> bool:
    """Whether this process has what it takes: the package of the extra `tls`, not too old."""
    try:
        package = importlib.import_module("cryptography")
        return int(package.__version__.partition(".")[0]) >= _SINCE and _aes_gcm() is not None
    except (ImportError, ValueError):
        return False


def _aes_gcm() -> Any:
    return importlib.import_module("cryptography.hazmat.primitives.ciphers.aead").AESGCM


def fresh_secret() -> bytes:
    """For one direction of one connection, never to be used for another."""
    return os.urandom(SECRET_BYTES)


class _Direction:
    """One direction of a connection: the key in use, and the number of the next piece. One thread at a time; and if
    two there were, no number would be drawn twice."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"the secret of a direction has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self._numbers = itertools.count()
        self._new_key()

    def _new_key(self) -> None:
        self._cipher = _aes_gcm()(hmac.digest(self._secret, b"telegrad seal: key", "sha256"))

    def _next(self) -> tuple[Any, bytes]:
        """Key and nonce of the next piece."""
        number = next(self._numbers)  # one step under the GIL
        if number and number % PIECES_PER_KEY == 0:
            self._secret = hmac.digest(self._secret, b"telegrad seal: next", "sha256")
            self._new_key()
        return self._cipher, _NONCE.pack(0, number)


class Sealer(_Direction):
    """The sending end of a direction."""

    def seal(self, piece: memoryview, left: int, into: memoryview) -> None:
        """Encrypt a piece, where `left` bytes of its part remain with it. It takes TAG_BYTES more."""
        cipher, nonce = self._next()
        cipher.encrypt_into(nonce, piece, _LEFT.pack(left), into)


class Opener(_Direction):
    """The receiving end of a direction."""

    def __init__(self, secret: bytes, peer: str) -> None:
        super().__init__(secret)
        self._peer = peer
        self._broken = False
        self._invalid: type[Exception] = importlib.import_module("cryptography.exceptions").InvalidTag

    def open(self, sealed: memoryview, left: int, into: memoryview) -> None:
        """Decrypt the next piece of a part of which `left` bytes are still to come. What `into` has is to be used only
        if this returns: SealBroken if it is not what the peer has sealed, and for whatever comes after that."""
        cipher, nonce = self._next()
        try:
            if not self._broken:
                cipher.decrypt_into(nonce, sealed, _LEFT.pack(left), into)
                return
        except self._invalid:
            self._broken = True
        raise SealBroken(
            f"a piece of a large tensor from {self._peer} is not the one that was sealed: somebody changed, left out, "
            "repeated or exchanged what came. Nothing of it was used; the connection is closed, and what it carried is "
            "sent again over the next one"
        )
