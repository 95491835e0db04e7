"""TLS on TCP, so that nobody between two hosts reads or changes what workers say.

Without certificates a worker makes a key for the job; its fingerprint stands in the worker's sealed record, whoever
dials compares it, and both ends put it into the proofs of the handshake. With certificates (`Tls`) both ends are
verified by the authority, and a worker is who its certificate says.
"""

import contextlib
import datetime
import hashlib
import os
import socket
import ssl
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from telegrad.errors import AuthenticationError
from telegrad.transport.tls_stream import TlsSocket

_VALID_DAYS = 3650


class Tls(NamedTuple):
    """Certificates for connections between hosts: this worker's own, its key, and the authority that all trust.

    The certificate's common name, or one of its DNS names, is the worker's name.

    Examples:
        >>> tls = rpc.Tls(cert="worker0.crt", key="worker0.key", ca="job.crt")
    """

    cert: str
    key: str
    ca: str


class TlsEnds:
    """What one worker needs to accept and to dial over TLS."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext, fingerprint: bytes, named: bool) -> None:
        self.server = server
        self.client = client
        self.fingerprint = fingerprint  # of the certificate it shows as a listener
        self.named = named  # whether certificates name the workers

    def wrap_accepted(self, sock: socket.socket) -> TlsSocket:
        """A connection that was accepted; its handshake is still to be done, and never waited for."""
        return TlsSocket(sock, self.server, server_side=True)

    def wrap_dialled(self, sock: socket.socket, expected: bytes, name: str) -> TlsSocket:
        """A connection that was dialled to the worker `name`, with its certificate checked."""
        wrapped = TlsSocket(sock, self.client, server_side=False)
        try:
            wrapped.do_handshake()
            shown = fingerprint_of(wrapped)
            if self.named:
                check_name(wrapped, name)
            elif shown != expected:
                raise AuthenticationError(
                    f"the listener shows another certificate than worker {name!r} has published: somebody stands "
                    "between it and this worker"
                )
        except BaseException:
            wrapped.close()
            raise
        return wrapped


def fingerprint_of(sock: TlsSocket) -> bytes:
    """Of the certificate that the other end shows; empty if it shows none."""
    shown = sock.tls.getpeercert(binary_form=True)
    return hashlib.sha256(shown).digest() if shown else b""


def check_name(sock: TlsSocket, name: str) -> None:
    """Raise unless the verified certificate of the other end is that of the worker `name`."""
    shown: Any = sock.tls.getpeercert() or {}
    names = {value for part in shown.get("subject", ()) for key, value in part if key == "commonName"}
    names |= {value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"}
    if name not in names:
        raise AuthenticationError(f"its certificate is that of {sorted(names)}, not of worker {name!r}")


def ends_by_certificates(tls: Tls) -> TlsEnds:
    """Both ends verified by an authority."""
    try:
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False  # a worker is known by its name in the job, not by that of its host
        for context in (server, client):
            _strict(context)
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(tls.ca)
            context.load_cert_chain(tls.cert, tls.key)
        with open(tls.cert) as file:
            der = ssl.PEM_cert_to_DER_cert(_first_certificate(file.read()))
    except (OSError, ValueError) as error:
        raise AuthenticationError(f"the certificates in {tls} cannot be used: {error}") from error
    return TlsEnds(server, client, hashlib.sha256(der).digest(), named=True)


def _first_certificate(text: str) -> str:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    return begin + text.partition(begin)[2].partition(end)[0] + end


def ends_by_fingerprint() -> TlsEnds | None:
    """A key made for this job; None without the package that makes keys (the extra `tls`)."""
    made = _make_certificate()
    if made is None:
        return None
    cert, key, der = made
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE  # the fingerprint is compared instead
    for context in (server, client):
        _strict(context)
    with _in_memory(cert + key) as path:
        server.load_cert_chain(path)
    return TlsEnds(server, client, hashlib.sha256(der).digest(), named=False)


def dialling_ends() -> TlsEnds:
    """For a worker without a key of its own: it can dial those who have one."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    _strict(client)
    return TlsEnds(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), client, b"", named=False)


def _strict(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if hasattr(context, "num_tickets") and context.protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nothing is resumed; a ticket that nobody reads would be in the way at the end


def _make_certificate() -> tuple[bytes, bytes, bytes] | None:
    """Certificate and key as PEM, and the certificate as DER."""
    try:
        from cryptography import x509  # noqa: PLC0415 - an extra, and 50 ms that most workers need not pay
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    except ImportError:
        return None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "telegrad worker")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), private, certificate.public_bytes(serialization.Encoding.DER)


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path under which `content` can be read for a moment: OpenSSL takes keys from files only."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("telegrad-key", os.MFD_CLOEXEC)
        try:
            os.write(fd, content)
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        with tempfile.NamedTemporaryFile() as file:  # 0600
            file.write(content)
            file.flush()
            yield file.name
