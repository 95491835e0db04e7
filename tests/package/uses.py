"""Right and wrong uses of the public names, for type checkers to read; nothing here is executed.

A line that ends in `# wrong` must be reported by each checker, and no other line may be.
"""

# mypy: disable-error-code="unused-awaitable"
from typing import Any, assert_type

import torch
from torch import Tensor, nn

import telegrad
from telegrad import autograd, rpc
from telegrad.nn import RemoteModule


def add(a: int, b: int = 1) -> int:
    return a + b


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


async def later(text: str) -> bytes:
    return text.encode()


@rpc.functions.async_execution
def soon(a: int) -> rpc.Future[str]:
    return rpc.Future()


def nothing() -> None:
    return None


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def count(self, by: int = 1) -> int:
        self.value += by
        return self.value


x = torch.ones(2, 2)
anything: Any = add
some: tuple[Any, ...] = (1, 2)

# calls have the type of what the function returns
assert_type(rpc.rpc_sync("worker1", add, (1, 2)), int)
assert_type(rpc.rpc_sync("worker1", add, (1,)), int)
assert_type(rpc.rpc_sync(1, add, args=[1, 2]), int)
assert_type(rpc.rpc_sync("worker1", add, kwargs={"a": 1}), int)
assert_type(rpc.rpc_sync("worker1", add, args=(1,), kwargs={"b": 1}, timeout=3), int)
assert_type(rpc.rpc_sync("worker1", product, (x, x), timeout=3.0, retries=2), Tensor)
assert_type(rpc.rpc_sync("worker1", torch.add, (x, 1)), Tensor)
assert_type(rpc.rpc_sync("worker1", torch.mm, (x, x)), Tensor)
assert_type(rpc.rpc_sync("worker1", later, ("a",)), bytes)
assert_type(rpc.rpc_sync("worker1", nn.Linear, (2, 2)), nn.Linear)
assert_type(rpc.rpc_sync("worker1", soon, (1,)), str)
rpc.rpc_sync("worker1", soon, ("a",))  # wrong
rpc.rpc_sync("worker1", nothing)
rpc.rpc_sync("worker1", anything, some)
assert_type(rpc.rpc_async("worker1", add, (1, 2)), rpc.Future[int])
assert_type(rpc.rpc_async("worker1", later, ("a",)), rpc.Future[bytes])
assert_type(rpc.rpc_async("worker1", add, (1, 2)).wait(), int)
assert_type(rpc.rpc_async("worker1", add, (1, 2)).then(lambda f: str(f.wait())), rpc.Future[str])
assert_type(rpc.remote("worker1", Counter, (3,)), rpc.RRef[Counter])
assert_type(rpc.remote("worker1", Counter, (3,)).to_here(), Counter)


async def awaiting() -> None:
    assert_type(await rpc.rpc_async("worker1", product, (x, x)), Tensor)


# and check the arguments
rpc.rpc_sync("worker1", add, ("one",))  # wrong
rpc.rpc_sync("worker1", add, (1, 2, 3))  # wrong
rpc.rpc_sync("worker1", product, (x,))  # wrong
rpc.rpc_sync("worker1", product)  # wrong
rpc.rpc_sync("worker1", 3)  # wrong
rpc.rpc_sync("worker1", add, 1)  # wrong
rpc.rpc_async("worker1", later, (b"a",))  # wrong
rpc.remote("worker1", Counter, ("three",))  # wrong
rpc.rpc_sync(None, add, (1,))  # wrong

# methods of a value that lives elsewhere
counter = rpc.remote("worker1", Counter, (3,))
assert_type(counter.rpc_sync().count(2), int)
assert_type(counter.rpc_async().count(2), rpc.Future[Any])
assert_type(counter.remote().count(2), rpc.RRef[Any])
counter.rpc_sync().count("two")  # wrong
counter.rpc_sync().no_such_method()  # wrong

# the rest of what a training script uses
with telegrad.local_cluster(workers=2), autograd.context() as context_id:
    assert_type(context_id, int)
    autograd.backward(context_id, [x.sum()])
    autograd.backward(context_id, x.sum())  # wrong
    assert_type(autograd.get_gradients(context_id), dict[Tensor, Tensor])
    module = RemoteModule("worker1", nn.Linear, (2, 2))
with telegrad.local_cluster(workers="two"):  # wrong
    pass

# names that do not exist
rpc.no_such_name()  # wrong
autograd.no_such_name()  # wrong
telegrad.no_such_name()  # wrong
telegrad.observe.no_such_name()  # wrong
