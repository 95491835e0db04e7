"""Snapshots on disk: a folder for each, in it a file for each worker and, once all are there, one that says so.

    DIRECTORY/RUN/40.1.5f0c/worker0.pt, worker1.pt, whole.json

Files are written under another name, flushed and renamed. The driver writes `whole.json` last, so a folder without
it is none. The two newest whole ones are kept. Workers of several hosts need a shared file system only if they come
back on other hosts than they wrote from.
"""

import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from telegrad.durable.snapshot.copies import find_unplain
from telegrad.durable.snapshot.names import Snapshot
from telegrad.errors import DurableError

_WHOLE = "whole.json"
_KEPT = 2


def write_part(folder: Path, snapshot: Snapshot, worker: str, state: Any) -> None:
    """One worker's part."""
    for name, value in state["values"].items():
        unplain = find_unplain(value, f"the state of durable value {name!r}")
        if unplain is not None:
            raise DurableError(
                f"{unplain}, which cannot be written to disk: states of tensors, numbers, strings, lists and dicts "
                "can. Give the value `save=` and `load=` functions that use only these"
            )
    target = folder / str(snapshot) / f"{worker}.pt"
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{worker}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def read_part(folder: Path, snapshot: Snapshot, worker: str) -> Any:
    """One worker's part, as it was written."""
    source = folder / str(snapshot) / f"{worker}.pt"
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise DurableError(
            f"worker {worker!r} does not find {source}, its part of the snapshot after step {snapshot.step}: put the "
            "folder where all workers reach it, or start the worker where it ran before"
        ) from error
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DurableError(f"{source} cannot be read: {error}") from error


def seal(folder: Path, snapshot: Snapshot, members: tuple[str, ...]) -> None:
    """All parts are there: say so, and let older ones go."""
    place = folder / str(snapshot)
    beside = place / f".{_WHOLE}"
    with beside.open("w") as file:
        json.dump({"step": snapshot.step, "members": members}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, place / _WHOLE)
    for old in sorted(sealed(folder, members))[:-_KEPT]:
        (folder / str(old) / _WHOLE).unlink(missing_ok=True)  # first: half a folder must not count
        shutil.rmtree(folder / str(old), ignore_errors=True)


def sealed(folder: Path, members: tuple[str, ...]) -> list[Snapshot]:
    """The whole snapshots there are of a run with these members."""
    found = []
    for whole in folder.glob(f"*/{_WHOLE}"):
        said = json.loads(whole.read_text())
        if tuple(said["members"]) != members:
            raise DurableError(
                f"{whole} is of a run with workers {said['members']}, this one has {list(members)}: use another "
                "directory, or another name for the run"
            )
        step, epoch, driver = whole.parent.name.split(".")
        found.append(Snapshot(int(step), int(epoch, 16), int(driver, 16)))
    return found
