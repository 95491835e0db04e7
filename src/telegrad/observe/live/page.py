"""The page: a small web server around a board, on the loopback address and behind a token.

The token is in the address that is printed; the browser keeps it as a cookie. `/metrics` takes it as a bearer token, or
as `?token=`. The page, its script and its chart library (uPlot, MIT) are shipped with the package, so no other server
is ever asked for anything.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from importlib import resources

from telegrad.errors import TelegradError
from telegrad.observe.live.board import Board
from telegrad.rpc.agent import Agent

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import (
        HTMLResponse,
        JSONResponse,
        PlainTextResponse,
        RedirectResponse,
        Response,
        StreamingResponse,
    )
    from starlette.routing import Route
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise TelegradError(
        f"the live page needs packages that are not installed ({error}): pip install 'telegrad[observe]'"
    ) from error

_COOKIE = "telegrad_token"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    # Nothing from elsewhere, no frames around it, no address of it told to others.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_KEEP_ALIVE_SECONDS = 5.0
_FAREWELL_SECONDS = 2.0


class Page:
    """A running server. `url` is the address to open, with its token."""

    def __init__(self, board: Board, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        self._board = board
        self.token = token or secrets.token_urlsafe(24)
        self._host = host
        self._socket = socket.create_server((host, port))
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(self._app(), log_level="warning", access_log=False, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="telegrad-page", daemon=True)

    @property
    def url(self) -> str:
        """The address to open."""
        return f"http://{self._host}:{self.port}/?token={self.token}"

    def start(self) -> None:
        """Serve, in a thread."""
        self._thread.start()
        deadline = time.monotonic() + 10.0
        while not self._server.started and self._thread.is_alive():
            if time.monotonic() > deadline:
                raise TelegradError(f"the page at port {self.port} did not start within 10 s")
            time.sleep(0.005)

    def _run(self) -> None:
        # Signals are the program's, not this server's: so not `Server.run`, which takes them.
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """Serve no more."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_FAREWELL_SECONDS)  # browsers are told that the stream has ended
        self._server.force_exit = True
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._socket.close()

    # --- what is served ---

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._index),
                Route("/state", self._state),
                Route("/events", self._events),
                Route("/metrics", self._metrics),
                Route("/static/{name}", self._static),
            ]
        )

    def _allowed(self, request: Request) -> bool:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = (request.query_params.get("token"), request.cookies.get(_COOKIE), bearer)
        return any(hmac.compare_digest(one.encode(), self.token.encode()) for one in given if one)

    def _refusal(self) -> Response:
        text = "This page needs its token: open the address that `telegrad dashboard` printed.\n"
        return PlainTextResponse(text, 401, _HEADERS)

    async def _index(self, request: Request) -> Response:
        if not self._allowed(request):
            return self._refusal()
        if "token" in request.query_params:  # out of the address bar, into a cookie
            response: Response = RedirectResponse("/", 303, _HEADERS)
            response.set_cookie(_COOKIE, self.token, httponly=True, samesite="strict")
            return response
        return HTMLResponse(_asset("index.html"), headers=_HEADERS)

    async def _state(self, request: Request) -> Response:
        return JSONResponse(self._board.state, headers=_HEADERS) if self._allowed(request) else self._refusal()

    async def _metrics(self, request: Request) -> Response:
        if not self._allowed(request):
            return self._refusal()
        from telegrad.observe.live.prometheus import as_text  # noqa: PLC0415 - its package is needed here only

        return Response(as_text(self._board.snapshots), media_type="text/plain; version=0.0.4", headers=_HEADERS)

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        kind = _TYPES.get("." + name.rpartition(".")[2])
        if kind is None or "/" in name or not resources.files(__package__).joinpath("static", name).is_file():
            return PlainTextResponse("not found\n", 404, _HEADERS)
        return Response(_asset(name), media_type=kind, headers=_HEADERS)

    async def _events(self, request: Request) -> Response:
        if not self._allowed(request):
            return self._refusal()
        return StreamingResponse(self._stream(request), media_type="text/event-stream", headers=_HEADERS)

    async def _stream(self, request: Request) -> AsyncIterator[str]:
        number = -1
        while not self._server.should_exit and not await request.is_disconnected():
            state = await asyncio.to_thread(self._board.wait_for_news, number, _KEEP_ALIVE_SECONDS)
            if self._board.closed:
                return
            if state is None:
                yield ": still here\n\n"
                continue
            number = int(state["number"])
            yield f"data: {json.dumps(state, separators=(',', ':'))}\n\n"


def _asset(name: str) -> bytes:
    return resources.files(__package__).joinpath("static", name).read_bytes()


@contextlib.contextmanager
def serving(agent: Agent, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> Iterator[Page]:
    """A board of the job that an agent belongs to, and its page, for the length of a block."""
    board = Board(agent)
    board.start()
    page = Page(board, host, port, token)
    try:
        page.start()
        yield page
    finally:
        board.close()
        page.close()
