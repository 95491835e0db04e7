"""A record of what left this worker and what came, to and from whom; shapes and sizes, never contents.

One JSON object a line, in a file or to a logger:

    {"time": "...", "worker": "hospital", "peer": "company", "direction": "in", "what": "call", "function": "forward",
     "context": 3, "tensors": [{"dtype": "float32", "shape": [32, 16], "bytes": 2048}], "payload_bytes": 9}
"""

import datetime
import json
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from telegrad.errors import CallRefused
from telegrad.rpc.layer import Layer
from telegrad.rpc.request import Request
from telegrad.rpc.trust.exports import name_in
from telegrad.wire.messages import (
    ExceptionReply,
    PassDone,
    PropagateGradients,
    PythonCall,
    PythonRemoteCall,
    PythonReply,
    RpcWithAutograd,
    RpcWithAutogradReply,
    RpcWithProfiling,
    RpcWithProfilingReply,
    RpcWithTrace,
    RRefBackward,
    RRefFetch,
    RRefFetchReply,
)
from telegrad.wire.tensor.specs import DTYPES, TensorSpec

_WHAT: dict[type, str] = {
    PythonCall: "call",
    PythonRemoteCall: "call",
    RRefFetch: "fetch",
    PythonReply: "result",
    RRefFetchReply: "result",
    PropagateGradients: "gradients",
    PassDone: "gradients",
    RRefBackward: "backward",
    ExceptionReply: "error",
}

_WRAPPERS = {RpcWithAutograd, RpcWithAutogradReply, RpcWithProfiling, RpcWithProfilingReply, RpcWithTrace}


_MOST_TENSORS, _MOST_SIZES = 10_000, 64  # in one record: a table that says nothing true must not fill the disk


class Audit(Layer):
    """Writes the records of one worker. Any thread may call it."""

    def __init__(self, worker: str, target: str | os.PathLike[str] | logging.Logger) -> None:
        self._worker = worker
        self._logger = target if isinstance(target, logging.Logger) else None
        self._lock = threading.Lock()
        self._file: int | None = None
        if not isinstance(target, logging.Logger):
            self._file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def sent(self, peer: str, message: Any, payload: Any, tensors: Sequence[TensorSpec], about: str) -> None:
        """A request leaves."""
        self._note("out", peer, message, payload, tensors, about)

    def came(self, peer: str, message: Any, payload: Any, tensors: Sequence[TensorSpec], about: str) -> None:
        """A reply came."""
        self._note("in", peer, message, payload, tensors, about)

    def asked(self, request: Request) -> None:
        """A request came."""
        frame = request.frame
        self._note("in", request.caller.name, request.message, frame.payload, frame.tensors, _function(request))

    def replied(self, request: Request, message: Any, payload: Any, tensors: Sequence[TensorSpec]) -> None:
        """A reply leaves."""
        self._note("out", request.caller.name, message, payload, tensors, _function(request))

    def failed(self, request: Request, error: BaseException) -> None:
        """A request is answered with an error, or refused."""
        if not request.recorded:
            return
        refused = isinstance(error, CallRefused)
        record = self._record("out", request.caller.name, "refusal" if refused else "error")
        record["request"] = type(request.frame.message).__name__
        record["error"] = type(error).__name__
        if refused:
            record["rule"] = str(error)
        self._write(record)

    def _note(
        self, direction: str, peer: str, message: Any, payload: Any, tensors: Sequence[TensorSpec], about: str
    ) -> None:
        context = None
        while type(message) in _WRAPPERS:
            if hasattr(message, "metadata"):
                context = message.metadata.context_id
            message = message.call if hasattr(message, "call") else message.reply
        what = _WHAT.get(type(message))
        if what is None or (what == "gradients" and not tensors):
            return  # no data: heartbeats, barriers, who knows which reference
        record = self._record(direction, peer, what)
        record["function" if what in ("call", "result") else "about"] = about
        if context is None and hasattr(message, "metadata"):
            context = message.metadata.context_id
        if context is not None:
            record["context"] = context
        record["tensors"] = [_shown(spec) for spec in tensors[:_MOST_TENSORS]]
        if len(tensors) > _MOST_TENSORS:
            record["more_tensors"] = len(tensors) - _MOST_TENSORS
        record["payload_bytes"] = len(payload)
        self._write(record)

    def _record(self, direction: str, peer: str, what: str) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return {"time": now, "worker": self._worker, "peer": peer, "direction": direction, "what": what}

    def _write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record)
        if self._logger is not None:
            self._logger.info(line)
            return
        with self._lock:
            if self._file is not None:
                os.write(self._file, line.encode() + b"\n")  # one write: records of several processes do not mix

    def on_close(self) -> None:
        """The worker ends."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def _shown(spec: TensorSpec) -> dict[str, Any]:
    dtype = DTYPES[spec.dtype] if 0 <= spec.dtype < len(DTYPES) else None
    count = 1
    for size in spec.shape:
        count *= size
    itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else 0
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(spec.shape[:_MOST_SIZES]),
        "bytes": count * itemsize,
    }


def _function(request: Request) -> str:
    call: Any = request.frame.message
    while hasattr(call, "call"):
        call = call.call
    number = getattr(call, "function", None)
    if number is None:
        return type(call).__name__
    name = name_in(request.session.functions.definition(number) or b"")
    found = request.session.functions.made.get(number)
    return name or getattr(found, "__qualname__", None) or f"number {number}"
