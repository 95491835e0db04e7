"""An asyncio loop in a thread of its own, for the coroutines that users' functions return."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from telegrad.errors import CallCancelled
from telegrad.rpc.threads import os_thread

Result = Callable[[Any], None]
Failure = Callable[[BaseException], None]


class EventLoop:
    """One loop and its thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop keeps no strong reference; its thread alone touches it
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        context: contextvars.Context,
        done: Result,
        failed: Failure,
        before: Callable[[], None] | None = None,
    ) -> Callable[[], object]:
        """Await a coroutine in a context of its own and pass on what comes of it; what is returned cancels it. `before`
        is called by the loop's thread before it begins."""
        task: asyncio.Task[Any] | None = None

        def start() -> None:
            nonlocal task, before
            try:
                if before is not None:
                    before()
                    before = None  # it may hold arguments
            except BaseException as error:
                coroutine.close()
                failed(error)
                return
            task = self._loop.create_task(coroutine, context=context)
            self._tasks.add(task)
            task.add_done_callback(pass_on)

        def pass_on(task: "asyncio.Task[Any]") -> None:
            self._tasks.discard(task)
            try:
                done(task.result())
            except asyncio.CancelledError:
                failed(CallCancelled("the coroutine was cancelled"))
            except BaseException as error:
                failed(error)

        self._loop.call_soon_threadsafe(start)
        return lambda: self._loop.call_soon_threadsafe(lambda: task is None or task.cancel())

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not threading.current_thread():
            os_thread.join(self._thread, 1.0)
