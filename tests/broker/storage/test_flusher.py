"""The threads that flush, without a log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.storage.disk_errors import DirectoryHealth
from broker.storage.flusher import _THREADS, Flusher, FlushTask
from kafkalog.clock import SYSTEM_CLOCK

WAIT_SECONDS = 60.0


@pytest.fixture
def flusher(tmp_path: Path) -> Iterator[Flusher]:
    made = Flusher(DirectoryHealth(tmp_path, SYSTEM_CLOCK), SYSTEM_CLOCK)
    made.start()
    yield made
    made.stop()


def test_a_flush_that_fails_for_a_defect_is_logged_and_ends_no_thread(
    flusher: Flusher, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("a defect")

    flushed = threading.Event()
    for _ in range(_THREADS):
        flusher.soon(FlushTask("t-0", fails))
    flusher.soon(FlushTask("t-1", flushed.set))
    assert flushed.wait(WAIT_SECONDS)
    flusher.stop()
    assert caplog.text.count("flush_failed partition=t-0") == _THREADS
