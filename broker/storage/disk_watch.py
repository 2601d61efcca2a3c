"""Notices that a disk hangs: a call to it neither returns nor fails. Then no error takes the directory out of service,
and the threads that wait in such calls, and for their locks, wait for ever.

The thread that looks neither touches the disk nor takes a lock that is held during a call. It counts its own looks, not
the time: a process that was suspended has not waited for its disk.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

from broker.storage.disk import Disk
from kafkalog.errors import StorageFailed
from kafkalog.events import get_logger

log = get_logger(__name__)

_LOOKS = 10
_LOG_SECONDS = 1.0

_Call = tuple[str, int]
"""Of a method of `Disk`: its name, and a number that no other call has."""


class DiskWatch:
    """Watches a disk from `start` to `stop`.

    Args:
        path: the directory, for the event and the error.
        seconds: a call that takes longer has stalled.
        on_stalled: called once, with the error, after the event was logged.

    Attributes:
        disk: the watched one. Calls to it count, and go to the given one.
    """

    def __init__(self, disk: Disk, path: Path, seconds: float, on_stalled: Callable[[StorageFailed], object]) -> None:
        self._path = path
        self._seconds = seconds
        self._on_stalled = on_stalled
        # By thread; without a lock: it costs 0.5 us a call, and an append makes one.
        self._in_flight: dict[int, _Call] = {}
        self.disk = _WatchedDisk(disk, self._in_flight)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        seen: dict[int, tuple[_Call, int]] = {}  # by thread: the call of the last look, how many looks before had it
        while not self._stopping.wait(self._seconds / _LOOKS):
            before, seen = seen, {}
            for thread, call in self._in_flight.copy().items():
                last, looks = before.get(thread, (None, 0))
                seen[thread] = call, looks + 1 if call == last else 0
                if seen[thread][1] == _LOOKS:
                    self._report(thread, call[0])
                    return

    def _report(self, thread: int, call: str) -> None:
        # Standard error may be a file on the same disk, and another thread hang in it with the lock of its handler.
        logging = threading.Thread(target=self._log, args=(thread, call), name="disk-stalled", daemon=True)
        logging.start()
        logging.join(_LOG_SECONDS)
        reason = f"the disk hangs: {call} has not returned for {self._seconds:g} s"
        self._on_stalled(StorageFailed(directory=str(self._path), reason=reason))

    def _log(self, thread: int, call: str) -> None:
        name = next((each.name for each in threading.enumerate() if each.ident == thread), "")
        log.error("disk_stalled", directory=str(self._path), call=call, thread=name, seconds=self._seconds)


class _WatchedDisk(Disk):
    """A disk whose calls are noted while they are in flight."""

    def __init__(self, disk: Disk, in_flight: dict[int, _Call]) -> None:
        number = itertools.count().__next__

        def watched(name: str) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                thread = get_ident()
                outer = in_flight.get(thread)  # what a garbage collection closes may be closed amid another call
                in_flight[thread] = name, number()
                try:
                    return getattr(disk, name)(*given, **named)
                finally:
                    if outer is None:
                        del in_flight[thread]
                    else:
                        in_flight[thread] = outer

            return call

        for name in vars(Disk):
            if not name.startswith("_"):
                setattr(self, name, watched(name))
