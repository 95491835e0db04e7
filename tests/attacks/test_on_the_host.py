"""Strangers on the host: other users, and whoever can read or write where the workers meet."""

import os
import pickle
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from telegrad import rpc
from telegrad.errors import AuthenticationError, RendezvousError, RpcTimeout, WorkerDied
from telegrad.ids import WorkerId, draw_incarnation, generation_of
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import require_agent
from telegrad.rpc.job.rendezvous.member_log import MemberLog
from telegrad.rpc.trust import secret as secrets
from telegrad.rpc.trust.files import make_private
from telegrad.rpc.trust.seal import UNSEALED, Opened, Seal, new_job
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import Address, Listeners
from telegrad.transport.handshake import Hello
from telegrad.wire.frames import FrameKind, encode_whole
from telegrad.wire.messages import PythonReply
from tests.attacks.strangers import NOBODY, PATIENCE, address_of, as_nobody, lying_member, memory_mb
from tests.attacks.test_lying_servers import Server
from tests.cluster import cluster, process
from tests.ports import own_port
from tests.waiting import wait_until

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")


@pytest.fixture
def meeting(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meeting"


@pytest.fixture
def agent(meeting: str) -> Iterator[Agent]:
    """A worker with default options."""
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=meeting))
    try:
        yield require_agent()
    finally:
        rpc.shutdown(graceful=False)


def still_works() -> None:
    assert rpc.rpc_sync("alone", os.getpid) == os.getpid()


# --- another user of the host (1) ---


@needs_root
def test_another_user_cannot_speak_to_a_worker(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    name = "\0" + address_of(agent, "unix").where[1:]

    def knock() -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE)
            sock.connect(name)
            return sock.recv(1)

    assert as_nobody(knock) == b""
    wait_until(lambda: f"another user (uid {NOBODY}" in caplog.text)
    still_works()


@needs_root
def test_another_user_cannot_read_where_the_workers_meet(agent: Agent, meeting: str) -> None:
    path = meeting.removeprefix("file://")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    os.chmod(os.path.dirname(path), 0o755)

    def read() -> bytes:
        return Path(path).read_bytes()

    with pytest.raises(RuntimeError, match="PermissionError"):
        as_nobody(read)


def test_what_stands_in_the_store_is_no_secret(agent: Agent, meeting: str) -> None:
    """Before, each worker's secret stood there for all to read."""
    raw = Path(meeting.removeprefix("file://")).read_bytes()
    assert agent.connector.secret not in raw
    assert agent.member.secret == b""


@needs_root
def test_another_users_port_is_not_joined() -> None:
    """A stranger who holds MASTER_PORT first was joined, and told both secrets."""
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(ready[1], str(store.port).encode())
            os.read(done[0], 1)
            del store
        finally:
            os._exit(0)
    try:
        os.close(ready[1])  # a child that ended is heard of
        port = int(os.read(ready[0], 10))
        options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rendezvous_timeout=10)
        with pytest.raises(RendezvousError, match=rf"port {port} is held by a process of another user.*{NOBODY}"):
            rpc.init_rpc("victim", rank=0, world_size=1, rpc_backend_options=options)
    finally:
        os.write(done[1], b"!")
        os.waitpid(pid, 0)
        for fd in (ready[0], *done):
            os.close(fd)


def test_a_store_of_another_job_is_not_joined(tmp_path: Path) -> None:
    path = str(tmp_path / "meeting")
    PrefixStore("telegrad", FileStore(path, -1)).set("mark", "made by a stranger")
    options = rpc.RpcBackendOptions(init_method=f"file://{path}", rendezvous_timeout=5)
    with pytest.raises(RendezvousError, match="another secret"):
        rpc.init_rpc("victim", rank=0, world_size=1, rpc_backend_options=options)


# --- where the user's secret lies ---


def test_the_users_secret_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = secrets.user_secret()
    assert secrets.user_secret() == first and len(first) == 64
    assert stat.S_IMODE((tmp_path / "telegrad/secret").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "telegrad").stat().st_mode) == 0o700


def test_a_secret_that_others_can_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    secrets.user_secret()
    (tmp_path / "telegrad/secret").chmod(0o644)
    with pytest.raises(AuthenticationError, match="chmod"):
        secrets.user_secret()


