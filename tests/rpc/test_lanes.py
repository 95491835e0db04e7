"""Which requests have streams of their own on the GPU: those that work there, not notices that free memory."""

from typing import Any

import pytest

from telegrad.cuda import order
from telegrad.ids import ContextId, Incarnation, WorkerId
from telegrad.rpc.request import Request
from telegrad.rpc.server import session as sessions
from telegrad.rpc.server.session import Session
from telegrad.rpc.workers import Member
from telegrad.wire.frames import Frame, FrameKind
from telegrad.wire.messages import AnyMessage, BeginPass, CleanupAutogradContext
from tests.rpc.quiet import Events, quiet_runtime, serve_with


def test_a_notice_that_frees_memory_takes_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[type, bool]] = []
    on_lane: list[bool] = []

    def serve(request: Request) -> None:
        served.append((type(request.message), bool(on_lane)))

    def run_on_lane(handler: Any, request: Request, _: int) -> None:
        on_lane.append(True)
        handler(request)
        on_lane.pop()

    monkeypatch.setattr(order, "active", True)
    monkeypatch.setattr(sessions.reads, "run_on_lane", run_on_lane)
    shared, quiet = quiet_runtime()
    serve_with(quiet, serve, BeginPass)
    serve_with(quiet, serve, CleanupAutogradContext, deferrable=True)
    session = Session(shared, Events(), Member("caller", WorkerId(1), Incarnation(1), (), 0), False)
    messages: list[AnyMessage] = [BeginPass(1, 2, WorkerId(1), False, ()), CleanupAutogradContext(ContextId(1), ())]
    for message in messages:
        session.serve(Request(session, Frame(FrameKind.NOTICE, 1, 0, message)))
    assert served == [(BeginPass, True), (CleanupAutogradContext, False)]
