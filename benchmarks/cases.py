"""What is measured: one function per case, written against the shared interface.

A case's function prepares what it needs on the calling worker and returns the step to be timed. Bars and aims are
ratios to torch.distributed.rpc (how many times faster); the floor says what no implementation can go below on this
machine, in round trips and in copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from benchmarks import apis, work
from benchmarks.apis import Api

Step = Callable[[], object]
PEER = apis.worker_name(1)
MB = 1 << 20


@dataclass(frozen=True)
class Floor:
    """The least a step must do, one after another: messages there and back, and copies of `megabytes` each.

    `returns` counts the times that memory goes back where it came from, which takes a copy over sockets alone.
    """

    round_trips: float = 0.0
    megabytes: int = 0
    copies: int = 0
    returns: int = 0


@dataclass(frozen=True)
class Case:
    """One line of the table. `operations`: calls or training steps in one timed step; `unit`: how it is shown."""

    name: str
    title: str
    prepare: Callable[[Api], Step]
    workers: int = 2
    operations: int = 1
    unit: str = "us"
    group: str = "core"
    transport: str = apis.DEFAULT
    bar: float | None = None
    aim: float | None = None
    at_most: float | None = None  # a bar on the cost itself, for what the reference does not have at all
    floor: Floor | None = None
    busy_cores: int = 0
    lifecycle: bool = False  # timed: all workers join a job and leave it again; `prepare` is not used

    @property
    def key(self) -> str:
        return self.name if self.transport == apis.DEFAULT else f"{self.transport}.{self.name}"


def empty_call(api: Api) -> Step:
    return lambda: api.rpc.rpc_sync(PEER, work.nothing)


def tensor_call(api: Api) -> Step:
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    return lambda: api.rpc.rpc_sync(PEER, work.add, args=(a, b))


IN_FLIGHT = 1000


def calls_in_flight(api: Api) -> Step:
    return lambda: torch.futures.wait_all([api.rpc.rpc_async(PEER, work.nothing) for _ in range(IN_FLIGHT)])


ADDS_IN_FLIGHT = 500


def adds_in_flight(api: Api) -> Step:
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    return lambda: torch.futures.wait_all(
        [api.rpc.rpc_async(PEER, work.add, args=(a, b)) for _ in range(ADDS_IN_FLIGHT)]
    )


def reference_call(api: Api) -> Step:
    """What programs call methods of a remote object with: a function on its owner, and the reference as an argument."""
    reference = api.rpc.remote(PEER, work.Counter)
    reference.to_here()
    return lambda: api.rpc.rpc_sync(PEER, work.count, args=(reference, 1))


def remote_and_to_here(api: Api) -> Step:
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    return lambda: api.rpc.remote(PEER, work.add, args=(a, b)).to_here()


def echo(megabytes: int) -> Callable[[Api], Step]:
    def prepare(api: Api) -> Step:
        tensor = torch.ones(megabytes * MB // 4)
        return lambda: api.rpc.rpc_sync(PEER, work.echo, args=(tensor,))

    return prepare


def send(megabytes: int) -> Callable[[Api], Step]:
    def prepare(api: Api) -> Step:
        tensor = torch.ones(megabytes * MB // 4)
        return lambda: api.rpc.rpc_sync(PEER, work.take, args=(tensor,))

    return prepare


def autograd_step(rows: int, columns: int) -> Callable[[Api], Step]:
    """Forward through the peer and back. The loss is a dot product, so that the gradient sent is dense."""

    def prepare(api: Api) -> Step:
        x = torch.ones(rows, columns, requires_grad=True)
        direction = torch.ones(rows * columns)

        def step() -> None:
            with api.dist_autograd.context() as context_id:
                y = api.rpc.rpc_sync(PEER, work.add, args=(x, 1.0))
                api.dist_autograd.backward(context_id, [torch.dot(y.view(-1), direction)])

        return step

    return prepare


def chain(api: Api) -> Step:
    """One step through four workers, each calling the next; the last link's result travels back through all."""
    x = torch.ones(2, 2, requires_grad=True)
    rest = tuple(apis.worker_name(rank) for rank in (1, 2, 3))

    def step() -> None:
        with api.dist_autograd.context() as context_id:
            y = work.through(x, rest)
            api.dist_autograd.backward(context_id, [y.sum()])

    return step


DEPTH = 200


def recurrent(api: Api) -> Step:
    """A cell on the peer, called again and again with the hidden state it returned; then one backward."""
    inputs = torch.ones(2, 2, requires_grad=True)

    def step() -> None:
        with api.dist_autograd.context() as context_id:
            hidden = inputs
            for _ in range(DEPTH):
                hidden = api.rpc.rpc_sync(PEER, work.cell, args=(hidden,))
            api.dist_autograd.backward(context_id, [hidden.sum()])

    return step


def ping_pong(api: Api) -> Step:
    """The same with work here between the calls, so that each worker's graph is one chain through all messages."""
    inputs, weight = torch.ones(2, 2, requires_grad=True), torch.full((2, 2), 0.5, requires_grad=True)

    def step() -> None:
        with api.dist_autograd.context() as context_id:
            hidden = inputs
            for _ in range(DEPTH):
                hidden = torch.tanh(api.rpc.rpc_sync(PEER, work.cell, args=(hidden,)) * weight)
            api.dist_autograd.backward(context_id, [hidden.sum()])

    return step


