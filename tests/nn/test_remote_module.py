"""What a RemoteModule does and refuses, on real workers."""

import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import autograd, rpc
from telegrad.errors import NotInitialized
from telegrad.nn import RemoteModule, remote_module
from telegrad.nn.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES, _RemoteModule
from telegrad.nn.unsupported import NOT_SUPPORTED
from tests.training_cluster import Stack, cluster, layer
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


class Noted(nn.Module):
    """Answers with what it was called with, and how often; its dropout tells its mode."""

    def __init__(self, scale: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(scale))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.inner = nn.Linear(2, 2)
        self.offset = offset

    def forward(self, x: torch.Tensor, number: int = 0, word: str = "default") -> tuple[torch.Tensor, int, str, bool]:
        self.calls += 1
        return x * self.weight + self.offset, number, word, self.training


@pytest.fixture(scope="module", autouse=True)
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster(tmp_path_factory.mktemp("job"), ("ps0", "ps1")):
        yield


@pytest.mark.parametrize("place", ["ps0", "ps0/cpu", "rank:1/cpu", "rank:1", "cpu", "trainer"])
def test_it_is_called_like_a_module(place: str) -> None:
    module = RemoteModule(place, Noted, args=(2.0,), kwargs={"offset": 1.0})
    value, *rest = module(torch.ones(3), 4, word="five")
    assert torch.equal(value, torch.full((3,), 3.0))
    assert rest == [4, "five", True]
    value, *rest = module.forward_async(torch.ones(3), number=6).wait()
    assert torch.equal(value, torch.full((3,), 3.0))
    assert rest == [6, "default", True]
    assert module.state_dict()["calls"] == 2


def test_gradients_flow_through_it() -> None:
    module = RemoteModule("ps0", Noted, (2.0,))
    [weight, *_] = module.remote_parameters()
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [module(x)[0].sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.tensor([2.0, 2.0]))
        assert rpc.rpc_sync("ps0", gradient_of, (context_id, weight)) == 3.0


def gradient_of(context_id: int, param: Any) -> float:
    return float(autograd.get_gradients(context_id)[param.local_value()])


def test_parameters_are_named_and_may_be_those_of_the_top_only() -> None:
    module = RemoteModule("ps1", Noted, (2.0,))
    named = module.named_remote_parameters(prefix="noted")
    assert [name for name, _ in named] == ["noted.weight", "noted.inner.weight", "noted.inner.bias"]
    assert {param.owner_name() for _, param in named} == {"ps1"}
    [top] = module.remote_parameters(recurse=False)
    assert top.to_here() == 2.0


def test_its_mode_is_the_owners() -> None:
    module = RemoteModule("ps0", Noted, (1.0,))
    x = torch.ones(1)
    assert module.eval() is module
    assert module(x)[3] is False
    assert module.train()(x)[3] is True
    assert module.train(False)(x)[3] is False
    model = nn.ModuleList([module, nn.Dropout()])
    model.train()
    assert module(x)[3] is True


def test_several_share_one_module() -> None:
    module = RemoteModule("ps0", Noted, (1.0,))
    again = RemoteModule.init_from_module_rref("ps0", module.get_module_rref())
    again(torch.ones(1))
    module(torch.ones(1))
    assert module.state_dict()["calls"] == 2


def call_it(module: RemoteModule, x: torch.Tensor) -> tuple[Any, ...]:
    """On a third worker: call what was received, as a module and by its methods."""
    values = [module(x)[0], module.forward(x)[0], module.forward_async(x).wait()[0]]
    nested = nn.Sequential(nn.Identity())
    nested.append(module)
    return values, list(nested.state_dict()), repr(module), list(nested.parameters())


def attributes_of(module: RemoteModule) -> list[str]:
    return list(module.__dict__)


def test_it_can_be_sent_to_another_worker() -> None:
    module = RemoteModule("ps0", Noted, (2.0,))
    values, keys, text, local_params = rpc.rpc_sync("ps1", call_it, (module, torch.ones(1)))
    assert values == [torch.tensor([2.0])] * 3
    assert keys == ["1.weight", "1.calls", "1.inner.weight", "1.inner.bias"]
    assert text == "RemoteModule(on='ps0', device='cpu')"
    assert local_params == []
    module.extra = 1
    assert rpc.rpc_sync("ps1", attributes_of, (module,)) == [
        *_REMOTE_MODULE_PICKLED_ATTRIBUTES,
        "forward_async",
        "forward",
    ]


def made_there() -> RemoteModule:
    return RemoteModule("ps0", Noted, (3.0,))


