"""How many other sources run in this source's query. Linux's /proc; no Spark, no broker.

Spark asks the sources of a query one after the other, each in a process of its own, and does not report the other
sources. So each writes down when it was last asked and when it last answered, in a file in the machine's temporary
directory, and reads the files of the other sources that the same driver started. A source that was asked and answered
after this one last answered counts as one of the same query, until both are seen busy at the same time: sources of one
query never are, and sources of different queries soon are, when they wait for records.

It is only a hint for how long to wait: a file that cannot be written or read counts as if there were no other source. A
source that Spark ended leaves its file behind; the next one to start removes it.
"""

from __future__ import annotations

import itertools
import os
import struct
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from pyspark_kafkalog import processes

_TIME = struct.Struct("<q")
assert _TIME.size == 8
_ANSWERED_AT = _TIME.size  # in the file: when it was asked, then when it answered; nanoseconds of the monotonic clock
_numbers = itertools.count()


class Neighbours:
    """A source among those of its driver. Its file is there from the first `asked` on."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._driver = f"{os.getppid()}_"
        self._own: str | None = None
        self._file = -1  # none
        self._of_other_queries: set[str] = set()
        self._asked_ns = self._answered_ns = 0

    def asked(self) -> int:
        """Note that this source is asked; returns how many others of its query were asked since it last answered."""
        if self._own is None:
            self._start()
        others, before, self._asked_ns = 0, self._answered_ns, time.monotonic_ns()
        for name, asked_ns, answered_ns in self._others():
            if asked_ns > answered_ns:
                self._of_other_queries.add(name)
            elif before and asked_ns >= before:
                others += 1
        self._write(0, self._asked_ns)
        return others

    def answered(self) -> None:
        """Note that this source is about to answer."""
        for name, asked_ns, answered_ns in self._others():
            if asked_ns > answered_ns or answered_ns > self._asked_ns:
                self._of_other_queries.add(name)
        self._answered_ns = time.monotonic_ns()
        self._write(_ANSWERED_AT, self._answered_ns)

    def _start(self) -> None:
        process = processes.own_name()
        self._own = f"{self._driver}{next(_numbers)}_{process.replace(' ', '_')}"
        try:
            if self._directory is None:  # where no directory can be written to, asking for one fails
                self._directory = Path(tempfile.gettempdir()) / f"kafkalog-sources-{os.getuid()}"
            self._directory.mkdir(mode=0o700, exist_ok=True)
            if not process or self._directory.stat().st_uid != os.getuid():
                return
            for name in os.listdir(self._directory):
                if processes.has_ended(" ".join(name.split("_")[2:])):
                    (self._directory / name).unlink(missing_ok=True)
            path = self._directory / self._own
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            weakref.finalize(self, _end, self._file, path, os.getpid())
        except OSError:
            self._file = -1

    def _others(self) -> Iterator[tuple[str, int, int]]:
        """(name, asked, answered) of those that may be of this query."""
        if self._file < 0 or self._directory is None:
            return
        try:
            names = os.listdir(self._directory)
        except OSError:
            return
        for name in names:
            if name.startswith(self._driver) and name != self._own and name not in self._of_other_queries:
                try:
                    times = (self._directory / name).read_bytes()
                except OSError:
                    continue
                if len(times) == 2 * _TIME.size:
                    yield name, *(each for (each,) in _TIME.iter_unpack(times))

    def _write(self, at: int, time_ns: int) -> None:
        if self._file >= 0:
            try:
                os.pwrite(self._file, _TIME.pack(time_ns), at)
            except OSError:
                pass


def _end(file: int, path: Path, process: int) -> None:
    if os.getpid() == process:
        os.close(file)
        path.unlink(missing_ok=True)
