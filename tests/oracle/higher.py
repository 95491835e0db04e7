"""Programs of the oracle taken to a higher order: gradients of gradients, over workers and in one process.

The body of a program's first segment runs; its gradients are taken with a graph, by `grad` at all leaves, or by
`backward`; a penalty is made of them, and so on up to the order; a plain pass ends it.
"""

import time
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad import autograd, rpc
from tests.oracle.interpreter import (
    PASS_TIMEOUT,
    Outcome,
    Where,
    _merge,
    _roots,
    await_empty,
    collect,
    collect_gradients,
    differences,
    run_body,
    state_of,
)
from tests.oracle.program import Body, Call, Embed, Leaf, Parallel, Program, Remote, Step

_runs = count()


class Higher(NamedTuple):
    """A program, the order of the last gradient, and whether the lower ones are taken by `backward`."""

    program: Program
    order: int = 2
    by_backward: bool = False


def dense_only(body: Body) -> Body:
    """The same without embeddings: torch has no second derivative of a sparse gradient."""
    return tuple([_dense_step(step) for step in body])


def _dense_step(step: Step) -> Step:
    match step:
        case Embed():
            return Leaf(0)
        case Call() | Remote():
            return step._replace(body=dense_only(step.body))
        case Parallel(calls):
            return Parallel(tuple([call._replace(body=dense_only(call.body)) for call in calls]))
    return step


def penalty_of(gradients: list[Any]) -> Tensor | None:
    """A scalar that depends on all of them; None if none has a graph."""
    terms = [(gradient * gradient).sum() for gradient in gradients if gradient is not None and gradient.requires_grad]
    return torch.stack(terms).sum() if terms else None


# --- in one process ---


def in_one_process(higher: Higher) -> Outcome:
    program = higher.program
    where = Where(f"one process, higher {next(_runs)}", 0, False, True, program.leaf_hooks)
    segment = program.segments[0]
    values = run_body(where._replace(path="0"), dense_only(segment.body), [], [])
    roots, starts = _roots(values, segment.roots, segment.grad_tensors)
    owned = [state_of(where._replace(worker=worker)).leaves for worker in range(program.workers)]
    leaves = [leaf for each in owned for leaf in each.values()]
    totals: dict[Tensor, Tensor] = {}
    for _ in range(1, higher.order):
        if not roots:
            break
        if higher.by_backward:
            torch.autograd.backward(roots, starts, create_graph=True)
            _put_aside(leaves, totals)
            gradients: list[Any] = [totals.get(leaf) for leaf in leaves]
        else:
            gradients = list(torch.autograd.grad(roots, leaves, starts, create_graph=True, allow_unused=True))
        penalty = penalty_of(gradients)
        roots, starts = ([], []) if penalty is None else ([penalty], [None])
    if roots:
        torch.autograd.backward(roots, starts)
        _put_aside(leaves, totals)
    return _merge([collect(where._replace(worker=worker), totals.get) for worker in range(program.workers)])


def _put_aside(leaves: list[Tensor], totals: dict[Tensor, Tensor]) -> None:
    """A context's gradients are apart from `.grad`, pass by pass."""
    for leaf in leaves:
        if leaf.grad is not None:
            grad, leaf.grad = leaf.grad, None
            totals[leaf] = totals[leaf] + grad if leaf in totals else grad


# --- over workers ---


def leaf_names(where: Where) -> list[str]:
    return list(state_of(where).leaves)


def leaf_of(where: Where, name: str) -> Tensor:
    return state_of(where).leaves[name]


def gradients_here(where: Where, context_id: int) -> list[Tensor]:
    found = autograd.get_gradients(context_id)
    return [found[leaf] for leaf in state_of(where).leaves.values() if leaf in found]


def distributed(higher: Higher) -> Outcome:
    program = higher.program
    where = Where(f"distributed, higher {time.monotonic_ns()} {next(_runs)}", 0, True, True, program.leaf_hooks)
    segment = program.segments[0]
    places = [where._replace(worker=worker) for worker in range(program.workers)]
    with autograd.context() as context_id:
        values = run_body(where._replace(path="0"), dense_only(segment.body), [], [])
        roots, starts = _roots(values, segment.roots, segment.grad_tensors)
        inputs: list[Any] = [] if higher.by_backward else _inputs(places)
        for _ in range(1, higher.order):
            if not roots:
                break
            if higher.by_backward:
                autograd.backward(context_id, roots, grad_tensors=starts, timeout=PASS_TIMEOUT, create_graph=True)
                gradients: list[Any] = [
                    gradient
                    for place in places
                    for gradient in rpc.rpc_sync(f"worker{place.worker}", gradients_here, (place, context_id))
                ]
            else:
                found = autograd.grad(
                    context_id, roots, inputs, starts, create_graph=True, allow_unused=True, timeout=PASS_TIMEOUT
                )
                gradients = [each.to_here() if isinstance(each, rpc.RRef) else each for each in found]
            penalty = penalty_of(gradients)
            roots, starts = ([], []) if penalty is None else ([penalty], [None])
        if roots:
            autograd.backward(context_id, roots, grad_tensors=starts, timeout=PASS_TIMEOUT)
        del values, roots, starts
        collected = [rpc.rpc_sync(f"worker{p.worker}", collect_gradients, (p, context_id)) for p in places]
    return _merge(collected)


def _inputs(places: list[Where]) -> list[Any]:
    inputs: list[Any] = []
    with torch.no_grad():
        for place in places:
            name = f"worker{place.worker}"
            for leaf in rpc.rpc_sync(name, leaf_names, (place,)):
                if place.worker == 0:
                    inputs.append(leaf_of(place, leaf))
                else:
                    inputs.append(rpc.remote(name, leaf_of, (place, leaf)))
    return inputs


def check(higher: Higher) -> None:
    """Raise AssertionError, with what differs, unless the program leaves the same both ways."""
    difference = differences(distributed(higher), in_one_process(higher))
    assert not difference, "distributed and in one process differ:\n" + "\n".join(difference)
    await_empty(higher.program.workers)
