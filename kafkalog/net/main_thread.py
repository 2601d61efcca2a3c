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

BACKGROUND = "kafkalog-background"
"""The name of the threads."""
_Result = TypeVar("_Result")


class Signal:
    """As `threading.Event`, with a lock of C code, which each that was waited for passes on to the next."""

    def __init__(self) -> None:
        self._is_set = False
        self._lock = _thread.allocate_lock()  # locked until it is set
        self._lock.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        try:  # in line: an interrupt in `suppress` would leave others waiting
            self._lock.release()
        except RuntimeError:  # it was set already
            pass

    def clear(self) -> None:
        """For the one thread that waits for it."""
        self._is_set = False
        self._lock.acquire(blocking=False)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set, at most for so many seconds; returns whether it is."""
        try:
            if not self._is_set:
                self._lock.acquire(timeout=-1 if seconds is None else max(0.0, seconds))
        finally:
            if self._is_set:
                try:  # in line, as in `set`
                    self._lock.release()
                except RuntimeError:  # another thread has released it, or none had taken it
                    pass
        return self._is_set


def start_thread(run: Callable[[], object]) -> None:
    """Run something in a thread of its own, for whose end the process does not wait. Raises RuntimeError: there is none
    left."""
    thread = threading.Thread(target=run, name=BACKGROUND, daemon=True)

    def start() -> None:
        try:
            thread.start()
        except RuntimeError:
            run()

    if _is_main_thread():
        _thread.start_new_thread(start, ())  # `start` waits for an event: an interrupt there could keep `run` from it
    else:
        thread.start()


def off_main_thread(call: Callable[[], _Result]) -> _Result:
    """Make a call, and if this is the main thread, in another one, while this one waits. If an interrupt ends the wait,
    the call goes on, and its outcome is dropped."""
    if not _is_main_thread():
        return call()
    results: list[_Result] = []
    errors: list[BaseException] = []
    ended = _thread.allocate_lock()  # locked until the call has ended
    ended.acquire()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            ended.release()

    try:
        start_thread(run)
    except RuntimeError:
        return call()
    ended.acquire()
    if errors:
        raise errors[0]
    return results[0]


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
