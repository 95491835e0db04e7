"""The state of one worker in numbers, for those who look at many: links, references, contexts, passes, threads."""

import os
import resource
import threading
import time
from typing import Any

import msgspec
import torch

from telegrad.autograd.registry import registry_of
from telegrad.engine.service import PassService
from telegrad.ids import worker_id_of
from telegrad.observe.metrics import FunctionCount, LinkCount
from telegrad.observe.service import Observation
from telegrad.rpc.agent import Agent
from telegrad.rref.rref_context import RRefContext, rrefs_of

_MOST_VALUES = 20_000  # owned values that are looked at for their size


class ContextState(msgspec.Struct, array_like=True):
    """A context that is open here."""

    context: int
    opened_by: int
    sends: int
    receives: int
    participants: int
    failed: bool


class PassView(msgspec.Struct, array_like=True):
    """A backward pass that runs now: whose gradients this worker has, and whose it waits for."""

    context: int
    root: int
    heard: int
    waits_for: list[int]


class Snapshot(msgspec.Struct, array_like=True):
    """All of it, of one worker."""

    name: str
    worker_id: int
    incarnation: int
    pid: int
    host: str
    clock: float
    links: dict[int, LinkCount]
    functions: dict[str, FunctionCount]
    in_flight: dict[int, int]
    serving: int
    threads: int
    memory: int  # resident bytes of the process
    owned: int
    owned_bytes: int
    held_by: dict[int, int]  # bytes of owned values, by the worker that names them
    used: int
    contexts: list[ContextState]
    passes: list[PassView]
    recent: list[tuple[float, str, str]]
    lost_events: int
    up_seconds: float = 0.0
    calls_made: int = 0
    calls_served: int = 0


decode = msgspec.msgpack.Decoder(Snapshot).decode


def snapshot(observation: Observation) -> Snapshot:
    """The state of this worker."""
    observation.drain()
    agent, metrics = observation.agent, observation.metrics
    rrefs = rrefs_of(agent)
    owned_bytes, held_by = _sizes(rrefs)
    service = agent.find_layer(PassService)
    passes = [
        PassView(int(p.context.context_id), int(p.root), len(p.context.sends) - len(waits), [int(w) for _, w in waits])
        for p in (service.passes() if service is not None else [])
        if not p.finished
        for waits in [p.waits()]
    ]
    return Snapshot(
        agent.member.name,
        int(agent.member.worker_id),
        int(agent.member.incarnation),
        os.getpid(),
        os.uname().nodename,
        time.monotonic(),
        metrics.links,
        metrics.functions,
        _in_flight(agent),
        sum(len(session.under_way()) for session in agent.peers.sessions()),
        threading.active_count(),
        _resident(),
        len(rrefs.owned),
        owned_bytes,
        held_by,
        len(rrefs.used),
        [
            ContextState(
                int(c.context_id),
                int(c.opened_by),
                len(c.sends),
                len(c.recvs),
                len(c.participants),
                c.failure is not None,
            )
            for c in registry_of(agent).contexts()
        ],
        passes,
        observation.recent,
        metrics.lost,
        time.monotonic() - observation.since,
        agent.runtime.calls_made,
        agent.runtime.calls_served,
    )


def _in_flight(agent: Agent) -> dict[int, int]:
    """Requests without a reply, by the worker asked; Telegrad's own aside, such as a barrier."""
    found: dict[int, int] = {}
    for link in agent.peers.links():
        waiting = [slot for slot in link.pending.snapshot() if slot.resend]
        count = sum(agent.layers.is_work(type(slot.resend[0])) for slot in waiting)
        if count:
            found[int(link.member.worker_id)] = count
    return found


def _sizes(rrefs: RRefContext) -> tuple[int, dict[int, int]]:
    """The bytes of tensors in the values that others name: in all, and for each worker that does."""
    total = 0
    held_by: dict[int, int] = {}
    leaks = rrefs.look(rrefs.owned.leaks)
    for leak in leaks[:_MOST_VALUES]:
        outcome = rrefs.values.get(leak.rref_id)
        if outcome is None or not outcome.done or outcome.failure is not None:
            continue
        size = _bytes_of(outcome.value)
        total += size
        for holder in {int(worker_id_of(peer)) for peer in leak.forks.values()}:
            held_by[holder] = held_by.get(holder, 0) + size
    return total, held_by


def _bytes_of(value: Any) -> int:
    """The bytes of the tensors a value holds, as far as that can be seen cheaply."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, torch.nn.Module):
        return sum(tensor.numel() * tensor.element_size() for tensor in value.state_dict().values())
    if isinstance(value, list | tuple):
        return sum(_bytes_of(item) for item in value[:1000])
    if isinstance(value, dict):
        return sum(_bytes_of(item) for item in list(value.values())[:1000])
    return 0


def _resident() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
