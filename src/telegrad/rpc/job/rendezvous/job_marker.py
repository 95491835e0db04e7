"""Which job a rendezvous store belongs to: a record that its first worker leaves, and that all others compare with.

Workers of two jobs that happen to look for each other at one address, or of one job that were told different sizes,
would otherwise take each other for their own. Pure: two markers in, an error in words out.
"""

import os
import socket

import msgspec

from telegrad.errors import RendezvousError

STATIC, OPEN = "static", "open"


class JobMarker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the workers of one job agree on."""

    kind: str  # STATIC: the number of workers is fixed; OPEN: they come and go
    world_size: int | None = None
    job: str = ""  # what the engine that started it calls the job, if there is one: "slurm 17.0"
    begun_by: str = ""  # who wrote this, in words


def own_marker(name: str, world_size: int | None, job: str = "") -> JobMarker:
    """The marker of a worker of this process."""
    begun_by = f"worker {name!r} (process {os.getpid()} on {socket.gethostname()})"
    return JobMarker(STATIC if world_size else OPEN, world_size, job, begun_by)


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(JobMarker)


def encode(marker: JobMarker) -> str:
    """The marker as it stands in a store: text, for whoever looks into one."""
    return _encode(marker).decode()


def decode(data: bytes, where: str) -> JobMarker:
    """A marker read from a store. RendezvousError if it is none."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise RendezvousError(
            f"{where} holds something else under the key of Telegrad's job ({error}): another program, or another "
            "version of Telegrad, uses it. Give this job an address of its own"
        ) from error


def difference(found: JobMarker, mine: JobMarker, where: str) -> str:
    """Why a worker with the marker `mine` does not belong to the job `found`, in words; empty if it does."""
    begun = f"the job at {where}, begun by {found.begun_by},"
    if found.job and mine.job and found.job != mine.job:
        return (
            f"{begun} is {found.job!r}; {mine.begun_by} belongs to {mine.job!r}. Two jobs at one address: give "
            "this one another port or file"
        )
    if found.kind != mine.kind:
        return (
            "RPC group mixes statically and dynamically initialized members which is not supported. "
            f"{begun} is of the {found.kind} kind; {mine.begun_by} is of the {mine.kind} kind: give `world_size` on "
            "all or on none"
        )
    if found.world_size != mine.world_size:
        return (
            f"{begun} has world_size={found.world_size}; {mine.begun_by} says world_size={mine.world_size}. Give all "
            "workers the same, and another job an address of its own"
        )
    return ""
