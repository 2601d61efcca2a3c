from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator

import pytest

from broker.announce import Announcer
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


def test_warnings_and_errors_are_told_and_no_more(pipe: tuple[int, int]) -> None:
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


def test_an_event_that_repeats_is_told_once_and_then_counted(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(reading, False)
    log = logger(Announcer(writing, again_seconds=0.5))
    for number in range(5):
        log.warning("disk_full partition=t-%d", number)
        log.error("damage_found partition=t-%d", number)
    found: list[tuple[str, str]] = []

    def all_told() -> bool:
        try:
            found.extend(told(reading))
        except BlockingIOError:
            pass
        return len(found) >= 4

    waited_for(all_told)
    assert found[:2] == [("warning", "disk_full partition=t-0"), ("error", "damage_found partition=t-0")]
    assert sorted(found[2:]) == [("error", "damage_found, 4 more in 0.5 s"), ("warning", "disk_full, 4 more in 0.5 s")]
    waited_for(lambda: not log.handlers[0]._repeats)  # type: ignore[attr-defined]
    log.warning("disk_full partition=t-9")
    assert told(reading) == [("warning", "disk_full partition=t-9")]


def test_a_pipe_that_nobody_reads_holds_up_nobody(pipe: tuple[int, int]) -> None:
    log = logger(Announcer(pipe[1]))
    threads = threading.active_count()
    for number in range(1000):
        log.error("event_%d %s", number, "é" * 1000)
    assert threading.active_count() <= threads + 1
    lines = os.read(pipe[0], 1 << 20).splitlines()
    assert 10 < len(lines) < 1000
    assert all(json.loads(line)["event"].startswith("event_") for line in lines)  # each is whole
