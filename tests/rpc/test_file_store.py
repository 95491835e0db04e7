"""The store in a file: what torch's can do, and that a worker may be killed or stopped in the middle of anything."""

import os
import random
import re
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore as TorchFileStore
from torch._C._distributed_c10d import HashStore

from telegrad import rpc
from telegrad.errors import RendezvousError
from telegrad.rpc.current import require_agent
from telegrad.rpc.job.rendezvous import record_file, store
from telegrad.rpc.job.rendezvous.file_store import FileStore
from telegrad.rpc.job.rendezvous.member_log import open_store
from telegrad.rpc.job.rendezvous.store_client import StoreClosed
from tests.cluster import end, process
from tests.waiting import stop_process, wait_until

SOON = timedelta(seconds=0.2)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "meeting")


@pytest.fixture
def started() -> Iterator[list[Any]]:
    processes: list[Any] = []
    try:
        yield processes
    finally:
        for each in processes:
            if each.is_alive():
                os.kill(each.pid, signal.SIGCONT)
        end(processes, patience=0)


# --- as torch's stores ---

keys, values = st.sampled_from("abc"), st.sampled_from(["", "1", "20", "text" * 2000])
operations = st.one_of(
    st.tuples(st.just("set"), keys, values),
    st.tuples(st.just("add"), keys, st.sampled_from([-3, 0, 1, 1000])),
    st.tuples(st.just("compare_set"), keys, values, values),
    st.tuples(st.just("delete_key"), keys),
    st.tuples(st.just("check"), st.lists(keys, max_size=3)),
    st.tuples(st.just("get"), keys),
    st.tuples(st.just("multi_get"), st.lists(keys, min_size=1, max_size=3)),
    st.tuples(st.just("num_keys")),
)


def outcome(made: Any, operation: tuple[Any, ...]) -> Any:
    name, *args = operation
    try:
        if name in ("get", "multi_get") and not made.check(args[0] if name == "multi_get" else args):
            return "missing"  # it would be waited for
        return getattr(made, name)(*args)
    except ValueError:
        return "not a number"


@given(st.lists(st.tuples(st.integers(0, 2), operations), max_size=30))
def test_it_does_what_torchs_stores_do(tmp_path_factory: pytest.TempPathFactory, script: list[Any]) -> None:
    """Through two stores of ours and one of torch's in the same file: what one writes, the others read."""
    path = str(tmp_path_factory.mktemp("table") / "meeting")
    oracle, stores = HashStore(), [FileStore(path), FileStore(path), TorchFileStore(path, -1)]
    for which, operation in script:
        expected = outcome(oracle, operation)
        got = outcome(stores[which], operation)
        if which < 2 or operation[0] not in ("delete_key", "num_keys"):  # torch's in a file counts its own keys, too
            assert got == expected, operation


def test_a_key_is_waited_for_and_that_ends(path: str) -> None:
    one, other = FileStore(path), FileStore(path)
    one.set_timeout(SOON)
    assert one.timeout == SOON
    with pytest.raises(StoreClosed, match=rf"0\.2 s in the store '{re.escape(path)}' for \['k'\]"):
        one.get("k")
    one.set_timeout(timedelta(seconds=10))
    writer = threading.Timer(0.05, other.set, ("k", b"\xff\x00"))
    writer.start()
    assert one.get("k") == b"\xff\x00"
    writer.join()


def test_a_look_writes_and_locks_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = FileStore(path)
    made.add("n", 3)
    size = os.path.getsize(path)
    with monkeypatch.context() as patched:
        patched.setattr(made._file, "_lock_file", lambda fd, how: pytest.fail("locked"))
        assert made.add("n", 0) == 3 and made.check(["n"]) and made.get("n") == b"3"
    assert os.path.getsize(path) == size


def test_it_is_described_by_its_path(path: str) -> None:
    made = FileStore(path)
    assert store.describe(made) == made.path == path and path in repr(made)
    assert store.endpoint_of(made) is None


def test_who_uses_it_is_counted(path: str) -> None:
    """The last of a job of fixed size removes the file, process groups of torch's included."""
    one, other, group = FileStore(path, 3), FileStore(path, 3), TorchFileStore(path, 3)
    del one, group
    assert os.path.exists(path)
    del other
    assert not os.path.exists(path)
    again = FileStore(path)
    del again
    assert os.path.exists(path)  # workers come and go there


