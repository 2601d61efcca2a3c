"""Calls of code that an interrupt would spoil, such as gRPC's.

Python raises KeyboardInterrupt in the main thread, at any point of it. gRPC and `concurrent.futures` take locks by
Python code (`threading.Condition`), and an interrupt there leaves one locked for ever: with gRPC's no call of the
channel ever ends again. Locks of C code (`threading.Lock`, `RLock`) are safe.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def off_main_thread(call: Callable[[], _Result]) -> _Result:
    """Make a call, and if this is the main thread, in another one, while this one waits. If an interrupt ends the wait,
    the call goes on, and its outcome is dropped."""
    if threading.get_ident() != threading.main_thread().ident:
        return call()
    results: list[_Result] = []
    errors: list[BaseException] = []
    is_running = _thread.allocate_lock()
    is_running.acquire()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            is_running.release()

    try:
        _thread.start_new_thread(run, ())  # `Thread.start` takes such a lock too
    except RuntimeError:  # there are too many threads
        return call()
    is_running.acquire()
    if errors:
        raise errors[0]
    return results[0]
