"""A call in a thread of its own, for a caller that must not wait for a hanging broker: connecting, or refreshing
metadata."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kafkalog.errors import OutOfThreads

_Result = TypeVar("_Result")


def in_background(call: Callable[[], _Result]) -> Future[_Result]:
    """Begin a call; the future gets its result or error. The process's end does not wait for it.

    Raises:
        OutOfThreads: the call was not begun.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        threading.Thread(target=run, name="consumer-background", daemon=True).start()
    except RuntimeError as error:
        raise OutOfThreads(process="the consumer", reason=str(error)) from None
    return future
