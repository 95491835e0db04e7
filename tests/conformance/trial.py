"""One test in as many processes as it has ranks, forked from this one, which has a single thread and all imports.

torch's rule says how it went: failed if any rank says so, skipped if rank 0 says so, otherwise as rank 0 ended.
"""

import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcessTestCase

from tests.waiting import wait_until

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

_SKIP_CODES = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
_GRACE = 0.5  # seconds for the other ranks to say what they think after one has failed


class Trial:
    """A test that is being run."""

    def __init__(self, case: Any, test: str, folder: Path, seconds: float) -> None:
        self.name = f"{case.__name__}.{test}"
        self.outcome: str | None = None
        self.detail = ""
        self.started = time.monotonic()
        self._deadline = self.started + seconds
        self._log = folder / "log"
        self._codes: dict[int, int] = {}
        self._failed_at: float | None = None
        self._store = folder / "store"
        self._store.touch()
        method = getattr(case, test)
        if getattr(method, "__unittest_skip__", False):
            self.outcome, self.detail, self._ranks = SKIPPED, method.__unittest_skip_why__, {}
        else:
            world_size = int(case(test).world_size)
            self._ranks = {rank: self._fork(case, test, rank) for rank in range(world_size)}

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return time.monotonic() - self.started

    def _fork(self, case: Any, test: str, rank: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = _run_rank(case, test, rank, str(self._store))
            threading._shutdown()  # waits for the rank's threads, as its real end would
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.outcome is not None:
            return True
        for rank, pid in self._ranks.items():
            if rank not in self._codes:
                reaped, status = os.waitpid(pid, os.WNOHANG)
                if reaped:
                    self._codes[rank] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if self._failed_at is None and MultiProcessTestCase.TEST_ERROR_EXIT_CODE in self._codes.values():
            self._failed_at = now
        all_ended = len(self._codes) == len(self._ranks)
        if self._failed_at is not None and (all_ended or now > self._failed_at + _GRACE):
            self._end(FAILED, self._last_words())
        elif all_ended and self._codes[0] in _SKIP_CODES:
            self._end(SKIPPED, _SKIP_CODES[self._codes[0]])
        elif all_ended:
            self._end(PASSED if self._codes[0] == 0 else FAILED, "" if self._codes[0] == 0 else self._last_words())
        elif now > self._deadline:
            alive = sorted(self._ranks.keys() - self._codes.keys())
            self._end(FAILED, f"ranks {alive} had not ended after {self.seconds:.0f} s; {self._last_words()}")
        return self.outcome is not None

    def _end(self, outcome: str, detail: str) -> None:
        self.stop()
        self.outcome, self.detail = outcome, detail

    def stop(self) -> None:
        """End all ranks."""
        for rank, pid in self._ranks.items():
            if rank not in self._codes:
                with suppress(ProcessLookupError):  # it has not come to leading a group of its own, and is alone
                    os.killpg(pid, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                self._codes[rank] = os.waitstatus_to_exitcode(status)

    def _last_words(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        errors = [line for line in text.splitlines() if "Error: " in line and not line.startswith(" ")]
        return (errors[-1] if errors else f"exit codes {self._codes}")[:300]

    def log(self) -> str:
        """All that the ranks printed."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def _keep_process_groups() -> None:
    """Let no process group of this rank end before the rank does.

    In torch 2.13 a DistributedDataParallel that holds the last reference to its gloo group drops it with the GIL held,
    and `~ProcessGroupGloo` joins the group's threads. One of those may just then be releasing the last all-reduce,
    whose tensor has a Python object, and wait for the GIL: `~AsyncWork` -> `decref_pyobject`. Both wait for ever, in
    one run of twenty of `test_ddp_comparison`, without any RPC, too.
    """
    make_group, kept = distributed_c10d._new_process_group_helper, []

    def make_and_keep(*args: Any, **kwargs: Any) -> Any:
        made = make_group(*args, **kwargs)
        kept.append(made)
        return made

    distributed_c10d._new_process_group_helper = make_and_keep


def _await_default_group() -> None:
    """Let no group be made before the default one, which the main thread of this rank is making.

    `DdpUnderDistAutogradTest` has its trainers make groups as soon as the master has joined the default group, which
    may be before they have themselves. The slower a call is, the less often that shows.
    """
    make_group = dist.new_group

    def wait_and_make(*args: Any, **kwargs: Any) -> Any:
        wait_until(dist.is_initialized, 30)
        return make_group(*args, **kwargs)

    dist.new_group = wait_and_make


def _run_rank(case: Any, test: str, rank: int, store: str) -> int:
    _keep_process_groups()
    _await_default_group()
    ours, theirs = Pipe()
    try:
        case._run(rank, test, store, theirs)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        ours.close()
    return 0
