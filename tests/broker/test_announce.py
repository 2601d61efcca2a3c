from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator

import pytest

from broker.announce import Announcer
from kafkalog.clock import ManualClock
from tests.waiting import waited_for


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def logger(announcer: Announcer) -> logging.Logger:
    made = logging.Logger("broker.test")
    made.addHandler(announcer)
    return made


def told(reading: int) -> list[tuple[str, str]]:
    lines = map(json.loads, os.read(reading, 1 << 20).splitlines())
    return [(line["level"], line["event"]) for line in lines]


def test_warnings_and_errors_are_reported_and_no_more(pipe: tuple[int, int]) -> None:
    log = logger(Announcer(pipe[1]))
    log.info("segment_rolled partition=t-0")
    log.warning("disk_full partition=%s", "t-0")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("tidy_failed")
    assert told(pipe[0]) == [
        ("warning", "disk_full partition=t-0"),
        ("error", "tidy_failed (ValueError: two lines)"),
    ]


def test_an_event_that_repeats_is_reported_once_and_then_counted(pipe: tuple[int, int]) -> None:
    clock = ManualClock()
    log = logger(announcer := Announcer(pipe[1], clock=clock))
    for number in range(5):
        log.warning("disk_full partition=t-%d", number)
        log.error("damage_found partition=t-%d", number)
    assert told(pipe[0]) == [("warning", "disk_full partition=t-0"), ("error", "damage_found partition=t-0")]
    clock.advance(60)
    announcer._report_repeats()
    assert told(pipe[0]) == [("warning", "disk_full, 4 more in 60 s"), ("error", "damage_found, 4 more in 60 s")]
    log.warning("disk_full partition=t-9")
    assert told(pipe[0]) == [("warning", "disk_full partition=t-9")]
    announcer.close()


def test_a_thread_waits_until_repeats_are_to_be_told(pipe: tuple[int, int]) -> None:
    log = logger(announcer := Announcer(pipe[1], again_seconds=0.01))
    log.warning("disk_full partition=t-0")
    waited_for(lambda: not announcer._repeats)
    assert told(pipe[0]) == [("warning", "disk_full partition=t-0")]


def test_without_a_thread_to_wait_whatever_is_logged_next_tells_the_repeats(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    log = logger(Announcer(pipe[1], clock=clock))

    def no_thread(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", no_thread)
    log.warning("disk_full partition=t-0")
    log.warning("disk_full partition=t-0")
    clock.advance(60)
    log.warning("disk_full partition=t-0")
    assert told(pipe[0]) == [
        ("warning", "disk_full partition=t-0"),
        ("warning", "disk_full, 1 more in 60 s"),
        ("warning", "disk_full partition=t-0"),
    ]


def test_once_there_are_threads_again_one_waits_for_the_repeats(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logger(announcer := Announcer(pipe[1], again_seconds=0.01))

    def no_thread(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Timer, "start", no_thread)
        log.warning("disk_full partition=t-0")
    log.warning("accept_failed")
    waited_for(lambda: not announcer._repeats)


def test_after_the_first_repeats_a_thread_waits_for_the_next(pipe: tuple[int, int]) -> None:
    clock = ManualClock()
    log = logger(announcer := Announcer(pipe[1], clock=clock))
    log.warning("disk_full partition=t-0")
    clock.advance(30)
    log.warning("accept_failed")
    clock.advance(30)
    announcer._report_repeats()
    assert list(announcer._repeats) == [("warning", "accept_failed")]
    waiting = announcer._timer
    assert waiting is not None
    announcer.close()
    assert waiting.finished.is_set()  # closed, it waits for nothing any more


def test_a_pipe_that_nobody_reads_delays_nobody(pipe: tuple[int, int]) -> None:
    log = logger(Announcer(pipe[1]))
    threads = threading.active_count()
    for number in range(1000):
        log.error("event_%d %s", number, "é" * 1000)
    assert threading.active_count() <= threads + 1
    lines = os.read(pipe[0], 1 << 20).splitlines()
    assert 10 < len(lines) < 1000
    assert all(json.loads(line)["event"].startswith("event_") for line in lines)  # each is whole
