"""Work on partitions that may take minutes, in threads of its own: a request waits a bounded time for it and says how
far it is, and one that comes again while the work goes on waits for the same work.

Jobs of one partition run one after the other, those of several side by side. Knows nothing of what they do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kafkalog.errors import KafkalogError


class Job:
    """A piece of work: waiting, running or over."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.begun = False  # set under the lock of `Jobs`, so that it has begun or was given up
        self._work = work
        self._over = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def wait(self, seconds: float) -> bool:
        """Whether it is over, after so long at most."""
        return self._over.wait(max(0.0, seconds))

    def result(self) -> Any:
        """What the work returned, or raises what it raised; once it is over."""
        assert self._over.is_set(), "the job is not over"
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
        finally:
            self._over.set()

    def give_up(self, error: Exception) -> None:
        self._error = error
        self._over.set()


class Jobs:
    """Jobs by key, in a few threads. Thread-safe.

    Args:
        stopped: makes what those get that ask after `stop`, or wait for a job that has not begun by then.
    """

    def __init__(self, threads: int, name: str, stopped: Callable[[], KafkalogError]) -> None:
        self._lock = threading.Lock()  # guards all below
        self._jobs: dict[Hashable, Job] = {}
        self._waiting: dict[Hashable, deque[tuple[Hashable, Job]]] = {}  # by partition; there while one of it runs
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._stopped = False
        self._when_stopped = stopped

    def ask(self, partition: Hashable, key: Hashable, work: Callable[[], Any]) -> Job:
        """The job of that key that waits or runs, or else a new one. Raises as `stopped` says after `stop`."""
        key = partition, key
        with self._lock:
            if self._stopped:
                raise self._when_stopped()
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = Job(work)
                if partition in self._waiting:
                    self._waiting[partition].append((key, job))
                else:
                    self._waiting[partition] = deque([(key, job)])
                    self._threads.submit(self._run, partition)
            return job

    def is_busy(self, partition: Hashable) -> bool:
        """Whether a job of that partition waits or runs."""
        with self._lock:
            return partition in self._waiting

    def _run(self, partition: Hashable) -> None:
        with self._lock:
            if self._stopped:
                return
            key, job = self._waiting[partition].popleft()
            job.begun = True
        job.run()
        with self._lock:
            del self._jobs[key]
            if not self._waiting[partition]:
                del self._waiting[partition]
            elif not self._stopped:
                self._threads.submit(self._run, partition)  # behind other partitions

    def stop(self) -> None:
        """Give up what waits. What runs ends by itself as soon as its log is closed."""
        with self._lock:
            self._stopped = True
            for jobs in self._waiting.values():
                for _, job in jobs:
                    job.give_up(self._when_stopped())
        self._threads.shutdown(wait=False)
