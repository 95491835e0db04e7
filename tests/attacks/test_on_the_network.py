"""Somebody between two hosts: with TLS a relay reads nothing, changes nothing, and stands for nobody."""

import datetime
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import AuthenticationError, RpcTimeout, WorkerDied
from telegrad.rpc.current import require_agent
from telegrad.rpc.trust import job as trust_job
from telegrad.transport import tls
from telegrad.transport.tls_stream import TlsStream
from telegrad.wire.frames import HEADER, LENGTHS, WITH_MEMORY, FrameKind, decode_record, encode_whole
from telegrad.wire.messages import PythonReply
from tests.attacks.relay import Relay, believe, call, member_of, tcp_of
from tests.cluster import cluster, end, join, process

pytest.importorskip("cryptography")

MARK = torch.full((2000,), 1.2345678)
SECRET = "told to all, and long"


def _call_through(relay: Relay) -> torch.Tensor:
    """A call to worker1 whose address somebody on the way has replaced."""
    member = msgspec.structs.replace(member_of("worker1"), addresses=(relay.address,))
    believe(member)
    result: torch.Tensor = call(member, torch.neg, MARK, timeout=60.0)
    return result


def _relay(**options: Any) -> Relay:
    return Relay(tcp_of(member_of("worker1")), **options)


def test_a_relay_reads_plain_tcp() -> None:
    """(3) What it was without TLS, so that the next test shows something."""
    with cluster(2, transports=("tcp",), tls=False, secret=SECRET):
        relay = _relay()
        assert torch.equal(_call_through(relay), -MARK)
        assert MARK.numpy().tobytes() in relay.saw
        relay.close()


def test_a_relay_reads_nothing_of_tls() -> None:
    with cluster(2, transports=("tcp",), tls=True, secret=SECRET):
        relay = _relay()
        assert torch.equal(_call_through(relay), -MARK)
        assert len(relay.saw) > MARK.nbytes
        assert MARK.numpy().tobytes()[:64] not in relay.saw
        relay.close()


def test_a_relay_that_decrypts_is_found_out() -> None:
    with cluster(2, transports=("tcp",), tls=True, secret=SECRET, heartbeat=5.0):
        relay = _relay(decrypts=True)
        with pytest.raises((AuthenticationError, WorkerDied), match=r"certificate|between"):
            _call_through(relay)
        assert MARK.numpy().tobytes()[:64] not in relay.saw
        relay.close()


# --- replies that are replaced on the way (3) ---


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class Forger:
    """Puts a reply of its own in the place of each true one, once it is let loose between two calls."""

    def __init__(self, payload: bytes) -> None:
        self.loose = False
        self.forged = 0
        self._payload = payload
        self._said = b""  # what came of a frame that is not whole yet

    def __call__(self, to_worker: bool, data: bytes) -> bytes:
        if to_worker or not self.loose:
            return data
        self._said += data
        passed_on = b""
        while (size := self._frame_bytes()) <= len(self._said):
            passed_on += self._instead_of(self._said[:size])
            self._said = self._said[size:]
        return passed_on

    def _frame_bytes(self) -> int:
        """Of the next frame, or of as much of it as says how long it is."""
        said = self._said
        if len(said) < HEADER.size:
            return HEADER.size
        _, _, form, length = HEADER.unpack(said[: HEADER.size])
        start = HEADER.size + (LENGTHS.size if form == WITH_MEMORY else 0)
        if form != WITH_MEMORY or len(said) < start:
            return start + length
        return start + length + sum(LENGTHS.unpack(said[HEADER.size : start]))

    def _instead_of(self, raw: bytes) -> bytes:
        _, _, form, length = HEADER.unpack(raw[: HEADER.size])
        start = HEADER.size + (LENGTHS.size if form == WITH_MEMORY else 0)
        frame = decode_record(raw[start : start + length])
        if frame.kind != FrameKind.REPLY:
            return raw
        self.forged += 1
        return bytes(encode_whole(FrameKind.REPLY, frame.request_id, 0, PythonReply(), self._payload))


