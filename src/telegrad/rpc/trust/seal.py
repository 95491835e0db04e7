"""A seal on what workers write where they meet: whoever may write there still cannot speak for a worker of the job.

A rendezvous store has no access control of its own. A record without a good seal is not read; a place whose mark was
made with another secret is not joined. One secret may serve many jobs, and whoever can read the store of one keeps its
records: so each job draws a number, its mark says it, and its records count in no other.
"""

import hashlib
import hmac
import os
from typing import NamedTuple

_MAC_BYTES = 32
_JOB_BYTES = 16


class Opened(NamedTuple):
    """A record, and the job that it was written in."""

    job: bytes
    record: bytes


def new_job() -> bytes:
    """A number for a job that begins."""
    return os.urandom(_JOB_BYTES)


class Seal:
    """Seals and opens records under a secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def _mac(self, purpose: bytes, content: bytes) -> bytes:
        return hmac.new(self._secret, b"telegrad " + purpose + b"\0" + content, hashlib.sha256).digest()

    def seal(self, job: bytes, record: bytes) -> bytes:
        """A record of a job as it is written."""
        return self._mac(b"record", job + record) + job + record

    def open(self, sealed: bytes) -> Opened | None:
        """A record; None if it was not written by one who knows the secret."""
        mac, content = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if len(content) < _JOB_BYTES or not hmac.compare_digest(mac, self._mac(b"record", content)):
            return None
        return Opened(content[:_JOB_BYTES], content[_JOB_BYTES:])

    def mark(self, job: bytes) -> str:
        """What the first worker leaves in a store to say whose it is."""
        return (self._mac(b"store", job) + job).hex()

    def job_in(self, mark: bytes) -> bytes | None:
        """The job that a mark stands for; None if it was not left by one who knows the secret."""
        try:
            found = bytes.fromhex(mark.decode())
        except ValueError:
            return None
        mac, job = found[:_MAC_BYTES], found[_MAC_BYTES:]
        return job if len(job) == _JOB_BYTES and hmac.compare_digest(mac, self._mac(b"store", job)) else None


UNSEALED = Seal(b"")  # of a job whose secrets are published: it keeps accidents out, and nobody else
