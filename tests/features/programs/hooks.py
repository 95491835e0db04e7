"""Hooks of all kinds, on either side. What they saw is compared, too."""

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from tests.features.table import program, refused
from tests.features.world import STATE, call, call_on, data, given, keep, leaf, log, module, param


def once(name: str) -> bool:
    """Whether this is the first call of the program's function."""
    if name in STATE.kept:
        return False
    keep(name, True)
    return True


def multi_on_leaves(x: Tensor) -> Tensor:
    w, v = param("w", 2), param("v", 2)
    if once("registered"):
        register_multi_grad_hook((w, v), lambda grads: log("multi", list(grads)))
    return x * w + v


@program
def multi_grad_hook_on_leaves() -> Any:
    return call(multi_on_leaves, leaf(2))


@program
def multi_grad_hook_on_leaves_of_two_calls() -> Any:
    x = leaf(2)
    return call(multi_on_leaves, x) * call(multi_on_leaves, x * 2)


@program
def multi_grad_hook_on_leaves_of_nested_calls() -> Any:
    x = leaf(2)
    return call(multi_on_leaves, call(multi_on_leaves, x))


def multi_on_one_leaf(x: Tensor) -> Tensor:
    w = param("w", 2)
    if once("registered"):
        register_multi_grad_hook((w,), lambda grads: log("multi", list(grads)))
    return x * w


@program
def multi_grad_hook_on_one_leaf_of_two_calls() -> Any:
    x = leaf(2)
    return call(multi_on_one_leaf, x) + call(multi_on_one_leaf, x.sin())


def multi_on_inner(x: Tensor) -> Tensor:
    w = param("w", 2)
    y = x * w
    z = y.sin()
    register_multi_grad_hook((y, z), lambda grads: log("multi", list(grads)))
    return z * 2


@program
def multi_grad_hook_on_inner_tensors() -> Any:
    return call(multi_on_inner, leaf(2))


@program
def multi_grad_hook_on_inner_tensors_of_two_calls() -> Any:
    x = leaf(2)
    return call(multi_on_inner, x), call(multi_on_inner, x * 2)


def multi_on_both(x: Tensor) -> Tensor:
    w = param("w", 2)
    y = x * w
    register_multi_grad_hook((w, y), lambda grads: log("multi", list(grads)))
    return y * 2


@program
def multi_grad_hook_on_a_leaf_and_an_inner_tensor() -> Any:
    return call(multi_on_both, leaf(2))


@refused(RuntimeError, "This worker's part of the pass runs in several.*Register the hook on leaves alone")
def multi_grad_hook_on_a_leaf_and_an_inner_tensor_of_two_calls() -> Any:
    x = leaf(2)
    return call(multi_on_both, x), call(multi_on_both, x * 2)


def multi_any(x: Tensor) -> Tensor:
    w, v = param("w", 2), param("v", 2)
    if once("registered"):
        register_multi_grad_hook((w, v), lambda grad: log("any", "fired"), mode="any")
    return x * w + v


@program
def multi_grad_hook_of_any() -> Any:
    return call(multi_any, leaf(2))


@program
def multi_grad_hook_of_any_of_two_calls() -> Any:
    x = leaf(2)
    return call(multi_any, x) * call(multi_any, x)


def tensor_hooks(x: Tensor) -> Tensor:
    x = x * 1  # a hook on the argument itself would be on the caller's tensor in one process
    y = x * param("w", 2)
    y.register_hook(lambda g: log("seen", g))
    y.register_hook(lambda g: g * 2)
    x.register_hook(lambda g: log("received", g))
    return y.sin()


@program
def hooks_on_tensors_there() -> Any:
    return call(tensor_hooks, leaf(2))


@program
def hooks_on_tensors_here() -> Any:
    x = leaf(2)
    y = x * 2
    y.register_hook(lambda g: log("sent", g))
    z = call(tensor_hooks, y)
    z.register_hook(lambda g: log("returned", g))
    z.register_hook(lambda g: g / 2)
    return z * x


@program
def hooks_on_a_leaf_here() -> Any:
    x = leaf(2)
    x.register_hook(lambda g: log("leaf", g))
    x.register_hook(lambda g: g * 3)
    return call(tensor_hooks, x) + call(tensor_hooks, x * 2)


@program
def post_accumulate_hook_here() -> Any:
    x = leaf(2)
    x.register_post_accumulate_grad_hook(lambda p: log("accumulated", p.grad))
    return call(tensor_hooks, x) * call(tensor_hooks, x)


def leaf_hooks(x: Tensor) -> Tensor:
    w = param("w", 2)
    if once("registered"):
        w.register_hook(lambda g: log("leaf", g))
        w.register_hook(lambda g: g * 2)
        w.register_post_accumulate_grad_hook(lambda p: log("accumulated", p.grad))
    return x * w


@program
def hooks_on_a_leaf_there() -> Any:
    return call(leaf_hooks, leaf(2))


@program
def hooks_on_a_leaf_of_several_calls() -> Any:
    x = leaf(2)
    return call(leaf_hooks, x) * call(leaf_hooks, x * 2) + call(leaf_hooks, x * 3)


@program
def hooks_on_a_leaf_of_a_chain() -> Any:
    return call(leaf_hooks, call(leaf_hooks, call(leaf_hooks, leaf(2))))


