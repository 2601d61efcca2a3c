"""Signal handlers' doings, exceptions above all: at each place where CPython looks for signals."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

from kafkalog.client.producer.mutex import Mutex
from kafkalog.errors import ReentrantCall

_LOOKED_AFTER = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD") if name in dis.opmap}


class Interrupted(BaseException):
    """What a signal handler raised."""


def interrupt() -> None:
    raise Interrupted


@cache
def _handled(code: CodeType) -> list[tuple[int, int, int]]:
    """From where to where instructions have which handler of exceptions."""
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    return [(entry.start, entry.end, entry.target) for entry in entries]


def _handler(code: CodeType, at: int) -> int | None:
    return next((handler for start, end, handler in _handled(code) if start <= at < end), None)


def interrupted_at(
    number: int, call: Callable[[], object], *files: str, handler: Callable[[], object] = interrupt
) -> bool:
    """Call something, and have a handler called in it, which raises Interrupted, at the place of that number, counted
    from 0: where one of its functions begins, after a call, and where a loop begins again.

    Args:
        files: the ends of the names of the files whose functions count. Beside them those of conditions over our lock
            do; for the rest of the standard library, as for starting threads, we can do nothing.

    Returns:
        Whether there was such a place; if not, the call went through.
    """
    left = number
    done: dict[FrameType, int] = {}  # the offset of the last instruction
    raised = False

    def place(frame: FrameType) -> None:
        nonlocal left, raised
        if left == 0 and not raised:
            raised = True
            try:
                handler()
            except Interrupted as error:
                error.add_note(f"at {frame.f_code.co_qualname}:{frame.f_lineno}")  # one of hundreds of places
                raise
        left -= 1

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            condition = frame.f_locals.get("self")
            if not isinstance(condition, threading.Condition) or not isinstance(vars(condition).get("_lock"), Mutex):
                return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "call":
            place(frame)
        elif event == "opcode":
            code, before = frame.f_code, done.get(frame)
            done[frame] = now = frame.f_lasti
            # An interrupt is raised by the instruction before, ours by this one: in `with lock: return call()` it would
            # leave the lock locked.
            is_same = before is not None and _handler(code, before) == _handler(code, now)
            if before is not None and code.co_code[before] in _LOOKED_AFTER and is_same:
                place(frame)
        elif event == "return":
            done.pop(frame, None)
        return trace

    try:
        traced(call, trace)
    except ReentrantCall:
        if handler is interrupt:  # which called nothing
            raise
    return raised


def traced(call: Callable[[], object], trace: Callable[[FrameType, str, Any], Any]) -> None:
    """Call something under a trace function, which may raise Interrupted."""
    kept = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        pass
    finally:
        sys.settrace(kept)
