"""Values arrive equal through the payload and the table, and what cannot be sent or rebuilt says why."""

import collections
import dataclasses
import enum
import functools
import gc
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Self

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from telegrad.errors import ProtocolError, SerializationError
from telegrad.wire.codec import Packed, pack, unpack
from telegrad.wire.pickling import unpickler
from telegrad.wire.pickling.pickler import register_reducer
from telegrad.wire.tensor.tensors import describe, rebuild, segment_bytes


def deliver(packed: Packed, **options: Any) -> Any:
    specs, segments = describe(packed.tensors)
    return unpack(packed.payload, rebuild(specs, [bytearray(segment_bytes(s)) for s in segments]), **options)


def trip(value: Any, **options: Any) -> Any:
    return deliver(pack(value, **options))


def is_pickled(value: Any) -> bool:
    return pack(value).payload[0] in (unpickler.PICKLE, unpickler.PICKLE_AND_BUFFERS)


# The forms of what is not pickled, as the first byte of a payload says.
TENSOR, FLAT_CALL, FLAT_TUPLE = (pack(value).payload[0] for value in (torch.ones(1), ((1,), {}), (1,)))


# What is not pickled.


@pytest.mark.parametrize(
    "value",
    [
        None,
        ((), {}),
        (),
        (1,),
        (1, -2.5, "x", b"y", True, None),
        ((1, "a"), {}),
        (2**64 - 1, -(2**63), float("inf")),
        ("",) * 255,
    ],
    ids=str,
)
def test_plain_values_arrive_equal_without_classes(value: Any) -> None:
    arrived = trip(value)
    assert arrived == value
    assert type(arrived) is type(value)
    assert not is_pickled(value)


def test_tensors_among_plain_arguments() -> None:
    x, w = torch.randn(2, 2), nn.Parameter(torch.randn(3))
    (a, one, b, again), kwargs = trip(((x, 1, w, x), {}))
    assert torch.equal(a, x)
    assert one == 1
    assert isinstance(b, nn.Parameter)
    assert again is a
    assert kwargs == {}
    assert len(pack(((x, 1, w, x), {})).tensors) == 2


def test_flat_tuples_of_many_arguments() -> None:
    value = tuple(torch.full((), float(i)) for i in range(254))
    assert [t.item() for t in trip(value)] == list(range(254))
    assert len(trip((*value, 1, 2, 3))) == 257


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value", [(np.float64(1),), (Color.RED,), (1 + 2j,), (2**64,), ("\ud800",), (True,)], ids=ascii
)
def test_near_misses_of_plain_values_keep_their_class(value: tuple[Any, ...]) -> None:
    assert trip(value) == value
    assert type(trip(value)[0]) is type(value[0])


# What is.


@dataclasses.dataclass
class Batch:
    name: str
    inputs: dict[str, Tensor]
    history: list[Any] = dataclasses.field(default_factory=list)


def test_tensors_in_any_nesting() -> None:
    x = torch.randn(3)
    sent = Batch("b", {"x": x, "y": x[1:]}, [(x, {"deep": [x]}), collections.OrderedDict(k=x)])
    arrived = trip({"batch": sent, "again": sent})
    assert arrived["batch"] is arrived["again"]
    batch = arrived["batch"]
    assert torch.equal(batch.inputs["x"], x)
    assert batch.history[0][0] is batch.inputs["x"]
    assert batch.history[0][1]["deep"][0] is batch.inputs["x"]
    batch.inputs["x"].zero_()
    assert not batch.inputs["y"].any()


def test_keyword_arguments() -> None:
    x = torch.randn(2)
    args, kwargs = trip(((x,), {"scale": 2, "other": x}))
    assert kwargs["scale"] == 2
    assert kwargs["other"] is args[0]


def test_no_tensor_bytes_in_the_payload() -> None:
    assert len(pack([torch.zeros(10_000), torch.zeros(10_000).untyped_storage()]).payload) < 500


def test_attributes_of_tensors_arrive() -> None:
    x = torch.randn(2)
    x.label = ["a", x]
    for arrived in (trip(x), trip((x,))[0], trip([x])[0]):
        assert torch.equal(arrived, x)
        assert arrived.label[0] == "a"
        assert arrived.label[1] is arrived


class Labelled(torch.Tensor):
    pass


class TaggedParameter(nn.Parameter):
    pass


