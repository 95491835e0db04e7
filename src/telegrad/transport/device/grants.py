"""Memory that was granted to a peer, before and after a message names it: see `landing.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from telegrad.cuda import order
from telegrad.cuda.forms import Form
from telegrad.cuda.runtime import runtime
from telegrad.transport.device.flags import Flag, Patience
from telegrad.transport.device.regions import Region
from telegrad.wire.tensor.segments import contiguous_strides


class Place:
    """A flag that one grant after the other has."""

    __slots__ = ("flag", "number", "uses", "waited")

    def __init__(self, number: int, flag: Flag) -> None:
        self.number = number
        self.flag = flag
        self.uses = 0
        self.waited = (0, -1)  # the use and the stream that was told last to wait for it


class Grant:
    """Memory for one tensor."""

    __slots__ = ("asked", "device", "form", "nbytes", "place", "region", "since", "stream", "tensor", "use")

    def __init__(
        self, place: Place, form: Form, nbytes: int, tensor: Tensor, region: Region, device: int, stream: int
    ) -> None:
        place.uses += 1
        self.place = place
        self.use = place.uses
        self.form = form
        self.tensor = tensor
        self.nbytes = nbytes
        self.device = device
        self.region = region
        self.stream = stream  # that torch allocated it for
        self.since = time.monotonic()
        self.asked = False  # whether the peer was told to give it back

    def was_heard(self) -> bool:
        """Whether the peer knows of it."""
        return self.place.flag.read.has_reached(self.use)

    def went_back(self) -> bool:
        """Whether the peer has said that it will not use it."""
        return self.place.flag.let_go.has_reached(self.use)


class Late(NamedTuple):
    """A tensor that came before its bytes did."""

    place: Place  # of its grant
    teller: Place  # whose number says that they are there
    use: int
    device: int
    storage: StorageWeakRef
    held: Tensor | None  # if nobody took it

    def is_there(self) -> bool:
        return self.teller.flag.written.has_reached(self.use)

    def spoil(self) -> None:
        """The peer will never write it: let nobody take what lies there for a result."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is not None:
            with torch.cuda.device(self.device):
                runtime().fill(storage.data_ptr(), 0xFF, storage.nbytes())


class Lands(Protocol):
    """Where granted memory comes from."""

    patience: Patience

    def expect(self, device: int, forms: Sequence[Form]) -> None:
        """Tensors of these forms came."""

    def free(self, place: Place) -> None:
        """A tensor was taken, and is there."""

    def follow(self, late: Late) -> None:
        """A tensor was taken, and is not there yet."""

    def drop(self, granted: Granted) -> None:
        """Nobody wants it."""


class Granted:
    """Granted memory that a message names, until its tensor has been taken."""

    __slots__ = ("_grant", "_landing", "_taken", "_teller", "_use", "device", "nbytes")
    granted = True

    def __init__(self, landing: Lands, grant: Grant) -> None:
        self._landing = landing
        self._grant = grant
        self._taken = False
        self._teller, self._use = grant.place, grant.use  # whose number says that it was written
        self.nbytes = grant.nbytes
        self.device = grant.device

    def told_by(self, place: Place) -> None:
        """It was written together with what is at another place, whose number says so."""
        self._teller, self._use = place, place.uses

    def tensor(self, form: Form) -> Tensor:
        """What came, as a tensor of this form; what follows on the current stream finds its bytes there."""
        grant = self._grant
        stream = order.current_stream(grant.device)
        teller, use = self._teller, self._use
        written = teller.flag.written
        there = written.has_reached(use)
        if not there and teller.waited != (use, stream):
            there = self._landing.patience.sees(written, use)
            if not there:
                runtime().wait_value(stream, written.on_device, use)
                teller.waited = use, stream
        if form == grant.form:
            tensor = grant.tensor
        else:
            tensor = torch.empty(0, dtype=form.dtype, device=grant.tensor.device)
            tensor.set_(grant.tensor.untyped_storage(), 0, form.shape, form.strides or contiguous_strides(form.shape))
        if stream != grant.stream:
            tensor.record_stream(torch.cuda.current_stream(grant.device))
        if not self._taken:
            self._taken = True
            if there:
                self._landing.free(grant.place)
            else:
                self._landing.follow(self.late(held=False))
        return tensor

    def expect(self, forms: Sequence[Form], device: torch.device) -> None:
        """Tensors of these forms came in its message: memory is kept ready for the next ones."""
        self._landing.expect(device.index, forms)

    def storage_on(self, device: torch.device) -> torch.UntypedStorage:
        """What came, as a storage of its own."""
        form = Form(torch.uint8, (self.nbytes,), ())
        tensor = self.tensor(form)
        self._landing.expect(self.device, [form])
        return (tensor if device == tensor.device else tensor.to(device)).untyped_storage()

    def late(self, held: bool) -> Late:
        """What is to be seen to if its bytes have not come yet."""
        grant = self._grant
        storage = StorageWeakRef(grant.tensor.untyped_storage())  # type: ignore[no-untyped-call] # of torch's
        return Late(grant.place, self._teller, self._use, grant.device, storage, grant.tensor if held else None)

    def __del__(self) -> None:
        if not self._taken:
            self._taken = True
            self._landing.drop(self)
