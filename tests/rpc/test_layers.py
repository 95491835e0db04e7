"""One protocol for layers: what is installed serves its messages, is found by its class, and is asked in order."""

from collections.abc import Mapping
from typing import Any

import pytest

from telegrad.ids import WorkerId
from telegrad.rpc.layer import Layer, Layers, Served
from telegrad.wire.messages import Barrier, Goodbye, Ping, PythonCall


class Offers(Layer):
    """What a layer below asks of one above it."""

    def double(self, number: int) -> int:
        raise NotImplementedError


class Upper(Offers):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def messages(self) -> Mapping[type[Any], Served]:
        return {
            PythonCall: Served(self.heard.append),
            Barrier: Served(self.heard.append, counts_as_work=False),
            Goodbye: Served(self.heard.append, deferrable=True),
        }

    def double(self, number: int) -> int:
        return 2 * number


class Wrapping(Layer):
    def wrap_call(self, to: WorkerId, message: Any, tensors: Any) -> None:
        return None


def test_messages_and_their_marks() -> None:
    layers = Layers()
    upper = Upper()
    layers.install(upper)
    layers.served[PythonCall].handler("a request")  # anything will do
    assert upper.heard == ["a request"]
    assert [layers.is_work(kind) for kind in (PythonCall, Barrier, Ping)] == [True, False, True]
    assert [layers.is_deferrable(kind) for kind in (PythonCall, Goodbye, Ping)] == [False, True, False]


def test_a_message_has_one_handler() -> None:
    layers = Layers()
    layers.install(Upper())
    with pytest.raises(ValueError, match="Upper serves PythonCall, which another layer serves already"):
        layers.install(Upper())
    assert len(list(layers)) == 1


def test_a_layer_is_found_by_what_it_derives_from() -> None:
    layers = Layers()
    assert layers.find(Offers) is None
    with pytest.raises(LookupError, match="no layer of this agent is a Offers"):
        layers.layer(Offers)
    upper = Upper()
    layers.install(upper)
    assert layers.layer(Upper) is layers.layer(Offers) is upper
    assert layers.layer(Offers).double(4) == 8
    assert layers.find(Layer) is None  # all are: nobody can mean one by that


def test_only_those_that_wrap_calls_are_asked_on_the_path_of_a_call() -> None:
    layers = Layers()
    wrapping = Wrapping()
    for layer in (Upper(), wrapping, Layer()):
        layers.install(layer)
    assert layers.wrap_call == [wrapping.wrap_call]
    assert len(list(layers)) == 3


def test_a_layer_may_be_installed_while_others_are_asked() -> None:
    layers = Layers()
    layers.install(Layer())
    for _ in layers:
        layers.install(Layer())
    assert len(list(layers)) == 2
