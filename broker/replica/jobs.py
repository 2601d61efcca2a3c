"""Jobs: work on partitions that may take minutes, in threads of its own. A request waits a bounded time for a job and
returns its progress; a repeated request waits for the same job.

Jobs of one partition run one after the other, those of several in parallel. Knows nothing of what jobs do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from typing import Any

from kafkalog.errors import BrokerStopping, KafkalogError
from kafkalog.threads import Pool


class Job:
    """A piece of work: waiting, running or over."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.begun = False  # set under the lock of `Jobs`, so that it has begun or was given up
        self._work = work
        self._outcome: Future[Any] = Future()

    @property
    def is_over(self) -> bool:
        return self._outcome.done()

    def wait(self, seconds: float) -> bool:
        """Whether it is over, after so long at most."""
        try:
            self._outcome.exception(max(0.0, seconds))
        except TimeoutError:
            return False
        return True

    def when_over(self, call: Callable[[], object]) -> None:
        """Have it called once the job is over, by the thread that ends it; at once if it is over already."""
        self._outcome.add_done_callback(lambda _: call())

    def result(self) -> Any:
        """What the work returned, or raises what it raised; once it is over."""
        assert self.is_over, "the job is not over"
        return self._outcome.result()

    def run(self) -> None:
        try:
            result = self._work()
        except Exception as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(result)

    def give_up(self, error: Exception) -> None:
        self._outcome.set_exception(error)


class Jobs:
    """Jobs by key, in a few threads. Thread-safe.

    Args:
        stopped: makes what those get that ask after `stop`, or wait for a job that has not begun by then.
    """

    def __init__(self, threads: int, name: str, stopped: Callable[[], KafkalogError]) -> None:
        self._lock = threading.Lock()  # guards all below
        self._jobs: dict[Hashable, Job] = {}
        self._waiting: dict[Hashable, deque[tuple[Hashable, Job]]] = {}  # by partition; there while one of it runs
        self._threads = Pool(threads, process="the broker", thread_name_prefix=name)
        self._stopped = False
        self._when_stopped = stopped

    def ask(self, partition: Hashable, key: Hashable, work: Callable[[], Any]) -> Job:
        """The job of that key that waits or runs, or else a new one. Raises OutOfThreads, or as `stopped` says after
        `stop`."""
        key = partition, key
        with self._lock:
            if self._stopped:
                raise self._when_stopped()
            job = self._jobs.get(key)
            if job is None:
                job = Job(work)
                if partition in self._waiting:
                    self._waiting[partition].append((key, job))
                else:
                    self._threads.submit(self._run, partition)  # first, for it may raise; it needs the lock
                    self._waiting[partition] = deque([(key, job)])
                self._jobs[key] = job
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
        """Give up what waits. What runs ends by itself as soon as its log is closed. Safe to call twice."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            for jobs in self._waiting.values():
                for _, job in jobs:
                    job.give_up(self._when_stopped())
        self._threads.shutdown(wait=False)


class StagedJobs:
    """Where prepares wait for their syncs, and where sets are applied and dropped, whoever asks for it. Two sets
    are applied at a time, for what a partition has of a batch is hidden until all of it is there, and more side by side
    would hide each for longer; four syncs are waited for."""

    def __init__(self, broker_id: int) -> None:
        stopping = partial(BrokerStopping, broker_id=broker_id)
        self.syncs = Jobs(4, "prepare", stopping)
        self.applies = Jobs(2, "apply", stopping)

    def stop(self) -> None:
        """Take no more jobs, and give up those that wait."""
        self.syncs.stop()
        self.applies.stop()