def test_those_who_come_as_the_last_one_goes(path: str) -> None:
    """Each time the file is removed, somebody may have opened it just before."""

    def come_and_go() -> None:
        for _ in range(50):
            made = FileStore(path, 0)
            sums.append(made.add("n", 1))

    sums: list[int] = []
    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sums) == 150 and not os.path.exists(path)


# --- several at once ---


def add_many(path: str, times: int) -> None:
    made = FileStore(path)
    for _ in range(times):
        made.add("n", 1)


@pytest.mark.slow
def test_processes_and_threads_add_to_one_counter(path: str, started: list[Any]) -> None:
    made = FileStore(path)
    started += [process(add_many, path, 200) for _ in range(3)]
    threads = [threading.Thread(target=lambda: [made.add("n", 1) for _ in range(100)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for each in [*threads, *started]:
        each.join(60)
    assert [each.exitcode for each in started] == [0, 0, 0]
    assert made.add("n", 0) == 900


def test_a_forked_child_goes_on(path: str) -> None:
    made = FileStore(path, 1)
    made.set("before", "1")
    with made._file._lock:  # as another thread might, at that moment
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(30)
                made.set("of the child", made.get("before"))
                del made
            finally:
                os._exit(0)
    os.waitpid(pid, 0)
    assert made.get("of the child") == b"1" and os.path.exists(path)


# --- killed, stopped, removed ---


def test_a_record_that_was_cut_off_anywhere(path: str) -> None:
    """Readers leave it, the next to write cuts it off."""
    FileStore(path).set("kept", "1")
    before = os.path.getsize(path)
    FileStore(path).set("long key", "a value")
    whole = Path(path).read_bytes()
    start = whole.index(b"long key") - 5
    assert before < start
    for length in range(start, whole.index(b"a value") + len(b"a value")):
        Path(path).write_bytes(whole[:start])
        reader, writer = FileStore(path), FileStore(path)
        grown = Path(path).read_bytes()  # they are counted there
        with open(path, "ab") as file:
            file.write(whole[start:length])
        assert reader.get("kept") == b"1" and not reader.check(["long key"])
        assert os.path.getsize(path) == len(grown) + length - start
        writer.set("next", "2")
        assert Path(path).read_bytes() == grown + b"\x05\0\0\0/next\x01\0\0\x002"
        assert reader.get("next") == b"2" and not reader.check(["long key"])


def test_a_beginning_that_was_cut_off_anywhere(path: str) -> None:
    FileStore(path).set("k", "1")
    whole = Path(path).read_bytes()
    for length in range(whole.index(b"/k") - 4):
        Path(path).write_bytes(whole[:length])
        FileStore(path).set("k", "2")
        assert FileStore(path).get("k") == b"2" and FileStore(path).num_keys() == 1


def test_a_write_that_fails_leaves_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = FileStore(path)
    made.set("a", "1")
    before, write = Path(path).read_bytes(), os.pwrite

    def short(fd: int, data: Any, offset: int) -> int:
        if offset > len(before):
            raise OSError(28, "No space left on device")
        return write(fd, data[:3], offset)

    monkeypatch.setattr(record_file.os, "pwrite", short)
    with pytest.raises(StoreClosed, match="No space left"):
        made.set("b", "2")
    assert Path(path).read_bytes() == before
    monkeypatch.setattr(record_file.os, "pwrite", lambda fd, data, offset: write(fd, data[:3], offset))
    made.set("b", "2")
    assert FileStore(path).get("b") == b"2"


TIMES = 10_000


def write_for_ever(path: str) -> None:
    """In small pieces, so that a kill leaves some of them."""
    write = os.pwrite
    record_file.os.pwrite = lambda fd, data, offset: write(fd, data[:100], offset)
    made, number = FileStore(path), 0
    while True:
        made.add("n", 1)
        number += 1
        made.set(f"of {os.getpid()}", str(number) * TIMES)


@pytest.mark.slow
def test_writers_are_killed_at_any_moment(path: str, started: list[Any], long_profile: bool) -> None:
    made, last, chance, torn = FileStore(path), 0, random.Random(5), 0
    for _ in range(200 if long_profile else 8):
        started += [process(write_for_ever, path) for _ in range(2)]
        wait_until(lambda last=last: made.add("n", 0) > last + 4)
        time.sleep(chance.uniform(0, 0.02))  # any moment
        for each in started:
            each.kill()
        for each in started:
            each.join()
        started.clear()
        made.num_keys()
        torn += os.path.getsize(path) > made._file._end
        last = made.add("n", 1)
        fresh = FileStore(path)
        assert fresh.add("n", 0) == last
        written = [value for key, value in fresh._file.values().items() if key.startswith(b"/of")]
        assert written == [value[: len(value) // TIMES] * TIMES for value in written]
    assert torn > 0


def hold(path: str, ready: str) -> None:
    with FileStore(path)._file._writing():
        Path(ready).touch()
        threading.Event().wait(170)


def test_a_lock_that_a_stopped_process_holds(path: str, tmp_path: Path, started: list[Any]) -> None:
    made = FileStore(path)
    made.set("known", "1")
    made.check(["known"])
    size = os.path.getsize(path)
    started.append(process(hold, path, str(tmp_path / "ready")))
    wait_until((tmp_path / "ready").exists, 60)
    stop_process(started[0].pid)
    made.set_timeout(SOON)
    began = time.monotonic()
    with pytest.raises(StoreClosed, match=rf"{re.escape(path)}' has been locked for 0\.2 s by .*process.*stopped"):
        made.set("k", "1")
    with pytest.raises(RendezvousError, match=r"has been locked for 0\.3 s"):
        open_store(f"file://{path}", 0, 2, 0.3)
    assert time.monotonic() - began < 5
    assert os.path.getsize(path) > size  # the holder was counted
    started[0].kill()
    started[0].join()
    made.set("k", "1")
    assert made.get("known") == b"1"


def replace(path: str) -> None:
    os.rename(path, path + ".old")
    FileStore(path).set("k", "of another")


@pytest.mark.parametrize(
    "change", [os.unlink, replace, lambda path: os.truncate(path, 5)], ids=["removed", "replaced", "cut"]
)
def test_a_file_that_somebody_removes(path: str, change: Callable[[str], None]) -> None:
    made = FileStore(path)
    made.set("k", "1")
    change(path)
    for operation in (("check", ["k"]), ("set", "k", "2"), ("add", "n", 0)):
        with pytest.raises(StoreClosed, match=r"was removed or replaced while this worker used it.*Remove such a file"):
            outcome(made, operation)
    there = Path(path).read_bytes() if os.path.exists(path) else b""
    del made  # in silence, and what is there now is left alone
    assert (Path(path).read_bytes() if os.path.exists(path) else b"") == there


def test_a_worker_joins_stays_and_leaves_where_another_was_killed(path: str) -> None:
    """Each of these hung in torch's store, in C++, where no deadline counts."""
    options = rpc.RpcBackendOptions(init_method=f"file://{path}", rendezvous_timeout=20)
    made = FileStore(path)
    made.set("k", "1")

    def leave_half_a_record() -> None:
        with open(path, "ab") as file:
            file.write(b"\x09\0\0\0/tele")

    leave_half_a_record()
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    leave_half_a_record()
    require_agent().peers.look_for_news()
    rpc.shutdown()
    assert made.get("k") == b"1"


# --- files that are no stores ---


@pytest.mark.parametrize("size", [None, 1])
def test_a_foreign_file_is_refused_and_left(path: str, size: int | None) -> None:
    Path(path).write_bytes(b"my thesis, the only copy")
    with pytest.raises(
        RendezvousError, match=rf"'{re.escape(path)}': the file is no store, it begins with b'my thes.*not"
    ):
        open_store(f"file://{path}", 0, size, 5)
    assert Path(path).read_bytes() == b"my thesis, the only copy"


def test_a_path_that_cannot_be_used(tmp_path: Path) -> None:
    for bad, what in ((tmp_path, "Is a directory"), (tmp_path / "none/meeting", "No such file")):
        with pytest.raises(RendezvousError, match=what):
            open_store(f"file://{bad}", 0, 1, 1)
    with pytest.raises(RendezvousError, match="path of a file is missing"):
        open_store("file://", 0, 1, 1)


def test_an_empty_file_is_a_new_one(path: str) -> None:
    Path(path).touch(0o644)
    made = open_store(f"file://{path}", 0, None, 5)
    assert isinstance(made, FileStore) and made.num_keys() == 0
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
