"""A seal on what workers write where they meet: whoever may write there still cannot speak for a worker of the job.

A rendezvous store has no access control of its own. A record without a good seal is not read; a place whose mark was
made with another secret is not joined.
"""

import hashlib
import hmac

SEAL_BYTES = 32


class Seal:
    """Seals and opens records under the secret of a job."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def _mac(self, purpose: bytes, record: bytes) -> bytes:
        return hmac.new(self._secret, b"telegrad " + purpose + b"\0" + record, hashlib.sha256).digest()

    def seal(self, record: bytes) -> bytes:
        """A record as it is written."""
        return self._mac(b"record", record) + record

    def open(self, sealed: bytes) -> bytes | None:
        """The record; None if it was not written by one who knows the secret."""
        mac, record = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        return record if hmac.compare_digest(mac, self._mac(b"record", record)) else None

    @property
    def mark(self) -> str:
        """What the first worker leaves in a store to say whose it is."""
        return self._mac(b"store", b"").hex()


UNSEALED = Seal(b"")  # of a job whose secrets are published: it keeps accidents out, and nobody else
