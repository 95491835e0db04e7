"""Passes beyond the first order with CUDA tensors: on streams of their own, as the plain ones are."""

from telegrad.engine.higher.passes import RecordedPass, RecordedRootPass
from telegrad.engine.on_lane import PassOnLane, RootPassOnLane


class RecordedPassOnLane(PassOnLane, RecordedPass):
    """A participant's part."""


class RecordedRootPassOnLane(RootPassOnLane, RecordedRootPass):
    """The root's part."""
