"""A call in a thread of its own, for a caller that must not wait for a hanging broker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

from kafkalog.errors import OutOfThreads
from kafkalog.net.main_thread import start_thread

_Result = TypeVar("_Result")


class _HasClose(Protocol):
    def close(self) -> None: ...


_Closable = TypeVar("_Closable", bound=_HasClose)


class BackgroundCall(Future[_Result]):
    """A call that another thread makes.

    Attributes:
        has_ended: as `done()`, but takes no lock: that of a future is taken by Python code, and a KeyboardInterrupt
            there leaves it locked for ever. For threads that users interrupt.
    """

    def __init__(self) -> None:
        super().__init__()
        self._end: list[None] = []
        self.add_done_callback(partial(_note, self._end))  # no method: a cycle would keep the result for long

    @property
    def has_ended(self) -> bool:
        return bool(self._end)


def _note(end: list[None], _: object) -> None:
    end.append(None)


def in_background(
    call: Callable[[], _Result],
    on_done: Callable[[Future[_Result]], object] = lambda _: None,
    *,
    here_if_need_be: bool = False,
) -> BackgroundCall[_Result]:
    """Begin a call; the future gets its result or error, or OutOfThreads. The process's end does not wait for it.

    Args:
        here_if_need_be: without a thread, make the call in this one.
        on_done: called with the future when it is done. It is the future's before the thread starts: an interrupt
            between the two would leave a call whose end nobody learns of.
    """
    future: BackgroundCall[_Result] = BackgroundCall()
    future.add_done_callback(on_done)

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        start_thread(run)
    except RuntimeError as error:
        if here_if_need_be:
            run()
            return future
        future.set_exception(OutOfThreads(process="the client", reason=str(error)))
    return future


def close_result(call: Future[_Closable]) -> None:
    """Close what a call has made that nobody waits for any more: for `Future.add_done_callback`."""
    if call.exception() is None:
        call.result().close()
