"""Somebody between two hosts: with TLS a relay reads nothing, changes nothing, and stands for nobody."""

import datetime
import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import AuthenticationError, WorkerDied
from telegrad.rpc.calls import start_call, wait_for_value
from telegrad.rpc.current import require_agent
from telegrad.rpc.trust import job as trust_job
from telegrad.transport import tls
from telegrad.transport.addresses import Address
from telegrad.transport.tls_stream import TlsStream
from tests.cluster import cluster, end, join, process

pytest.importorskip("cryptography")

MARK = torch.full((2000,), 1.2345678)


class Relay:
    """Passes bytes on between a dialler and a worker, and keeps what it saw; may end TLS itself, with its own key."""

    def __init__(self, to: Address, *, decrypts: bool = False) -> None:
        self.saw = bytearray()
        self._to = to
        self._ends = tls.ends_by_fingerprint() if decrypts else None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("tcp", "127.0.0.1", str(self._listener.getsockname()[1]))
        self._socks: list[socket.socket] = [self._listener]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._to.host, int(self._to.where)))
                self._socks += [near, far]
                if self._ends is not None:
                    far = self._ends.client.wrap_socket(far)
                    self._socks.append(far)
                    near = self._ends.server.wrap_socket(near, server_side=True, do_handshake_on_connect=False)
                    self._socks.append(near)
                    near.do_handshake()
            except (OSError, ValueError):
                self.close()
                return
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                self.saw += data
                other.sendall(data)
        except OSError:
            pass
        for sock in (one, other):
            sock.close()

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


def _call_through(relay: Relay) -> torch.Tensor:
    """A call to worker1 whose address somebody on the way has replaced."""
    agent = require_agent()
    member = msgspec.structs.replace(agent.find("worker1"), addresses=(relay.address,))
    with agent.peers._lock:
        agent.peers._links.pop(member.worker_id, None)
        agent.peers.by_name.clear()
    agent.directory._by_name["worker1"] = agent.directory._by_id[member.worker_id] = member
    link = agent.link(member)
    result: torch.Tensor = wait_for_value(start_call(agent, link, torch.neg, (MARK,), {}, 8.0))
    return result


def _relay(**options: Any) -> Relay:
    agent = require_agent()
    return Relay(next(a for a in agent.find("worker1").addresses if a.kind == "tcp"), **options)


def test_a_relay_reads_plain_tcp() -> None:
    """(3) What it was without TLS, so that the next test shows something."""
    with cluster(2, transports=("tcp",), tls=False, secret="told to all, and long"):
        relay = _relay()
        assert torch.equal(_call_through(relay), -MARK)
        assert MARK.numpy().tobytes() in relay.saw
        relay.close()


def test_a_relay_reads_nothing_of_tls() -> None:
    with cluster(2, transports=("tcp",), tls=True, secret="told to all, and long"):
        relay = _relay()
        assert torch.equal(_call_through(relay), -MARK)
        assert len(relay.saw) > MARK.nbytes
        assert MARK.numpy().tobytes()[:64] not in relay.saw
        relay.close()


def test_a_relay_that_decrypts_is_found_out() -> None:
    with cluster(2, transports=("tcp",), tls=True, secret="told to all, and long", heartbeat=0.2):
        relay = _relay(decrypts=True)
        with pytest.raises((AuthenticationError, WorkerDied), match=r"certificate|between"):
            _call_through(relay)
        assert MARK.numpy().tobytes()[:64] not in relay.saw
        relay.close()


def test_everything_works_over_tls() -> None:
    with cluster(2, transports=("tcp",), tls=True):
        x = torch.randn(300, 300, requires_grad=True)
        large = torch.randn(5_000_000)
        assert torch.equal(rpc.rpc_sync("worker1", torch.neg, (large,)), -large)
        futures = [rpc.rpc_async("worker1", torch.add, (torch.ones(2), i)) for i in range(500)]
        assert [int(f.wait()[0]) for f in futures] == [i + 1 for i in range(500)]
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", torch.mul, (x, 3.0))
            autograd.backward(context_id, [y.sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full_like(x, 3.0))
        kind = type(require_agent().link(require_agent().find("worker1")).connection().stream)
        assert kind is TlsStream


def test_without_the_package_connections_are_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_make_certificate", lambda: None)
    trust_job._say_what_is_missing.cache_clear()
    assert trust_job.tls_for(rpc.RpcBackendOptions(secret="x" * 20), "10.0.0.1") is None
    assert trust_job.tls_for(rpc.RpcBackendOptions(secret="x" * 20), "10.0.0.1") is None
    assert caplog.text.count("telegrad[tls]") == 1
    with pytest.raises(AuthenticationError, match=r"telegrad\[tls\]"):
        trust_job.tls_for(rpc.RpcBackendOptions(tls=True), "10.0.0.1")


def test_tls_is_on_between_hosts_and_off_on_one() -> None:
    options = rpc.RpcBackendOptions(secret="x" * 20)
    assert trust_job.tls_for(options, "127.0.0.1") is None
    assert trust_job.tls_for(options, "10.0.0.1") is not None
    assert trust_job.tls_for(rpc.RpcBackendOptions(tls=False), "10.0.0.1") is None


# --- certificates ---


def make_authority(folder: Path, *names: str) -> None:
    """An authority, and a certificate for each name, as files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
    for name in ("authority", *names):
        key = authority_key if name == "authority" else ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=name == "authority", path_length=None), critical=True)
            .sign(authority_key, hashes.SHA256())
        )
        (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        (folder / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )


def _with_certificate(folder: Path, certificate: str) -> dict[str, Any]:
    cert, key, ca = (str(folder / name) for name in (f"{certificate}.pem", f"{certificate}.key", "authority.pem"))
    return {"transports": ("tcp",), "tls": rpc.Tls(cert, key, ca), "secret": "told to both, and long", "heartbeat": 0.2}


def _serve(folder: str, certificate: str) -> None:
    join("worker1", 1, 2, f"file://{folder}/meeting", _with_certificate(Path(folder), certificate))
    rpc.shutdown()


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    make_authority(tmp_path, "worker0", "worker1", "mallory")
    return tmp_path


def test_certificates_name_the_workers(authority: Path) -> None:
    other = process(_serve, str(authority), "worker1")
    try:
        join("worker0", 0, 2, f"file://{authority}/meeting", _with_certificate(authority, "worker0"))
        assert rpc.rpc_sync("worker1", os.getpid) == other.pid
        rpc.shutdown(timeout=20)
    finally:
        end([other], patience=5)


def test_a_worker_with_the_certificate_of_another(authority: Path) -> None:
    other = process(_serve, str(authority), "mallory")
    try:
        join("worker0", 0, 2, f"file://{authority}/meeting", _with_certificate(authority, "worker0"))
        with pytest.raises((AuthenticationError, WorkerDied), match=r"mallory|certificate"):
            rpc.rpc_sync("worker1", os.getpid, timeout=8)
        rpc.shutdown(graceful=False)
    finally:
        end([other], patience=0)


def test_certificates_that_cannot_be_read() -> None:
    with pytest.raises(AuthenticationError, match="cannot be used"):
        tls.ends_by_certificates(rpc.Tls("/nowhere", "/nowhere", "/nowhere"))
