"""The thread that unlinks, without a log."""

from __future__ import annotations

import threading
from pathlib import Path

from broker.storage.disk_errors import DirectoryHealth
from broker.storage.unlinker import Unlinker
from kafkalog.clock import SYSTEM_CLOCK

WAIT_SECONDS = 60.0


def test_what_is_asked_for_while_it_is_being_unlinked_is_called_once_more(tmp_path: Path) -> None:
    unlinker = Unlinker(DirectoryHealth(tmp_path, SYSTEM_CLOCK))
    asked, called = threading.Event(), threading.Semaphore(0)

    def unlink() -> bool:
        if not asked.is_set():  # a retention that comes when this call has looked already
            asked.set()
            unlinker.soon("t-0", unlink)
        called.release()
        return False

    unlinker.start()
    unlinker.soon("t-0", unlink)
    for _ in range(2):
        assert called.acquire(timeout=WAIT_SECONDS)
    unlinker.stop()
