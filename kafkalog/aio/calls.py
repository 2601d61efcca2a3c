"""Calls in other threads, as futures of an event loop: whatever may wait is called there.

Cancelling a wait does not end the call, which nothing could end. If the event loop is closed first, its outcome is
dropped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from kafkalog.client.background import in_background
from kafkalog.errors import OutOfThreads

_Result = TypeVar("_Result")


def begin(call: Callable[[], _Result]) -> asyncio.Future[_Result]:
    """Have a call made in a thread of its own. The future may fail with OutOfThreads."""
    future, on_done = _promise()
    in_background(call, on_done)
    return future


async def in_thread(
    call: Callable[[], _Result], on_untold: Callable[[BaseException], object] = lambda error: None
) -> _Result:
    """What a call returns that is made in a thread of its own. Cancelled, it goes on, and nobody gets its outcome but
    `on_untold`, which is called in that thread if it fails then."""
    is_cancelled = False
    untold: list[BaseException] = []

    def called() -> _Result:
        try:
            return call()
        except BaseException as error:
            untold.append(error)
            if is_cancelled:
                tell()
            raise

    def tell() -> None:
        with suppress(IndexError):  # the other thread does
            on_untold(untold.pop())

    future = begin(called)
    try:
        await asyncio.wait([future])
    except BaseException:
        is_cancelled = True
        tell()
        raise
    untold.clear()
    return future.result()


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Have an event loop call a function, from any thread; one that is closed does not."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


class Caller:
    """A thread that makes one call after the other, started by the first. The process's end does not wait for it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, call: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Have a call made; from a thread that runs an event loop. Raises OutOfThreads."""
        if self._thread is None:
            thread = threading.Thread(target=_make_calls, args=[self._calls], name="kafkalog-aio", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise OutOfThreads(process="the client", reason=str(error)) from None
            self._thread = thread
        future, on_done = _promise()
        made: Future[_Result] = Future()
        made.add_done_callback(on_done)
        self._calls.put((call, made))
        return future

    def stop(self) -> None:
        """End the thread after the calls that were begun."""
        self._calls.put(None)


def _make_calls(calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (each := calls.get()) is not None:
        call, made = each
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)
        del each, call, made  # the thread keeps nothing alive while it waits


def _promise() -> tuple[asyncio.Future[Any], Callable[[Future[Any]], object]]:
    """A future of the running event loop, and what to call, from any thread, with the future that it is to copy."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    return future, partial(call_soon, loop, _copy, future)


def _copy(future: asyncio.Future[Any], made: Future[Any]) -> None:
    error = made.exception()
    if error is None:
        future.set_result(made.result())
    else:
        future.set_exception(error)
        future.exception()  # who waited may have been cancelled: asyncio need not log it as forgotten
