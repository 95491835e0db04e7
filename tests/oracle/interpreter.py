"""Runs a program distributed, and the same program in one process with plain torch autograd, and compares.

One interpreter serves both: `run_body` is what happens on a worker, and only the three ways in which workers meet (a
call, a reference, a fetch) differ. In one process a boundary between two workers is a `clone`, so that hooks and leaves
are on the same sides of it as in the distributed program.
"""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.autograd.registry import registry
from tests.oracle.program import (
    Body,
    Call,
    Embed,
    Fetch,
    Hook,
    Keep,
    Kept,
    Leaf,
    Local,
    Parallel,
    Program,
    Remote,
    Step,
)

PASS_TIMEOUT = 60.0
LEAVES = 2
ROWS = 3


class _Cubed(torch.autograd.Function):
    """A user's own Function among the operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3 / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 / 8 * gradient


# All values are of shape (2,) and stay small.
OPS: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "add": lambda x, y: [(x + y) / 2],
    "mul": lambda x, y: [x * y / 2],
    "sin": lambda x, y: [x.sin()],
    "cubed": lambda x, y: [_Cubed.apply(x).tanh()],
    "halves": lambda x, y: list(torch.cat([x, y]).split(2)),
    "crossed": lambda x, y: [torch.stack([x, y], dim=1)[i] for i in range(2)],
    "in_place": lambda x, y: [x.clone().mul_(0.5).add_(y)],
    "view": lambda x, y: [x[:1].expand(2)],
    "detach": lambda x, y: [x.detach()],
}
# With a GPU: to it, or away from it.
MOVES = {"moved": lambda x, y: [x.cpu() if x.is_cuda else x.cuda()]}


class State(NamedTuple):
    """What one worker has for one run of a program."""

    leaves: dict[str, Tensor]
    shelves: dict[int, Tensor]
    log: list[tuple[str, list[float]]]


class Where(NamedTuple):
    """Where a body runs: in which run of which kind, on which worker, and whether its calls are recorded there."""

    run: str
    worker: int
    distributed: bool
    recording: bool
    leaf_hooks: bool
    mixed: bool = False  # whether every other worker's leaves are on the GPU, and values go back and forth
    path: str = ""


_states: dict[tuple[str, int], State] = {}
_states_lock = threading.Lock()
_runs = itertools.count()


class Refused(Exception):
    """What a body raises that is told to fail."""


def state_of(where: Where) -> State:
    with _states_lock:
        key = (where.run, where.worker)
        if key not in _states:
            _states[key] = _new_state(where)
        return _states[key]


def _new_state(where: Where) -> State:
    generator = torch.Generator().manual_seed(where.worker)
    shapes = {f"leaf {number}": (2,) for number in range(LEAVES)} | {"embedding": (ROWS, 2)}
    device = "cuda" if where.mixed and where.worker % 2 else "cpu"
    leaves = {
        name: torch.nn.Parameter(torch.rand(shape, dtype=torch.float64, generator=generator).to(device))
        for name, shape in shapes.items()
    }
    state = State(leaves, {}, [])
    if where.leaf_hooks:
        for name, leaf in leaves.items():
            leaf.register_hook(lambda gradient, name=name: _note(state, f"hook on {name}", gradient))
            leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: _note(state, f"after {name}", leaf.grad))
    return state


def _note(state: State, what: str, gradient: Tensor | None) -> None:
    # A None, and what it may become on its way (zeros), are no gradient.
    if gradient is not None and bool(dense(gradient).any()):
        state.log.append((what, rounded(gradient)))


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def rounded(tensor: Tensor) -> list[float]:
    return [float(f"{value:.6g}") + 0.0 for value in dense(tensor).detach().flatten().tolist()]


# --- what runs on a worker ---


def run_body(where: Where, body: Body, values: list[Any], references: list[Any]) -> list[Tensor]:
    """All values of a body after its last step."""
    state = state_of(where)
    values = [state.leaves["leaf 0"], *values]
    references = list(references)
    for number, step in enumerate(body):
        here = where._replace(path=f"{where.path}/{number}")
        values += _run_step(here, state, step, values, references)
    return values


def _run_step(where: Where, state: State, step: Step, values: list[Tensor], references: list[Any]) -> list[Tensor]:
    def pick(position: int) -> Tensor:
        return values[-1 - position % len(values)]

    match step:
        case Leaf(number):
            return [state.leaves[f"leaf {number % LEAVES}"]]
        case Embed(rows):
            indices = torch.tensor([row % ROWS for row in rows], device=state.leaves["embedding"].device)
            return [torch.nn.functional.embedding(indices, state.leaves["embedding"], sparse=True).sum(0)]
        case Local(op, left, right, no_grad):
            with torch.set_grad_enabled(not no_grad):
                one = pick(left)
                if op in MOVES:
                    return MOVES[op](one, one) if where.mixed else []
                return OPS[op](one, pick(right).to(one.device))
        case Hook(value, doubling):
            watched = pick(value)
            if watched.requires_grad:
                watched.register_hook(_hook(state, f"worker {where.worker} {where.path}", doubling))
            return []
        case Keep(shelf, value):
            state.shelves[shelf] = pick(value)
            return []
        case Kept(shelf):
            return [state.shelves[shelf]] if shelf in state.shelves else []
        case Call():
            return _call(where, step, [pick(i) for i in step.arguments], references)()
        case Parallel(calls):
            waits = [
                _call(where._replace(path=f"{where.path}.{i}"), call, [pick(j) for j in call.arguments], references)
                for i, call in enumerate(calls)
            ]
            return [value for wait in waits for value in wait()]
        case Remote():
            references.append(_remote(where, step, [pick(i) for i in step.arguments], references))
            return []
        case Fetch(reference):
            return [_fetch(where, references[reference % len(references)])] if references else []


def _hook(state: State, name: str, doubling: bool) -> Callable[[Tensor], Tensor | None]:
    def hook(gradient: Tensor) -> Tensor | None:
        _note(state, name, gradient)
        return gradient * 2 if doubling and gradient is not None else None

    return hook


def serve_call(where: Where, step: Call, values: list[Any], references: list[Any]) -> Any:
    """The callee's side of a call."""
    results = run_body(where, step.body, flatten(values), references)[-step.results :]
    if step.fails:
        raise Refused(where.path)
    return CONTAINERS[step.container](results)


