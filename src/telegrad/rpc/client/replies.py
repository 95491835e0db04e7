"""What a reply says: a message, tensors, or the exception that was raised on the other worker."""

import torch

from telegrad.errors import ProtocolError, SerializationError
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.remote_errors import rebuild_exception, rebuild_from_stranger
from telegrad.wire.frames import FAILURE, Frame
from telegrad.wire.messages import ExceptionReply
from telegrad.wire.pickling.blame import BLAMED


def reply_frame(slot: Slot) -> Frame:
    """The frame of a slot that is done; raises what went wrong."""
    if slot.error is not None:
        raise slot.take_error()
    frame = slot.frame
    assert frame is not None
    if frame.kind == FAILURE:
        if type(frame.message) is not ExceptionReply:
            raise ProtocolError(f"a failure came without an exception: {frame}")
        if slot.link.runtime.layers.plain:
            raise rebuild_from_stranger(frame.message, slot.link.member.name)
        # In no variable here: the error has this frame in its traceback, and they would hold each other.
        raise _named(rebuild_exception(frame.message, frame.payload, frame.take_tensors()), slot)
    return frame


def _named(error: BaseException, slot: Slot) -> BaseException:
    """The error itself. Of a result that could not be sent the other worker knows what it was, and this one of which
    call, which is put into the text here. If it could not take in what came of a script, all of that goes again."""
    if isinstance(error, SerializationError) and error.of_script:
        del error.of_script
        slot.link.functions.forget_sent()
    if type(error) is SerializationError and error.of_result:
        del error.of_result  # it may travel on, and is said once
        text = str(error)
        rest = text.removeprefix(BLAMED) if text.startswith(BLAMED) else f": {text}"
        error.args = (f"the result of {slot.what()}{rest}",)
    return error


def reply_tensors(slot: Slot) -> list[torch.Tensor]:
    """The tensors that came with a reply."""
    frame, slot.frame = slot.frame, None
    return [] if frame is None else frame.take_tensors()
