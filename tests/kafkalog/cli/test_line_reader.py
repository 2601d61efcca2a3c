"""Reading lines that another thread can stop: files, pipes, terminals."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.cli.line_reader import LineReader
from tests.waiting import waited_for


@given(st.lists(st.binary(max_size=30), max_size=50), st.integers(0, 3))
def test_lines_of_a_file_are_those_between_its_line_ends(parts: list[bytes], large: int) -> None:
    data = b"\n".join([*parts, b"large" * 5000 * large])
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        with LineReader(file.fileno()) as lines:
            found = list(lines)
            assert lines.count == len(found)
        file.seek(0)
        assert found == [line.removesuffix(b"\n") for line in file]


def test_a_line_that_comes_in_pieces_is_handed_out_whole_and_once_it_ended() -> None:
    reading, writing = os.pipe()
    with open(reading), open(writing, "wb", buffering=0) as pipe, LineReader(reading) as lines:
        found = iter(lines)
        pipe.write(b"first\nsecond\nthi")
        assert (next(found), lines.count) == (b"first", 2)  # the second is read too
        pipe.write(b"rd")
        assert next(found) == b"second"
        pipe.write(b"\nthe rest")
        assert next(found) == b"third"
        pipe.close()
        assert (list(found), lines.count) == ([b"the rest"], 4)


def test_an_interrupt_amid_a_read_comes_after_its_lines_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those lines are taken from the pipe: whoever wrote them counts them as read."""
    reading, writing = os.pipe()
    with open(reading), open(writing, "wb", buffering=0) as pipe, LineReader(reading) as lines:
        pipe.write(b"first\nsecond\n")
        read = os.read

        def interrupted(descriptor: int, count: int) -> bytes:
            data = read(descriptor, count)
            lines.interrupt(signal.SIGINT, None)
            return data

        monkeypatch.setattr(os, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(lines))
        assert lines.count == 2
        with pytest.raises(KeyboardInterrupt):
            lines.interrupt(signal.SIGINT, None)


def test_a_second_interrupt_ends_a_read_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has taken what was in the pipe."""
    reading, writing = os.pipe()
    with open(reading), open(writing, "wb", buffering=0) as pipe, LineReader(reading) as lines:
        pipe.write(b"first\n")
        read = os.read

        def waiting(descriptor: int, count: int) -> bytes:
            lines.interrupt(signal.SIGINT, None)
            lines.interrupt(signal.SIGINT, None)
            raise AssertionError("it waits")

        monkeypatch.setattr(os, "read", waiting)
        with pytest.raises(KeyboardInterrupt):
            next(iter(lines))
        with pytest.raises(KeyboardInterrupt):
            lines.interrupt(signal.SIGINT, None)
        monkeypatch.setattr(os, "read", read)


def test_a_stop_ends_the_lines_while_none_comes_and_drops_those_that_are_read() -> None:
    reading, writing = os.pipe()
    with open(reading), open(writing, "wb", buffering=0) as pipe:
        with LineReader(reading) as lines:
            pipe.write(b"first\nsecond\nthird")
            found = iter(lines)
            assert next(found) == b"first"
            lines.stop()
            lines.stop()
            assert (list(found), lines.count) == ([], 2)  # the third has not ended, so its writer does not count it
        with LineReader(reading) as lines:
            stopping = threading.Thread(target=lines.stop)
            stopping.start()
            assert list(lines) == []
            stopping.join(60)
            lines.stop()
        lines.stop()  # late, and there is nothing left to wake


def test_a_signal_that_the_system_gives_to_another_thread_interrupts_lines_that_do_not_come() -> None:
    """As it does with one that comes just before the wait: that wait itself is not interrupted."""
    reading, writing = os.pipe()
    others = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    gate, main = threading.Event(), threading.get_ident()
    late: list[int] = []

    def interrupt() -> None:
        waited_for(lambda: sys._current_frames()[main].f_code is LineReader._read.__code__)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        if not gate.wait(30):  # it waits for lines all the same
            late.append(os.write(writing, b"line\n"))

    interrupting = threading.Thread(target=interrupt)
    try:
        with open(reading), open(writing, "wb"), LineReader(reading) as lines:
            interrupting.start()
            try:
                with pytest.raises(KeyboardInterrupt):
                    next(iter(lines))
            finally:
                gate.set()
                interrupting.join(60)
        assert not late
    finally:
        signal.signal(signal.SIGUSR1, others)


def test_who_was_woken_by_signals_before_the_lines_is_so_after_them() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    with open(reading), open(writing, "wb"):
        before = signal.set_wakeup_fd(writing)
        try:
            with LineReader(reading):
                pass
        finally:
            assert signal.set_wakeup_fd(before) == writing


def test_lines_end_if_who_was_woken_before_them_is_gone_and_signals_are_then_written_to_nobody() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    own = signal.set_wakeup_fd(writing)
    lines = LineReader(reading)
    try:
        lines.__enter__()
        os.close(writing)
        with pytest.raises(OSError, match="Bad file descriptor"):
            lines.__exit__()
    finally:
        assert signal.set_wakeup_fd(own) == -1
        os.close(reading)
    for descriptor in (lines._woken, lines._waker):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