def serve_remote(where: Where, step: Remote, values: list[Any], references: list[Any]) -> Tensor:
    return run_body(where, step.body, flatten(values), references)[-1]


# Other things than tensors with gradients travel among them.
CONTAINERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "list": list,
    "dict": lambda tensors: {"count": len(tensors), **{f"tensor {i}": tensor for i, tensor in enumerate(tensors)}},
    "nested": lambda tensors: (torch.arange(3), [tensors[:1], {"rest": tensors[1:]}], torch.ones(2), None),
}


def flatten(container: Any) -> list[Tensor]:
    """The float64 tensors of a container: the values of the program."""
    if isinstance(container, Tensor):
        return [container] if container.dtype == torch.float64 else []
    if isinstance(container, dict):
        container = list(container.values())
    if isinstance(container, list | tuple):
        return [tensor for item in container for tensor in flatten(item)]
    return []


# --- how workers meet ---


def _call(where: Where, step: Call, arguments: list[Tensor], references: list[Any]) -> Callable[[], list[Tensor]]:
    """Start a call; what is returned waits for its results."""
    recording = where.recording and not step.no_grad
    there = where._replace(worker=step.worker, recording=recording)
    sent = CONTAINERS[step.container](arguments) if arguments else []
    with torch.set_grad_enabled(not step.no_grad):
        if where.distributed:
            future = rpc.rpc_async(f"worker{step.worker}", serve_call, (there, step, sent, references))
            return lambda: _results(future.wait)
        with torch.enable_grad():
            sent = _cross(sent, recording)
            results = _results(lambda: _cross(serve_call(there, step, sent, references), recording))
        return lambda: [result.detach() for result in results] if step.no_grad else results


