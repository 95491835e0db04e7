"""What a worker needs of trust before it joins a job: its secret, the seal on its records, its certificate."""

import functools
import logging
import os
from typing import TYPE_CHECKING, NamedTuple

from telegrad.errors import AuthenticationError
from telegrad.rpc.trust.seal import UNSEALED, Seal
from telegrad.rpc.trust.secret import JobSecret, Source, find_secret
from telegrad.transport.addresses import is_loopback
from telegrad.transport.tls import Tls, TlsEnds, ends_by_certificates, ends_by_fingerprint

if TYPE_CHECKING:
    from telegrad.rpc.options import RpcBackendOptions

log = logging.getLogger("telegrad.rpc")


class JobTrust(NamedTuple):
    """The secret of a job as one worker has it, and what follows from where it came from."""

    secret: JobSecret

    @property
    def seal(self) -> Seal:
        """For its records in the store."""
        return UNSEALED if self.secret.source is Source.PUBLISHED else Seal(self.secret.value)

    @property
    def published(self) -> bytes:
        """What stands in the worker's record for everyone to read."""
        return self.secret.value if self.secret.source is Source.PUBLISHED else b""


def trust_for(options: "RpcBackendOptions", store_host: str | None, store_is_here: bool) -> JobTrust:
    """What the options say about a job that meets in a store at `store_host` (None: not at an address)."""
    listens_beyond = options.host is not None and not is_loopback(options.host)
    beyond = store_host is not None and not is_loopback(store_host) and not _all_are_local()
    leaves_host = listens_beyond or (beyond and not store_is_here)
    return JobTrust(find_secret(options, leaves_host=leaves_host, may_leave_host=listens_beyond or beyond))


def _all_are_local() -> bool:
    """Whether the launcher says that all its workers are on this host."""
    local, all_ = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return local is not None and local == all_


def tls_for(options: "RpcBackendOptions", listens_at: str) -> TlsEnds | None:
    """What a worker that listens at this address needs for TLS; None if it uses none."""
    if isinstance(options.tls, Tls):
        return ends_by_certificates(options.tls)
    if options.tls is False or (options.tls is None and is_loopback(listens_at)):
        return None
    ends = ends_by_fingerprint()
    if ends is None:
        _say_what_is_missing(options.tls is True)
    return ends


@functools.cache
def _say_what_is_missing(required: bool) -> None:
    text = (
        "TLS needs a key, and the package that makes one is missing: install `telegrad[tls]`, or give certificates, "
        "RpcBackendOptions(tls=Tls(cert, key, ca))"
    )
    if required:
        raise AuthenticationError(text)
    log.warning("connections between hosts are authenticated, but not encrypted. %s", text)
