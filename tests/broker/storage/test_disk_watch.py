"""A disk whose calls do not return."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.storage.disk import Disk
from broker.storage.disk_watch import DiskWatch
from kafkalog.errors import StorageFailed
from tests.waiting import waited_for

Watched = Callable[[float], tuple[Disk, "queue.SimpleQueue[StorageFailed]"]]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """A disk that is watched for calls of so many seconds, and what was reported."""
    with contextlib.ExitStack() as stack:

        def watch(seconds: float) -> tuple[Disk, queue.SimpleQueue[StorageFailed]]:
            reported: queue.SimpleQueue[StorageFailed] = queue.SimpleQueue()
            made = DiskWatch(Disk(), tmp_path, seconds, reported.put)
            made.start()
            stack.callback(made.stop)
            return made.disk, reported

        yield watch


def test_a_call_that_does_not_return_is_reported_once(
    watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, reported = watched(0.05)
    os.mkfifo(tmp_path / "pipe")
    opened: list[int] = []
    thread = threading.Thread(target=lambda: opened.append(disk.open(tmp_path / "pipe")), name="reader")
    thread.start()
    error = reported.get(timeout=30)
    assert str(error) == f"log directory {tmp_path} is out of service: the disk hangs: open has not returned for 0.05 s"
    waited_for(lambda: f"disk_stalled directory={tmp_path} call=open thread=reader seconds=0.05" in caplog.text)
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)
    thread.join()
    os.close(writer)
    disk.close(opened[0])
    assert reported.empty()


def test_a_call_amid_another_leaves_that_watched(watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    os.mkfifo(tmp_path / "pipe")

    class ThenWaits:
        def __fspath__(self) -> str:
            disk.close(disk.open(tmp_path / "x"))
            return str(tmp_path / "pipe")

    disk, reported = watched(0.05)
    opened: list[int] = []
    thread = threading.Thread(target=lambda: opened.append(disk.open(ThenWaits())), daemon=True)  # type: ignore[arg-type]
    thread.start()
    assert "open has not returned" in str(reported.get(timeout=30))
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)
    thread.join()
    os.close(writer)
    disk.close(opened[0])


def test_calls_that_return_are_not_reported_however_many_there_are(watched: Watched, tmp_path: Path) -> None:
    disk, reported = watched(0.3)
    fd = disk.create(tmp_path / "x")
    looked = threading.Event()
    threading.Timer(0.6, looked.set).start()
    while not looked.is_set():
        disk.write(fd, [b"x"], 0)
    with pytest.raises(FileExistsError):
        disk.create(tmp_path / "x")
    assert (disk.read(fd, 10, 0), disk.size(fd), disk.names(tmp_path)) == (b"x", 1, ["x"])
    disk.close(fd)
    assert reported.empty()
