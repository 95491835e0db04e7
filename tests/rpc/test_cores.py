"""Workers of one host share its cores, whoever started them, and what a user chose stays."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.rpc.threads import cores


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host of sixteen cores, where torch took all of them and nobody has set anything."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(cores, "_QUOTA", Path("/nowhere"))
    for name in (*cores.COUNTS, *cores.WAITING):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(16)
    yield
    cores.return_share()
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("workers", "given", "added"),
    [
        (1, {}, {}),
        (4, {}, {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"}),
        (40, {}, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}),
        (4, {"OMP_NUM_THREADS": "7"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (4, {"MKL_NUM_THREADS": "7"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (4, {"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_NUM_THREADS": "4"}),
        (4, {"GOMP_SPINCOUNT": "9"}, {"OMP_NUM_THREADS": "4"}),
    ],
)
def test_what_started_workers_get(workers: int, given: dict[str, str], added: dict[str, str]) -> None:
    assert cores.variables_for(workers, given) == added


def test_what_the_caller_asks_for_counts() -> None:
    assert cores.variables_for(1, {"OMP_NUM_THREADS": "7"}, threads=3) == {"OMP_NUM_THREADS": "3"}


def test_a_container_has_the_cores_of_its_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(cores, "_QUOTA", quota)
    for text, usable in (("250000 100000\n", 2), ("max 100000\n", 16), ("9900000 100000", 16), ("1000 100000", 1)):
        quota.write_text(text)
        assert cores.usable_cores() == usable


def test_a_worker_among_others_uses_its_share_until_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "telegrad.rpc"):
        cores.take_share(3)
    assert torch.get_num_threads() == 5
    assert "3 workers share the 16 cores of this host: torch uses 5 threads here instead of 16" in caplog.text
    cores.return_share()
    assert torch.get_num_threads() == 16


def test_alone_nothing_changes() -> None:
    cores.take_share(1)
    assert torch.get_num_threads() == 16


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(11)
    cores.take_share(4)
    assert torch.get_num_threads() == 11
    torch.set_num_threads(16)
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    cores.take_share(4)
    assert torch.get_num_threads() == 16


def test_what_the_user_sets_later_is_not_undone() -> None:
    cores.take_share(4)
    torch.set_num_threads(6)
    cores.return_share()
    assert torch.get_num_threads() == 6


def settings() -> tuple[int, str | None]:
    import os

    return torch.get_num_threads(), os.environ.get("OMP_WAIT_POLICY")


@pytest.mark.slow
def test_workers_of_a_cluster_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 6)
    with telegrad.local_cluster(workers=3):
        assert rpc.rpc_sync("worker2", settings) == (2, "PASSIVE")
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 16


PROGRAM = """
import os, sys, torch
from telegrad.rpc.threads import cores

torch.set_num_threads(16)
cores.usable_cores = lambda: 16
cores._is_default = lambda _: True
cores.take_share(3)
child = os.fork()
if child == 0:
    assert torch.get_num_threads() == 5
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_forked_by_one_that_took_its_share_exits_as_it_means_to() -> None:
    """torch waited for threads that the child does not have, and crashed, depending on the C library."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout == "3\n", done.stderr


@pytest.mark.parametrize(("workers", "connections"), [(1, 8), (2, 8), (16, 8), (17, 2), (64, 2)])
def test_connections_for_a_large_tensor(workers: int, connections: int) -> None:
    assert cores.connections_for(workers, encrypted=False) == connections
    assert cores.connections_for(workers, encrypted=True) == 1
    assert 3 <= cores.sealed_connections_for(workers) <= 9