def fan(api: Api) -> Step:
    """Calls that do not depend on each other, all in flight; then one backward through all of them."""
    inputs = torch.ones(2, 2, requires_grad=True)

    def step() -> None:
        with api.dist_autograd.context() as context_id:
            futures = [api.rpc.rpc_async(PEER, work.cell, args=(inputs,)) for _ in range(DEPTH)]
            api.dist_autograd.backward(context_id, [torch.stack(torch.futures.wait_all(futures)).sum()])

    return step


TRAINERS = 3
STEPS_EACH = 4
SERVER_SHAPE = (1024, 1024)  # 4 MB of float32


def parameter_server(api: Api) -> Step:
    """Worker 0 holds the parameters; trainers fetch them, run backward into them and step an optimizer."""
    trainers = [apis.worker_name(rank) for rank in range(1, TRAINERS + 1)]
    args = (apis.worker_name(0), *SERVER_SHAPE, STEPS_EACH)
    return lambda: torch.futures.wait_all([api.rpc.rpc_async(trainer, work.train, args=args) for trainer in trainers])


def calls_to_all(workers: int) -> Callable[[Api], Step]:
    def prepare(api: Api) -> Step:
        others = [apis.worker_name(rank) for rank in range(1, workers)]
        return lambda: torch.futures.wait_all([api.rpc.rpc_async(other, work.nothing) for other in others])

    return prepare


def pass_over_all(workers: int) -> Callable[[Api], Step]:
    def prepare(api: Api) -> Step:
        x = torch.ones(2, 2, requires_grad=True)
        others = [apis.worker_name(rank) for rank in range(1, workers)]

        def step() -> None:
            with api.dist_autograd.context() as context_id:
                results = torch.futures.wait_all(
                    [api.rpc.rpc_async(other, work.through, args=(x, ())) for other in others]
                )
                api.dist_autograd.backward(context_id, [torch.stack(results).sum()])

        return step

    return prepare


def no_step(api: Api) -> Step:
    """For lifecycle cases, where starting and stopping is itself what is timed."""
    raise RuntimeError(f"{api.name}: this case has no step of its own")


CORE = (
    Case("empty", "empty call", empty_call, bar=5, aim=8, floor=Floor(1)),
    Case("tensors", "call with two 2x2 tensors", tensor_call, bar=6.5, aim=10, floor=Floor(1)),
    Case("in_flight", "1,000 calls in flight", calls_in_flight, operations=IN_FLIGHT, unit="calls/s", bar=8, aim=15),
    Case("remote", "remote and to_here", remote_and_to_here, bar=5, aim=8, floor=Floor(1)),
    Case("echo1", "echo of 1 MB", echo(1), bar=3, aim=5, floor=Floor(1, 1, copies=1, returns=1)),
    Case("echo16", "echo of 16 MB", echo(16), unit="ms", bar=3.5, aim=6, floor=Floor(1, 16, copies=1, returns=1)),
    Case("echo128", "echo of 128 MB", echo(128), unit="ms", bar=5, aim=8, floor=Floor(1, 128, copies=1, returns=1)),
    Case("autograd", "autograd step, 2x2", autograd_step(2, 2), bar=3.5, aim=5, floor=Floor(2)),
    Case(
        "autograd16",
        "autograd step, 16 MB",
        autograd_step(2048, 2048),
        unit="ms",
        bar=3,
        aim=6,
        floor=Floor(2, 16, copies=3, returns=1),
    ),
    # Forward waits for three calls within each other; backward makes four hops and one: two and a half round trips.
    Case("chain", "autograd step, chain of 4 workers", chain, workers=4, bar=1.5, aim=2.5, floor=Floor(5.5)),
    Case(
        "server",
        "parameter server, 3 trainers, 4 MB",
        parameter_server,
        workers=1 + TRAINERS,
        operations=TRAINERS * STEPS_EACH,
        unit="steps/s",
        bar=2,
        aim=3,
    ),
    Case("lifecycle16", "16 workers: init and shutdown", no_step, workers=16, unit="ms", bar=1, aim=2, lifecycle=True),
)
OVER_TCP = tuple(replace(case, group="tcp", transport=apis.TCP, bar=1.5, aim=None) for case in CORE)
ALSO = (
    Case("rnn", "200 calls with the hidden state, then backward", recurrent, unit="ms", group="also", bar=1.75, aim=3),
    Case("pingpong", "the same with local work between the calls", ping_pong, unit="ms", group="also", bar=1.75, aim=3),
    Case("fan", "200 independent calls, then backward", fan, unit="ms", group="also", bar=1.75, aim=3),
    Case(
        "adds_in_flight",
        "500 adds of 2x2 in flight",
        adds_in_flight,
        operations=ADDS_IN_FLIGHT,
        unit="calls/s",
        group="also",
        bar=7,
        aim=10,
    ),
    Case("reference", "call to the owner of a reference", reference_call, group="also", bar=5, aim=8),
    Case("send128", "128 MB sent, nothing returned", send(128), unit="ms", group="also"),
    Case("busy", "empty call, one core busy", empty_call, group="also", busy_cores=1),
    *(
        Case(f"{name}{workers}", f"{title}, {workers} workers", shape(workers), workers=workers, group="also")
        for workers in (2, 4, 8, 16, 32)
        for name, title, shape in (
            ("calls", "a call to each other", calls_to_all),
            ("pass", "one pass over all", pass_over_all),
        )
    ),
)
ALL = (*CORE, *OVER_TCP, *ALSO)
BY_KEY = {case.key: case for case in ALL}


def select(names: Collection[str]) -> list[Case]:
    """Cases by key or by group, in the table's order."""
    return [case for case in ALL if case.key in names or case.group in names]
