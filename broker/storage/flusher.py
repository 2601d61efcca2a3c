"""The threads that flush the logs of one data directory, at once or within a given time. Knows tasks, not what they
flush.

Four threads flush, for group commit: the file system joins their fdatasyncs of several partitions into one journal
commit. A fifth thread waits for the flushes that are due later.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from broker.storage.disk_errors import DirectoryHealth
from kafkalog.clock import Clock
from kafkalog.errors import Closed, DiskFull, StorageFailed
from kafkalog.events import get_logger

log = get_logger(__name__)

_THREADS = 4
_FULL_RETRY_SECONDS = 1.0
WAIT_SECONDS_MAX = 86_400.0
"""Maximum duration of one wait. The system accepts at most some weeks, but settings may be any number of
milliseconds."""


@dataclass(order=True, slots=True)
class _Deadline:
    """When a task is due. `task` is None if the deadline was cancelled."""

    at: float
    ticket: int
    task: FlushTask | None = field(compare=False)


@dataclass(eq=False, slots=True)
class FlushTask:
    """A flush of one partition's log, or of its staged parts, in the background.

    Attributes:
        label: the partition's name for errors and events.
        flush: does the flush. If it raises DiskFull, it is called again a second later.
    """

    label: str
    flush: Callable[[], object]


class Flusher:
    """Runs flush tasks in its threads. Thread-safe. Tasks submitted before `start` run after it.

    Attributes:
        soon: submit a task to the next free thread.
    """

    def __init__(self, health: DirectoryHealth, clock: Clock) -> None:
        self._health = health
        self._clock = clock
        self._due: queue.SimpleQueue[FlushTask | None] = queue.SimpleQueue()
        self.soon: Callable[[FlushTask], None] = self._due.put
        self._changed = threading.Condition()  # guards the attributes below; taken after any log's locks
        self._timed: dict[FlushTask, _Deadline] = {}
        self._deadlines: list[_Deadline] = []  # a heap: those in _timed, and cancelled ones
        self._ticket = itertools.count()
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._threads = [
            *(threading.Thread(target=self._flush_loop, name=f"flusher-{i}", daemon=True) for i in range(_THREADS)),
            threading.Thread(target=self._timer_loop, name="flush-timer", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Run the submitted tasks, and end the threads. Tasks that are due later do not run."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for _ in self._threads:
            self._due.put(None)
        for thread in self._threads:
            thread.join()

    def within(self, task: FlushTask, seconds: float) -> None:
        """Submit a task after a delay. If it is already due earlier, the earlier deadline stays."""
        deadline = self._clock.monotonic() + seconds
        with self._changed:
            known = self._timed.get(task)
            if known is not None:
                if known.at <= deadline:
                    return
                known.task = None
            mine = self._timed[task] = _Deadline(deadline, next(self._ticket), task)
            heapq.heappush(self._deadlines, mine)
            if self._deadlines[0] is mine:
                self._changed.notify_all()

    def cancel(self, task: FlushTask) -> None:
        """Cancel the deadline that `within` set for a task: it has run, or there is nothing to flush any more."""
        with self._changed:
            known = self._timed.pop(task, None)
            if known is not None:
                known.task = None

    def _flush_loop(self) -> None:
        while (task := self._due.get()) is not None:
            try:
                task.flush()
            except (StorageFailed, Closed):
                pass  # a failure is already logged, and a closed log needs no flush
            except DiskFull as full:
                self._health.log_full(full, task.label)
                self.within(task, _FULL_RETRY_SECONDS)
            except Exception:
                log.exception("flush_failed", partition=task.label)

    def _timer_loop(self) -> None:
        with self._changed:
            while not self._stopping:
                try:
                    self._changed.wait(self._take_due())
                except Exception:  # flush.ms of every topic depends on this thread
                    log.exception("flush_timer_failed")
                    self._changed.wait(1.0)

    def _take_due(self) -> float | None:
        """Submit the tasks that are due. Returns the seconds until the next deadline, or None if there is none."""
        now = self._clock.monotonic()
        while self._deadlines and (self._deadlines[0].task is None or self._deadlines[0].at <= now):
            due = heapq.heappop(self._deadlines).task
            if due is not None:
                del self._timed[due]
                self.soon(due)
        return min(self._deadlines[0].at - now, WAIT_SECONDS_MAX) if self._deadlines else None