class Pair(torch.Tensor):
    """A tensor without memory of its own, in torch's protocol for such classes."""

    left: Tensor
    right: Tensor

    @staticmethod
    def __new__(cls, left: Tensor, right: Tensor) -> Self:
        pair = torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)
        pair.left, pair.right = left, right
        return pair

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["left", "right"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> "Pair":
        return Pair(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def test_subclasses_of_tensor_arrive_as_such() -> None:
    labelled = torch.randn(2).as_subclass(Labelled)
    labelled.label = "a"
    leaf = torch.randn(2).as_subclass(Labelled).requires_grad_()
    tagged = TaggedParameter(torch.randn(2))
    for sent in (labelled, leaf, tagged):
        arrived = trip(sent)
        assert type(arrived) is type(sent)
        assert torch.equal(arrived.detach().as_subclass(Tensor), sent.detach().as_subclass(Tensor))
        assert arrived.requires_grad == sent.requires_grad
        assert arrived.is_leaf
        assert arrived.__dict__ == sent.__dict__


def test_gradients_reach_through_a_sent_subclass() -> None:
    """The table holds what autograd has to attach to, not a detached copy."""
    x = torch.randn(2, requires_grad=True)
    packed = pack([(x * 2).as_subclass(Labelled)])
    torch.autograd.backward(packed.tensors[0].sum())
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_tensors_made_of_tensors_arrive() -> None:
    arrived = trip([Pair(torch.ones(2), torch.zeros(2))])[0]
    assert type(arrived) is Pair
    assert torch.equal(arrived.left, torch.ones(2))


@pytest.mark.slow
def test_jagged_tensors_arrive() -> None:
    sent = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    arrived = trip(sent)
    assert all(torch.equal(a, b) for a, b in zip(arrived.unbind(), sent.unbind(), strict=True))


def test_lazy_modules_arrive_lazy() -> None:
    module = trip(nn.LazyLinear(3))
    assert module(torch.ones(1, 2)).shape == (1, 3)


def test_fake_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(SerializationError, match="FakeTensor cannot be sent: it has no data"):
        pack([fake])


def test_storages_stay_with_their_tensors() -> None:
    x = torch.randn(4)
    by_dtype = torch.storage.TypedStorage(wrap_storage=x.untyped_storage(), dtype=x.dtype, _internal=True)
    tensor, untyped, typed = trip([x, x.untyped_storage(), by_dtype])
    assert untyped.data_ptr() == tensor.data_ptr()
    assert typed.dtype == torch.float32
    assert typed._untyped_storage.data_ptr() == tensor.data_ptr()
    assert untyped.nbytes() == 16


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.decoder = nn.Linear(3, 4, bias=False)
        self.decoder.weight = nn.Parameter(self.encoder.weight.detach().t().contiguous())
        self.again = self.encoder
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(self.encoder(x)))


def test_modules_and_optimizers_arrive_tied_together() -> None:
    module = Tied()
    optimizer = torch.optim.Adam(module.parameters())
    x = torch.randn(5, 4)
    module(x).sum().backward()
    optimizer.step()
    their_module, their_optimizer = trip((module, optimizer))
    assert their_module.again is their_module.encoder
    mine, theirs = list(module.parameters()), list(their_module.parameters())
    assert all(torch.equal(a, b) and isinstance(b, nn.Parameter) for a, b in zip(mine, theirs, strict=True))
    assert all(a is b for a, b in zip(their_optimizer.param_groups[0]["params"], theirs, strict=True))
    assert their_optimizer.state[theirs[0]]["step"] == 1
    for m, o in ((module, optimizer), (their_module, their_optimizer)):
        o.zero_grad()
        m(x).sum().backward()
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), their_module.parameters(), strict=True))


@pytest.mark.parametrize("count", [3, 10_000])
def test_numpy_arrays_arrive_writable_and_out_of_band(count: int) -> None:
    sent: dict[str, Any] = {"a": np.arange(count, dtype=np.float64), "t": torch.ones(2), "b": np.arange(count)}
    frozen = np.arange(count)
    frozen.flags.writeable = False
    packed = pack([sent, frozen])
    assert len(packed.payload) < 1000
    arrived, still_frozen = deliver(packed)
    np.testing.assert_array_equal(arrived["a"], sent["a"])
    np.testing.assert_array_equal(arrived["b"], sent["b"])
    assert torch.equal(arrived["t"], sent["t"])
    arrived["a"][0] = 7
    assert sent["a"][0] == 0
    assert not still_frozen.flags.writeable
    gc.collect()
    np.testing.assert_array_equal(still_frozen, frozen)


# Functions and classes.