def _results(produce: Callable[[], Any]) -> list[Tensor]:
    try:
        return flatten(produce())
    except Refused:
        return []


def _cross(container: Any, recorded: bool) -> Any:
    """One process's boundary between two workers: part of the graph, or a new leaf if the call is not recorded.

    A tensor that is there twice is one tensor on the other side, too.
    """
    crossed: dict[int, Tensor] = {}

    def cross(item: Any) -> Any:
        if isinstance(item, Tensor):
            if id(item) not in crossed:
                kept = recorded or not item.requires_grad
                crossed[id(item)] = item.clone() if kept else item.detach().clone().requires_grad_()
            return crossed[id(item)]
        if isinstance(item, dict):
            return {key: cross(inner) for key, inner in item.items()}
        return [cross(inner) for inner in item] if isinstance(item, list | tuple) else item

    return cross(container)


class LocalReference(NamedTuple):
    """One process's reference."""

    owner: int
    value: Tensor


def _remote(where: Where, step: Remote, arguments: list[Tensor], references: list[Any]) -> Any:
    there = where._replace(worker=step.worker)
    if where.distributed:
        return rpc.remote(f"worker{step.worker}", serve_remote, (there, step, arguments, references))
    return LocalReference(step.worker, serve_remote(there, step, _cross(arguments, where.recording), references))


def _fetch(where: Where, reference: Any) -> Tensor:
    if where.distributed:
        fetched: Tensor = reference.to_here()
        return fetched
    value: Tensor = reference.value
    return value if reference.owner == where.worker else _cross(value, where.recording)


# --- whole programs ---


class Outcome(NamedTuple):
    """What a program leaves: the gradients of each worker's leaves, and what the hooks saw, in no order."""

    gradients: dict[str, list[float] | None]
    hooks: list[tuple[str, list[float]]]


def in_one_process(program: Program, mixed: bool = False) -> Outcome:
    """The oracle."""
    where = Where(f"one process {next(_runs)}", 0, False, True, program.leaf_hooks, mixed)
    totals: dict[Tensor, Tensor] = {}
    values: list[Tensor] = []
    passes = [segment for segment in program.segments if segment.roots]
    for number, segment in enumerate(program.segments):
        values = run_body(where._replace(path=str(number)), segment.body, values, [])
        roots, gradients = _roots(values, segment.roots, segment.grad_tensors)
        if roots:
            torch.autograd.backward(roots, gradients, retain_graph=segment is not passes[-1])
        for worker in range(program.workers):
            for leaf in state_of(where._replace(worker=worker)).leaves.values():
                if leaf.grad is not None:  # a context's gradients are apart from `.grad`, pass by pass
                    grad, leaf.grad = leaf.grad, None
                    totals[leaf] = dense(grad) + totals[leaf] if leaf in totals else dense(grad)
    collected = [collect(where._replace(worker=worker), totals.get) for worker in range(program.workers)]
    return _merge(collected)


def distributed(program: Program, mixed: bool = False) -> Outcome:
    """The same over the workers of a running cluster, of which this process is the first."""
    where = Where(f"distributed {time.monotonic_ns()} {next(_runs)}", 0, True, True, program.leaf_hooks, mixed)
    values: list[Tensor] = []
    passes = [segment for segment in program.segments if segment.roots]
    with autograd.context() as context_id:
        for number, segment in enumerate(program.segments):
            values = run_body(where._replace(path=str(number)), segment.body, values, [])
            roots, gradients = _roots(values, segment.roots, segment.grad_tensors)
            if roots:
                retain = segment is not passes[-1]
                autograd.backward(context_id, roots, retain, grad_tensors=gradients, timeout=PASS_TIMEOUT)
        del values
        collected = [
            rpc.rpc_sync(f"worker{worker}", collect_gradients, (where._replace(worker=worker), context_id))
            for worker in range(program.workers)
        ]
    return _merge(collected)


