"""A model of local and remote modules is read, written, saved and restored as one."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import autograd, rpc
from telegrad.nn import (
    RemoteModule,
    checkpoint,
    load_state_dict,
    named_remote_parameters,
    remote_parameters,
    restore,
    save,
    state_dict,
)
from tests.training_cluster import Stack, cluster, layer, local_model, loss_of

pytestmark = pytest.mark.slow
needs_safetensors = pytest.mark.skipif(not importlib.util.find_spec("safetensors"), reason="safetensors is optional")
MIXED = ("ps0", None, "ps1")


@pytest.fixture(scope="module", autouse=True)
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster(tmp_path_factory.mktemp("job"), ("ps0", "ps1")):
        yield


def blank(model: nn.Module) -> nn.Module:
    """The model with all parameters zero."""
    load_state_dict(model, {key: torch.zeros_like(value) for key, value in state_dict(model).items()})
    return model


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


def test_state_is_that_of_one_process() -> None:
    mixed, whole = Stack(MIXED), local_model()
    assert_same(state_dict(mixed), whole.state_dict())
    assert state_dict(mixed)._metadata == whole.state_dict()._metadata
    assert_same(mixed.state_dict(), whole.state_dict())
    assert mixed.state_dict()._metadata == whole.state_dict()._metadata


def form_of(module: Any) -> list[tuple[str, bool, bool, bool]]:
    """On the owner: dtype, whether it is trained, whether it has a gradient, the mode."""
    found = module.local_value()
    return [(str(p.dtype), p.requires_grad, p.grad is not None, found.training) for p in found.parameters()]


def give_grad(module: Any) -> None:
    for param in module.local_value().parameters():
        param.grad = torch.ones_like(param)


def forms(model: nn.Module) -> list[list[tuple[str, bool, bool, bool]]]:
    remote = [module for module in model.modules() if isinstance(module, RemoteModule)]
    return [rpc.rpc_sync(each.on, form_of, (each.get_module_rref(),)) for each in remote]


def test_what_is_done_to_a_model_reaches_its_remote_modules() -> None:
    model = nn.Sequential(Stack(MIXED), nn.Linear(3, 3))
    remote = [module for module in model.modules() if isinstance(module, RemoteModule)]
    assert len(remote) == 2
    for each in remote:
        rpc.rpc_sync(each.on, give_grad, (each.get_module_rref(),))
    assert all(form == ("torch.float32", True, True, True) for forms_ in forms(model) for form in forms_)
    model.zero_grad()
    model.requires_grad_(False)
    model.eval()
    assert all(form == ("torch.float32", False, False, False) for forms_ in forms(model) for form in forms_)
    assert model.to("cpu") is model
    model.to(torch.float64)
    model.train()
    model.requires_grad_(True)
    assert all(form == ("torch.float64", True, False, True) for forms_ in forms(model) for form in forms_)
    model.half()
    assert all(form == ("torch.float16", True, False, True) for forms_ in forms(model) for form in forms_)


def test_a_frozen_model_has_no_gradients_anywhere() -> None:
    model = Stack(MIXED).requires_grad_(False)
    x = torch.ones(2, 6, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [model(x).sum()])
        assert set(autograd.get_gradients(context_id)) == {x}
        assert not autograd.get_gradients(context_id, "ps0")
        assert not autograd.get_gradients(context_id, "ps1")


def test_parameters_are_listed_as_in_one_process() -> None:
    mixed = Stack(MIXED)
    assert [name for name, _ in named_remote_parameters(mixed)] == [
        name for name, _ in local_model().named_parameters()
    ]
    owners = [param.owner_name() for param in remote_parameters(mixed)]
    assert owners == ["ps0", "ps0", "trainer", "trainer", "ps1", "ps1"]
    alone = RemoteModule("ps0", layer, (0, 2, 2))
    assert [name for name, _ in named_remote_parameters(alone)] == ["weight", "bias"]
    assert [name for name, _ in mixed.named_parameters()] == ["layers.1.weight", "layers.1.bias"]


def test_what_is_shared_is_listed_once() -> None:
    module = RemoteModule("ps0", layer, (0, 2, 2))
    again = RemoteModule.init_from_module_rref("ps0", module.get_module_rref())
    here = layer(1, 2, 2)
    model = nn.ModuleList([module, again, module, here, here])
    assert [name for name, _ in named_remote_parameters(model)] == ["0.weight", "0.bias", "3.weight", "3.bias"]


@pytest.mark.parametrize("load", [load_state_dict, nn.Module.load_state_dict], ids=["at once", "one by one"])
def test_a_state_of_one_process_loads_everywhere(load: Any) -> None:
    mixed, whole = blank(Stack(MIXED)), local_model()
    assert not load(mixed, whole.state_dict()).missing_keys
    assert torch.equal(loss_of(mixed, 0), loss_of(whole, 0))


@pytest.mark.parametrize("load", [load_state_dict, nn.Module.load_state_dict], ids=["at once", "one by one"])
def test_what_does_not_fit_is_named_with_torchs_words(load: Any) -> None:
    mixed = Stack(MIXED)
    state = state_dict(mixed)
    del state["layers.0.bias"]
    state["layers.2.more"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"layers.0.bias"') as raised:
        load(mixed, state)
    assert 'Unexpected key(s) in state_dict: "layers.2.more"' in str(raised.value)
    found = load(mixed, state, strict=False)
    assert found.missing_keys == ["layers.0.bias"]
    assert found.unexpected_keys == ["layers.2.more"]

    state["layers.2.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"(?s)on worker 'ps1'.*size mismatch for weight"):
        load(mixed, state, strict=False)


def test_a_state_is_a_copy() -> None:
    for place in ("ps0", "trainer"):
        module = RemoteModule(place, layer, (0, 2, 2))
        state = module.state_dict()
        state["weight"].zero_()
        assert module.state_dict()["weight"].any()
    with pytest.raises(ValueError, match="cannot keep_vars"):
        module.state_dict(keep_vars=True)


def test_each_owner_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([RemoteModule(place, layer, (seed, 2, 2)) for seed, place in enumerate(["ps0", "ps1"] * 3)])
    asked: list[Any] = []

    def counted(original: Any) -> Any:
        def call(to: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append(to)
            return original(to, *args, **kwargs)

        return call

    for name in ("rpc_async", "rpc_sync"):
        monkeypatch.setattr(rpc, name, counted(getattr(rpc, name)))
    state = state_dict(model)
    assert sorted(asked) == ["ps0", "ps1"]
    remote_parameters(model)
    assert sorted(asked) == ["ps0", "ps0", "ps1", "ps1"]
    load_state_dict(model, state)
    assert sorted(asked) == ["ps0", "ps0", "ps0", "ps1", "ps1", "ps1"]


class Outer(nn.Module):
    """A module that itself keeps a part on a third worker."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.near = layer(1, 2, 2)
        self.far = RemoteModule(place, layer, (2, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.far(self.near(x))


def test_remote_modules_nest() -> None:
    module = RemoteModule("ps0", Outer, ("ps1",))
    state = module.state_dict()
    assert list(state) == ["near.weight", "near.bias", "far.weight", "far.bias"]
    x = torch.ones(2)
    expected = module(x)
    blank(module)
    assert torch.equal(module(x), torch.zeros(2))
    load_state_dict(module, state)
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("name", ["model.pt", pytest.param("model.safetensors", marks=needs_safetensors)])
def test_saved_and_restored(tmp_path: Path, name: str) -> None:
    mixed = Stack(MIXED)
    save(mixed, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    restored = blank(Stack(["ps1", "ps0", None]))  # Elsewhere than it was.
    restore(restored, tmp_path / name)
    assert_same(state_dict(restored), local_model().state_dict())
    whole = local_model()
    nn.init.zeros_(whole.layers[0].weight)
    restore(whole, tmp_path / name)  # And in one process.
    assert_same(whole.state_dict(), local_model().state_dict())


def test_a_save_that_fails_keeps_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    save(Stack(MIXED), path)
    before = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        save(blank(Stack(MIXED)), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_safetensors_missing_is_said_before_anything_is_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None in its place makes an import fail as if the package were not there.
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"'model.safetensors' asks for safetensors form.*use another suffix"):
        save(Stack(MIXED), tmp_path / "model.safetensors")


class Extra(nn.Linear):
    """Has state that is not a tensor."""

    def get_extra_state(self) -> str:
        return "more"

    def set_extra_state(self, state: str) -> None:
        assert state == "more"


@needs_safetensors
def test_what_is_not_a_tensor_needs_torchs_form(tmp_path: Path) -> None:
    module = RemoteModule("ps0", Extra, (2, 2))
    with pytest.raises(TypeError, match=r"cannot hold \['_extra_state'\]"):
        save(module, tmp_path / "model.safetensors")
    save(module, tmp_path / "model.pt")
    restore(module, tmp_path / "model.pt")