@needs_root
def test_a_folder_that_a_stranger_made_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"telegrad-{os.getuid()}"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    monkeypatch.setattr(secrets.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    with pytest.raises(AuthenticationError, match="another user"):
        secrets.user_secret()


@needs_root
def test_a_meeting_file_that_a_stranger_made_first(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    path.touch()
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(RendezvousError, match="another user"):
        make_private(str(path))


def test_without_a_home_a_private_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert secrets.user_secret() == secrets.user_secret()
    assert (tmp_path / f"telegrad-{os.getuid()}" / "secret").exists()


# --- whoever can write to the store (2) ---


def test_a_forged_restart_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    """A record "worker1 was started again, at the stranger's address" made worker0 dial it and unpickle its reply."""
    with cluster(2) as made:
        agent = require_agent()
        true = agent.directory.by_name("worker1")
        assert true is not None
        log = PrefixStore("telegrad/static", FileStore(made.meeting.removeprefix("file://"), -1))
        stranger = Listeners(("tcp",), "127.0.0.1")
        try:
            forged = msgspec.structs.replace(
                true, incarnation=true.incarnation + 1, addresses=tuple(stranger.addresses), secret=b"known"
            )
            assert generation_of(forged.incarnation) > generation_of(true.incarnation)  # or nobody would look at it
            index = int(log.add("records", 1)) - 1
            log.set(f"record/{index}", UNSEALED.seal(job_of(agent), msgspec.msgpack.encode(forged)))
            agent.peers.look_for_news()
            assert agent.directory.by_name("worker1") == true
            wait_until(lambda: "not written by a worker of this job" in caplog.text)  # perhaps by another thread
            assert rpc.rpc_sync("worker1", os.getpid) == made.processes[0].pid
            for sock in stranger.sockets:
                with pytest.raises(BlockingIOError):
                    sock.accept()
        finally:
            stranger.close()


def job_of(agent: Agent) -> bytes:
    """The number of its job, which anybody can read in the store."""
    member_log = agent.peers.member_log
    assert isinstance(member_log, MemberLog)
    return member_log._job


@pytest.mark.parametrize("same_job", [False, True], ids=["another job", "the same"])
def test_a_record_that_was_kept_from_another_job(agent: Agent, meeting: str, same_job: bool) -> None:
    """The jobs of a user have one secret. A record from the store of one, "worker1 was started again", was believed in
    the next, and ended the true worker1."""
    true = Member("worker1", WorkerId(1), draw_incarnation(0), (), 0)
    agent.peers.learn([true])
    kept = msgspec.structs.replace(true, incarnation=draw_incarnation(3))
    log = PrefixStore("telegrad/static", FileStore(meeting.removeprefix("file://"), -1))
    sealed = Seal(agent.connector.secret).seal(job_of(agent) if same_job else new_job(), msgspec.msgpack.encode(kept))
    log.set(f"record/{int(log.add('records', 1)) - 1}", sealed)
    agent.peers.look_for_news()
    assert agent.directory.by_name("worker1") == (kept if same_job else true)


def test_a_counter_that_runs_ahead(agent: Agent, meeting: str) -> None:
    """Whoever can write to the store announced a million million records, and each worker made room for them."""
    log = PrefixStore("telegrad/static", FileStore(meeting.removeprefix("file://"), -1))
    before = memory_mb()
    for _ in range(3):
        log.add("records", 10**12)
        agent.peers.look_for_news()
    late = Member("late", WorkerId(7), draw_incarnation(0), (), 0)
    assert agent.peers.member_log is not None
    agent.peers.member_log.publish(late)
    agent.peers.look_for_news()
    assert agent.directory.by_name("late") == late
    PrefixStore("telegrad", FileStore(meeting.removeprefix("file://"), -1)).add("complaints", 10**12)
    assert isinstance(agent.peers.member_log, MemberLog) and agent.peers.member_log.complaints() == []
    assert memory_mb() - before < 50
    still_works()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("verified", [True, False], ids=["verified", "as if records were not verified"])
def test_a_forged_reply_through_a_forged_restart(
    agent: Agent, meeting: str, tmp_path: Path, verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole attack, and that it succeeds where nobody looks at the seal: so it is the seal that it ends at."""
    exploded = tmp_path / "exploded"
    server = Server(agent)  # it knows the secret, as a stranger did who could read it in the store
    bomb = b"\x05" + pickle.dumps(_Bomb(exploded))
    server.answer = lambda number, _: bytes(encode_whole(FrameKind.REPLY, number, 0, PythonReply(), bomb))
    try:
        true = msgspec.structs.replace(server.member, name="worker1", addresses=(Address("tcp", "127.0.0.1", "9"),))
        agent.peers.learn([true])
        forged = msgspec.structs.replace(true, incarnation=true.incarnation + 1, addresses=server.member.addresses)
        server.member = forged
        if not verified:
            monkeypatch.setattr(Seal, "open", lambda self, sealed: Opened(sealed[32:48], sealed[48:]))
        log = PrefixStore("telegrad/static", FileStore(meeting.removeprefix("file://"), -1))
        log.set(
            f"record/{int(log.add('records', 1)) - 1}", UNSEALED.seal(job_of(agent), msgspec.msgpack.encode(forged))
        )
        agent.peers.look_for_news()
        assert (agent.directory.by_name("worker1") == forged) is not verified
        if verified:
            with pytest.raises((WorkerDied, RpcTimeout)):  # nobody is at the true address
                rpc.rpc_sync("worker1", os.getpid, timeout=0.5)
        else:
            rpc.rpc_sync("worker1", os.getpid)
        assert bool(server.asked) is not verified and exploded.exists() is not verified
    finally:
        server.close()


def test_the_store_listens_where_it_was_told() -> None:
    """It listened on all interfaces, and so did its monitor port."""
    with own_port() as port:
        before = _listening()
        options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", transports=("unix",))
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        try:
            opened = _listening() - before
            assert len([1 for _, at in opened if at == port]) == 1
            assert {host for host, _ in opened} == {"127.0.0.1"}
        finally:
            rpc.shutdown()


def _listening() -> set[tuple[str, int]]:
    """Addresses that this process listens at."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table, size in (("/proc/net/tcp", 4), ("/proc/net/tcp6", 16)):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                host = socket.inet_ntoa(struct.pack("<I", int(address, 16))) if size == 4 else "any IPv6"
                found.add((host, int(port, 16)))
    return found


# --- claimed identities (8) ---


def _resume_elsewhere(address: Address, secret: bytes, hello: bytes) -> str:
    from telegrad.transport.addresses import connect
    from telegrad.transport.handshake import DiallerHandshake
    from telegrad.transport.stream import receive_exactly

    sock = connect(address, PATIENCE)
    handshake = DiallerHandshake(secret)
    sock.sendall(handshake.opening)
    said = msgspec.msgpack.decode(hello, type=Hello)
    sock.sendall(handshake.answer(receive_exactly(sock, handshake.opening_answer_bytes), said))
    code, length = handshake.verdict_length(receive_exactly(sock, handshake.verdict_header_bytes))
    try:
        return str(handshake.verdict(code, receive_exactly(sock, length)))
    except AuthenticationError as error:
        return f"refused: {error}"


def _try_to_resume(kind: str, known: Member, link: int, ticket: bytes, report: str) -> None:
    """On worker1, which knows the secret: pose as worker0's link to worker2."""

    agent = require_agent()
    target = agent.find("worker2")
    hello = Hello(
        known.worker_id, known.name, known.incarnation, target.incarnation, link, False, "main", ticket=ticket
    )
    address = next(a for a in target.addresses if a.kind == kind)
    said = _resume_elsewhere(address, agent.connector.secret, msgspec.msgpack.encode(hello))
    Path(report).write_text(said)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_session_is_not_resumed_by_another(kind: str, tmp_path: Path) -> None:
    with cluster(3, transports=(kind,)):
        agent = require_agent()
        assert rpc.rpc_sync("worker2", os.getpid) != os.getpid()
        number = agent.link(agent.find("worker2")).number
        report = tmp_path / "report"
        rpc.rpc_sync("worker1", _try_to_resume, (kind, agent.member, number, bytes(16), str(report)))
        said = report.read_text()
        assert "refused" in said, said
        assert (
            ("which is process" in said)
            if kind == "unix"
            else (f"link {number} of worker 'worker0' is another's" in said)
        )


def test_the_id_of_another_is_not_taken(agent: Agent) -> None:
    """Under its own name, with an incarnation of its own: gradients are taken from ids, and certificates give names."""
    known = Member("other", agent.member.worker_id.__class__(3), agent.member.incarnation.__class__(99), (), 1)
    agent.peers.learn([known])
    hello = Hello(3, "liar", 1234, agent.member.incarnation, 1, False, "main", ticket=bytes(16))
    with pytest.raises(AuthenticationError, match="is 'other', not 'liar'"), lying_member(agent, hello=hello):
        pass


def test_a_claimed_process_is_checked(agent: Agent) -> None:
    """Somebody of this very user who knows the secret, and says it is a worker that another process is."""
    other = process(os.getpid)
    other.join()
    known = Member("other", agent.member.worker_id.__class__(3), agent.member.incarnation.__class__(99), (), 1)
    agent.peers.learn([msgspec.structs.replace(known, host=agent.member.host)])
    from telegrad.transport.handshake import Refused

    hello = Hello(3, "other", 99, agent.member.incarnation, 1, False, "main")
    with pytest.raises(Refused, match="which is process 1"), lying_member(agent, hello=hello):
        pass
    still_works()