def test_it_can_be_a_result() -> None:
    assert rpc.rpc_sync("ps1", made_there)(torch.ones(1))[0] == 3.0


def test_it_cannot_be_pickled_outside_a_call(tmp_path: Any) -> None:
    module = RemoteModule("ps0", Noted, (2.0,))
    with pytest.raises(RuntimeError, match=r"Cannot pickle RemoteModule in python pickler\. RemoteModule can"):
        torch.save(module, tmp_path / "module.pt")
    with pytest.raises(RuntimeError, match=r"Cannot pickle RemoteModule in python pickler\. RemoteModule can"):
        pickle.dumps(module)


def test_it_makes_no_cycle_that_would_hold_the_owners_module() -> None:
    module = RemoteModule("ps0", Noted, (2.0,))
    module(torch.ones(1))
    held = weakref.ref(module)
    gc.disable()
    try:
        del module
        wait_until(lambda: held() is None)  # without the collector
    finally:
        gc.enable()


@pytest.mark.parametrize("name", [*NOT_SUPPORTED, "named_modules"])
def test_what_it_cannot_do_it_refuses(name: str) -> None:
    module = RemoteModule("ps0", Noted, (2.0,))
    with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
        getattr(module, name)()


def test_it_is_frozen_on_its_owner() -> None:
    module = RemoteModule("ps0", Noted, (2.0,))
    assert module.requires_grad_(False) is module
    assert not any(rpc.rpc_sync("ps0", requires_grad_of, (param,)) for param in module.remote_parameters())
    module.requires_grad_()
    assert all(rpc.rpc_sync("ps0", requires_grad_of, (param,)) for param in module.remote_parameters())


def requires_grad_of(param: Any) -> bool:
    return bool(param.local_value().requires_grad)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            (nn.Linear(1, 2),),
            "class of the module that its owner makes, and got an object of Linear; write for instance",
        ),
        (("nn.Linear",), "and got 'nn.Linear'"),
        ((nn.Linear, "12"), r"args must be a tuple or a list, got '12'; for one argument write args=\(x,\)"),
    ],
    ids=["module", "text", "arguments"],
)
def test_what_makes_no_module_is_refused_at_once(given: tuple[Any, ...], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        RemoteModule("ps0", *given)


def test_it_cannot_be_scripted() -> None:
    model = Stack(["ps0", None, "ps1"])
    with pytest.raises(TypeError, match=r"cannot be compiled by torch\.jit\.script"):
        torch.jit.script(model.layers[0])


class NotAModule:
    """Not a torch module."""


def test_what_is_not_a_module_is_refused_with_torchs_words() -> None:
    with pytest.raises(
        ValueError, match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of <class nn.Mod"
    ):
        RemoteModule("ps0", NotAModule).forward()


@pytest.mark.parametrize(
    ("place", "error", "text"),
    [
        ("ps0/foo", RuntimeError, "Expected one of .+ device type at start of device string"),
        ("ps0/cpu2", RuntimeError, "Invalid device string: 'cpu2'"),
        ("ps0/", RuntimeError, "Device string must not be empty"),
        ("ps0/cuda:0/cuda:1", ValueError, "Could not parse remote_device: ps0/cuda:0/cuda:1. The valid format is"),
        ("/cuda:0", ValueError, "Could not parse remote_device: /cuda:0. The valid format is"),
    ],
)
def test_a_place_that_cannot_be_is_refused(place: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        RemoteModule(place, Noted, (1.0,))


def scripted(scale: float) -> nn.Module:
    return torch.jit.script(nn.Linear(2, 2)) if scale else nn.Identity()


def test_an_interface_class_does_not_keep_python_from_calling() -> None:
    module = _RemoteModule("ps0", scripted, (1.0,), _module_interface_cls=object)
    assert module(torch.ones(2)).shape == (2,)
    assert not module.is_scriptable


def test_owner_of_a_module_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="ps1"):
        RemoteModule("ps1", layer, (0, 2, 2))(torch.ones(5))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_its_owner_has_not_is_named() -> None:
    module = RemoteModule("ps1/cuda:0", nn.Linear, (2, 2))
    with pytest.raises(AssertionError, match="not compiled with CUDA") as caught:
        module(torch.ones(1, 2))
    assert "in bringing Linear to 'cuda:0' on worker 'ps1'" in "\n".join(caught.value.__notes__)


def test_it_needs_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "current_agent", lambda: None)
    with pytest.raises(NotInitialized, match="RemoteModule only works in RPC"):
        RemoteModule("ps0", Noted, (1.0,))