def node_hooks(x: Tensor) -> Tensor:
    y = (x * param("w", 2)).sin()
    y.grad_fn.register_hook(lambda into, out: log("after", [list(into), list(out)]))
    y.grad_fn.register_prehook(lambda out: log("before", list(out)))
    y.grad_fn.register_prehook(lambda out: (out[0] * 2,))
    return y


@program
def hooks_on_nodes_there() -> Any:
    return call(node_hooks, leaf(2))


@program
def hooks_on_nodes_here() -> Any:
    return node_hooks(call(node_hooks_named, leaf(2)))


def node_hooks_named(x: Tensor) -> Tensor:
    y = x.cos()
    y.grad_fn.register_hook(lambda into, out: log("there", [list(into), list(out)]))
    return y


def module_hooks(x: Tensor) -> Tensor:
    layer = module("hooked", lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    if once("registered"):
        layer.register_forward_pre_hook(lambda m, args: log("pre", list(args)))
        layer.register_forward_hook(lambda m, args, out: log("forward", out))
        layer[0].register_forward_hook(lambda m, args, out: out * 2)
        layer.register_full_backward_hook(lambda m, into, out: log("backward", [list(into), list(out)]))
        layer.register_full_backward_pre_hook(lambda m, out: log("backward pre", list(out)))
        layer[0].register_full_backward_hook(lambda m, into, out: (into[0] * 3,))
    return layer(x)


@program
def hooks_on_a_module() -> Any:
    return call(module_hooks, leaf(3, 2))


@program
def hooks_on_a_module_of_two_calls() -> Any:
    x = leaf(3, 2)
    return call(module_hooks, x) * call(module_hooks, x * 2)


def removed_hooks(x: Tensor) -> Tensor:
    w = param("w", 2)
    w.register_hook(lambda g: log("never", g)).remove()
    y = x * w
    y.register_hook(lambda g: log("never", g)).remove()
    return y


@program
def hooks_that_were_removed() -> Any:
    return call(removed_hooks, leaf(2))


def clipping(x: Tensor) -> Tensor:
    w = param("w", 2)
    if once("registered"):
        w.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return (x * w).exp()


@program
def a_hook_that_clips() -> Any:
    return call(clipping, leaf(2)) * 3


def nested_hooks(x: Tensor) -> Tensor:
    x.register_hook(lambda g: log("first", g))
    y = call_on("worker2", node_hooks_named, x * param("w", 2))
    y.register_hook(lambda g: log("second", g))
    return y * 2


@program
def hooks_along_a_chain_of_workers() -> Any:
    return call(nested_hooks, leaf(2))


def global_module_hook(x: Tensor) -> Tensor:
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: out * 2)
    try:
        return module("plain", lambda: nn.Linear(2, 2))(x)
    finally:
        handle.remove()


@program
def a_hook_on_all_modules() -> Any:
    return call(global_module_hook, leaf(3, 2))


# A leaf that one call sends and nobody observes gets its gradient without torch's engine; one that somebody does, not.


def doubled(x: Tensor) -> Tensor:
    return x * 2


def node_of(x: Tensor) -> Any:
    return x.view_as(x).grad_fn.next_functions[0][0]


@program
def a_leaf_that_nobody_observes() -> Any:
    return call(doubled, leaf(2, 3))


@program
def a_leaf_that_is_not_contiguous() -> Any:
    return call(doubled, given(data(3, 2).t().requires_grad_()))


@program
def a_leaf_whose_gradient_is_not_contiguous() -> Any:
    return call(doubled, leaf(3, 2)).t().sin()


@program
def a_leaf_with_a_tensor_hook() -> Any:
    x = leaf(2)
    x.register_hook(lambda g: log("leaf", g))
    x.register_hook(lambda g: g * 3)
    return call(doubled, x)


@program
def a_leaf_with_a_tensor_hook_that_was_registered_after_the_call() -> Any:
    x = leaf(2)
    y = call(doubled, x)
    x.register_hook(lambda g: g * 3)
    return y


@program
def a_leaf_with_a_post_accumulate_hook() -> Any:
    x = leaf(2)
    x.register_post_accumulate_grad_hook(lambda p: log("accumulated", p.grad))
    return call(doubled, x)


@program
def a_leaf_whose_node_has_a_hook() -> Any:
    x = leaf(2)
    node = keep("node", node_of(x))
    node.register_hook(lambda into, out: log("after", list(out)))
    return call(doubled, x)


@program
def a_leaf_whose_node_has_a_hook_and_is_held_by_the_call_alone() -> Any:
    x = leaf(2)
    y = call(doubled, x)
    node_of(x).register_hook(lambda into, out: log("after", list(out)))
    return y


@program
def a_leaf_whose_node_has_a_prehook_and_is_held_by_the_call_alone() -> Any:
    x = leaf(2)
    y = call(doubled, x)
    node_of(x).register_prehook(lambda out: (out[0] * 5,))
    return y


@program
def a_leaf_that_is_in_another_graph() -> Any:
    x = leaf(2)
    keep("graph", x * 3)
    return call(doubled, x)


def sum_of(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@program
def two_leaves_that_have_one_gradient() -> Any:
    return call(sum_of, leaf(2), leaf(2))


@program
def two_leaves_of_which_one_has_a_hook() -> Any:
    x, y = leaf(2), leaf(2)
    y.register_hook(lambda g: g * 3)
    return call(sum_of, x, y).sin()