def test_functions_by_name_stay_the_same_object() -> None:
    for function in (torch.nn.functional.relu, deliver, len, Batch, "".join, functools.partial(pack, 1)):
        arrived = trip(function)
        if isinstance(function, types.FunctionType | type):
            assert arrived is function
    assert trip(torch.add)(1, 2) == 3


def test_lambdas_closures_and_local_classes() -> None:
    weight = torch.randn(3)

    class Local:
        def __init__(self, value: Any) -> None:
            self.value = value

    def scaled(x: Tensor) -> Tensor:
        return x * weight

    assert trip(lambda x: x + 1)(1) == 2
    packed = pack(scaled)
    assert packed.tensors == [weight]
    assert torch.equal(deliver(packed)(torch.ones(3)), weight)
    local = trip([Local(weight), weight])
    assert local[0].value is local[1]
    assert trip(Batch("b", {}).__repr__)() == "Batch(name='b', inputs={}, history=[])"


@pytest.fixture
def main_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A program as `__main__`, with a class, a function and a global."""
    module = types.ModuleType("__main__")
    source = "factor = 2\nclass Thing:\n    pass\ndef scale(x):\n    return x * factor\nsquare = lambda x: x * x\n"
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


@pytest.mark.parametrize("name", ["scale", "Thing"])
def test_main_goes_by_name_to_the_same_program(main_module: types.ModuleType, name: str) -> None:
    assert trip(getattr(main_module, name)) is getattr(main_module, name)
    assert trip([getattr(main_module, name), lambda: 0])[0] is getattr(main_module, name)


def test_main_by_name_uses_the_receivers_globals(
    main_module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(main_module.scale)
    theirs = types.ModuleType("__main__")
    exec("factor = 5\ndef scale(x):\n    return x * factor\n", theirs.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", theirs)
    assert deliver(packed)(3) == 15


@pytest.mark.parametrize("make", [lambda m: m.scale, lambda m: m.square, lambda m: (m.scale, 1)[0]])
def test_main_by_value_needs_nothing_of_the_receiver(
    main_module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any]
) -> None:
    packed = pack([make(main_module), main_module.Thing()], main_by_value=True)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    function, thing = deliver(packed)
    assert function(3) in (6, 9)
    assert type(thing).__name__ == "Thing"


def test_a_child_process_and_its_parent_mean_the_same_main(
    main_module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__mp_main__", main_module)
    main_module.scale.__module__ = "__mp_main__"
    packed = pack(main_module.scale)
    by_value = pack(main_module.scale, main_by_value=True)
    monkeypatch.delitem(sys.modules, "__mp_main__")
    assert deliver(packed) is main_module.scale
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    assert deliver(by_value)(3) == 6


class Reference:
    def __init__(self, key: int) -> None:
        self.key = key


class SpecialReference(Reference):
    pass


def resolve(key: int) -> str:
    return f"reference {key}"


def test_registered_reducers_hold_for_subclasses_and_both_picklers_until_they_are_undone() -> None:
    undo = register_reducer(Reference, lambda reference: (resolve, (reference.key,)))
    assert trip([Reference(1), SpecialReference(2)]) == ["reference 1", "reference 2"]
    assert trip([Reference(1), lambda: 0])[0] == "reference 1"
    undo_other = register_reducer(Reference, lambda reference: (resolve, (-reference.key,)))
    assert trip([Reference(1)]) == ["reference -1"]
    undo_other()
    assert trip([Reference(1)]) == ["reference 1"]
    undo()
    assert trip(Reference(1)).key == 1


def test_names_can_be_resolved_by_the_caller() -> None:
    asked = []

    def find_class(module: str, name: str) -> Any:
        asked.append((module, name))
        return dict

    value = [Batch("b", {}), torch.ones(1)]
    packed = pack(value)
    with pytest.raises(SerializationError):
        deliver(packed, find_class=find_class)
    assert asked[0] == (__name__, "Batch")
    assert all(module != unpickler.__name__ for module, _ in asked)


# What goes wrong.


class Target:
    """Stands for that of which a method is called."""

    method_follows = True


LOCK = threading.Lock()


def _of_main() -> Any:
    """A function of a script, which uses a lock of it."""
    names = {"__name__": "__main__", "LOCK": LOCK}
    exec("def holding(): return LOCK", names)
    return names["holding"]


holding = _of_main()


def test_the_guilty_argument_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(
        SerializationError, match=r"argument 1, in its variable 'lock': _thread.lock cannot be sent"
    ) as e:
        pack(((1, lambda: lock), {}))
    assert isinstance(e.value.__cause__, TypeError)
    with pytest.raises(SerializationError, match=r"argument 0: _thread.lock") as e:
        pack((len, (lock,), {}))  # of a call whose function goes along
    with pytest.raises(
        SerializationError, match=r"holding\(\), in its global 'LOCK': _thread.lock.*put the function into a"
    ):
        pack((holding, (), {}), main_by_value=True)
    with pytest.raises(SerializationError, match=r"argument 'batch', in its attribute 'history', in its item 0"):
        pack(((), {"batch": Batch("b", {}, [lock])}))
    with pytest.raises(SerializationError, match=r"generator cannot be sent.*list of what it yields"):
        pack(i for i in range(3))
    with pytest.raises(SerializationError, match="Future"):
        pack([torch.futures.Future()])


def test_an_error_in_the_users_own_reduction_is_the_cause() -> None:
    class Proud:
        def __reduce__(self) -> Any:
            raise KeyError("never")

    with pytest.raises(SerializationError, match=r"Proud cannot be sent .*never") as caught:
        pack(Proud())
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_nesting_too_deep_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(SerializationError):
        pack(value)


def named(module: str, name: str) -> bytes:
    return bytes([unpickler.PICKLE]) + pickle.dumps(None, 5)[:2] + f"c{module}\n{name}\n.".encode()


def test_missing_modules_and_names_say_what_to_do() -> None:
    with pytest.raises(SerializationError, match=r"module 'not_there' cannot be imported.*PYTHONPATH"):
        unpack(named("not_there", "f"), [])
    with pytest.raises(SerializationError, match="module 'math' of the receiving worker has no such attribute"):
        unpack(named("math", "not_there"), [])
    with pytest.raises(SerializationError, match=r"a module that both import.*before init_rpc"):
        unpack(named("__main__", "not_there"), [])


class Fragile:
    def __setstate__(self, state: Any) -> None:
        raise ValueError("cannot wake up")


def test_objects_that_fail_to_wake_say_why() -> None:
    fragile = Fragile()
    fragile.x = 1
    with pytest.raises(SerializationError, match="ValueError: cannot wake up"):
        trip(fragile)


@pytest.mark.parametrize(
    ("payload", "tensors"),
    [
        (b"", 0),
        (b"\xff", 0),
        (bytes([TENSOR]), 0),
        (bytes([TENSOR]), 2),
        (bytes([FLAT_CALL]), 0),
        (bytes([FLAT_CALL, 1, 2]), 1),
        (bytes([FLAT_TUPLE, 1, 0]), 1),
        (bytes([FLAT_TUPLE, 1, 0]) + pickle.dumps([1]), 0),
        (bytes([FLAT_TUPLE, 2, 0, 0]) + msgspec.msgpack.encode([1]), 0),
        (bytes([FLAT_TUPLE, 1, 0]) + msgspec.msgpack.encode(5), 0),
        (bytes([unpickler.PICKLE_AND_BUFFERS]), 1),
        (bytes([unpickler.PICKLE_AND_BUFFERS, 9, 0, 0, 0]), 1),
        (bytes([unpickler.PICKLE_AND_BUFFERS, 1, 0, 0, 0]), 1),
        (bytes([unpickler.PICKLE]), 0),
        (bytes([unpickler.PICKLE]) + b"garbage", 0),
    ],
)
def test_bad_payloads_are_refused(payload: bytes, tensors: int) -> None:
    with pytest.raises((ProtocolError, SerializationError)):
        unpack(payload, [torch.ones(1)] * tensors)


@given(st.binary(max_size=40), st.integers(0, 2), st.sampled_from([FLAT_CALL, FLAT_TUPLE]))
def test_random_flat_payloads_are_read_or_refused(data: bytes, count: int, form: int) -> None:
    try:
        unpack(bytes([form]) + data, [torch.ones(1)] * count)
    except (ProtocolError, SerializationError):
        pass


def test_payloads_may_be_any_buffer() -> None:
    values: list[Any] = [((torch.ones(1), 2), {}), [1, {"a": np.arange(1000)}], None, ((), {})]
    for value in values:
        packed = pack(value)
        for form in (bytearray, memoryview):
            assert str(deliver(Packed(form(packed.payload), packed.tensors))) == str(value)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


TENSORS = st.lists(st.integers(0, 3), max_size=3).map(torch.randn)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
    TENSORS,
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(VALUES)
def test_any_nesting_arrives_equal(value: Any) -> None:
    assert equal(trip(value), value)


@given(st.lists(VALUES, max_size=3).map(tuple), st.dictionaries(st.text(max_size=4), VALUES, max_size=2))
def test_any_call_arrives_equal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert equal(trip((args, kwargs)), (args, kwargs))