def test_a_relay_replaces_the_replies_of_plain_tcp(tmp_path: Path) -> None:
    """What it was without TLS, so that the next test shows something: the reply of the relay is unpickled."""
    exploded = tmp_path / "exploded"
    forger = Forger(b"\x05" + pickle.dumps(_Bomb(exploded)))
    with cluster(2, transports=("tcp",), tls=False, secret=SECRET):
        relay = _relay(change=lambda: forger)
        assert torch.equal(_call_through(relay), -MARK)
        forger.loose = True
        assert call(member_of("worker1"), torch.neg, MARK, timeout=60.0) is None
        assert forger.forged and exploded.exists()
        forger.loose = False
        relay.close()


class Flipper:
    """Changes one bit of so many pieces that come from the worker, once it is let loose; or cuts in a piece again."""

    def __init__(self, how: str) -> None:
        self.left = 0
        self.changed = 0
        self._how = how
        self._last = b""

    def __call__(self, to_worker: bool, data: bytes) -> bytes:
        if to_worker or not self.left:
            self._last = self._last if to_worker else data
            return data
        self.left -= 1
        self.changed += 1
        if self._how == "replayed":
            return self._last
        if self._how == "made up":
            return b"\x17\x03\x03" + (len(data) - 5).to_bytes(2, "big") + os.urandom(len(data) - 5)
        changed = bytearray(data)
        changed[len(changed) // 2] ^= 1
        return bytes(changed)


def _through_tls(how: str, pieces: int, seconds: float) -> tuple[Flipper, Relay, Any]:
    true = member_of("worker1")
    flipper = Flipper(how)
    relay = _relay(change=lambda: flipper)
    assert torch.equal(_call_through(relay), -MARK)
    flipper.left = pieces
    try:
        return flipper, relay, call(member_of("worker1"), torch.neg, MARK, timeout=seconds)
    except (AuthenticationError, WorkerDied, RpcTimeout) as error:
        return flipper, relay, error
    finally:
        flipper.left = 0
        believe(true)
        relay.close()


def test_a_relay_replaces_no_reply_of_tls() -> None:
    """A piece that was changed, replayed or made up ends the connection; over the next one the true reply comes."""
    with cluster(2, transports=("tcp",), tls=True, secret=SECRET, heartbeat=5.0):  # slow handshakes are waited for
        for how in ("changed", "replayed", "made up"):
            flipper, relay, got = _through_tls(how, 1, 60.0)
            assert flipper.changed == 1 and relay.connections == 2, how
            assert torch.equal(got, -MARK), how
        for seconds in (2.0, 10.0, 40.0):  # until this machine is fast enough to dial again meanwhile
            flipper, _, got = _through_tls("changed", 1000, seconds)
            assert isinstance(got, Exception), got
            if flipper.changed >= 2:
                break
        assert flipper.changed >= 2


# --- what TLS carries ---


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
    return {"transports": ("tcp",), "tls": rpc.Tls(cert, key, ca), "secret": "told to both, and long"}


def _join_as(certificate: str, folder: str) -> None:
    join("worker1", 1, 2, f"file://{folder}/meeting", _with_certificate(Path(folder), certificate))


def _serve(folder: str, certificate: str) -> None:
    _join_as(certificate, folder)
    rpc.shutdown()


def _stay(folder: str, certificate: str) -> None:
    """As `_serve`, but it does not leave when it is refused by those it would leave with."""
    _join_as(certificate, folder)
    signal.pause()


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    make_authority(tmp_path, "worker0", "worker1", "mallory")
    return tmp_path


def test_certificates_name_the_workers(authority: Path) -> None:
    other = process(_serve, str(authority), "worker1")
    try:
        join("worker0", 0, 2, f"file://{authority}/meeting", _with_certificate(authority, "worker0"))
        assert rpc.rpc_sync("worker1", os.getpid) == other.pid
        rpc.shutdown(timeout=60)
    finally:
        end([other], patience=30)


def test_a_worker_with_the_certificate_of_another(authority: Path) -> None:
    other = process(_stay, str(authority), "mallory")
    try:
        join("worker0", 0, 2, f"file://{authority}/meeting", _with_certificate(authority, "worker0"))
        with pytest.raises((AuthenticationError, WorkerDied), match=r"mallory|certificate"):
            rpc.rpc_sync("worker1", os.getpid, timeout=60)
        rpc.shutdown(graceful=False)
    finally:
        end([other], patience=0)


def test_certificates_that_cannot_be_read() -> None:
    with pytest.raises(AuthenticationError, match="cannot be used"):
        tls.ends_by_certificates(rpc.Tls("/nowhere", "/nowhere", "/nowhere"))