def _roots(values: list[Tensor], positions: tuple[int, ...], given: bool) -> tuple[list[Tensor], list[Tensor | None]]:
    """Roots, each once, and where their gradients are given also those."""
    chosen = {-1 - position % len(values): None for position in positions}
    roots = [values[position] for position in chosen if values[position].requires_grad]
    if given:  # not the values themselves: a view made under `no_grad` may say that it requires grad, and cannot be one
        gradients = [
            torch.arange(1.0, 3.0, dtype=torch.float64, device=root.device) * (i + 1) for i, root in enumerate(roots)
        ]
        return [root * 1 for root in roots], gradients
    return [root.sum() for root in roots], [None] * len(roots)


def collect(where: Where, gradient_of: Callable[[Tensor], Tensor | None]) -> Outcome:
    """What one worker has at the end; its state is dropped."""
    state = state_of(where)
    gradients = {
        f"worker {where.worker} {name}": None if (gradient := gradient_of(leaf)) is None else rounded(gradient)
        for name, leaf in state.leaves.items()
    }
    log = [(f"worker {where.worker} {what}", seen) for what, seen in state.log]
    with _states_lock:
        del _states[where.run, where.worker]
    return Outcome(gradients, log)


def collect_gradients(where: Where, context_id: int) -> Outcome:
    return collect(where, autograd.get_gradients(context_id).get)


def _merge(outcomes: list[Outcome]) -> Outcome:
    gradients = {name: gradient for outcome in outcomes for name, gradient in outcome.gradients.items()}
    return Outcome(gradients, sorted(seen for outcome in outcomes for seen in outcome.hooks))


# --- the comparison ---


def check(program: Program, mixed: bool = False) -> None:
    """Raise AssertionError, with what differs, unless the program leaves the same both ways."""
    expected = in_one_process(program, mixed)
    if program.threads == 1:
        outcomes = [distributed(program, mixed)]
    else:
        with ThreadPoolExecutor(program.threads) as pool:
            outcomes = [
                done.result() for done in [pool.submit(distributed, program, mixed) for _ in range(program.threads)]
            ]
    for outcome in outcomes:
        difference = differences(outcome, expected)
        assert not difference, "distributed and in one process differ:\n" + "\n".join(difference)
    await_empty(program.workers)


def differences(ours: Outcome, theirs: Outcome) -> list[str]:
    """In words."""
    found = [
        f"gradient of {name}: {ours.gradients[name]} distributed, {expected} in one process"
        for name, expected in theirs.gradients.items()
        if not _close(ours.gradients[name], expected)
    ]
    if [name for name, _ in ours.hooks] != [name for name, _ in theirs.hooks]:
        return [*found, f"hooks: {ours.hooks} distributed, {theirs.hooks} in one process"]
    for (name, seen), (_, expected) in zip(ours.hooks, theirs.hooks, strict=True):
        if not _close(seen, expected):
            found.append(f"{name} saw {seen} distributed, {expected} in one process")
    return found


def _close(one: list[float] | None, other: list[float] | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(abs(x - y) <= 1e-5 * max(1e-3, abs(x), abs(y)) for x, y in zip(one, other, strict=True))


def await_empty(workers: int, seconds: float = 60.0) -> None:
    """Wait until no worker has a context any more."""
    deadline = time.monotonic() + seconds
    for worker in range(workers):
        while left := rpc.rpc_sync(f"worker{worker}", contexts_left):
            assert time.monotonic() < deadline, f"worker {worker} still has {left}"
            time.sleep(0.001)


def contexts_left() -> list[str]:
    return [repr(context) for context in registry().contexts()]
