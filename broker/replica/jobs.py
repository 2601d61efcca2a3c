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
        self.begun = False  # set under the lock of `Jobs`: a job is either begun or given up
        self._work = work
        self._outcome: Future[Any] = Future()

    @property
    def is_over(self) -> bool:
        return self._outcome.done()

    def wait(self, seconds: float) -> bool:
        """Wait until it is over, for at most so many seconds; returns whether it is."""
        try:
            self._outcome.exception(max(0.0, seconds))
        except TimeoutError:
            return False
        return True

    def when_over(self, call: Callable[[], object]) -> None:
        """Register a function that the job's thread calls at the end of the job; called at once if the job is over."""
        self._outcome.add_done_callback(lambda _: call())

    def result(self) -> Any:
        """Return the work's result, or raise its error; the job must be over."""
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
        stopped: makes the error for requests after `stop`, and for jobs that have not begun by then.
    """

    def __init__(self, threads: int, name: str, stopped: Callable[[], KafkalogError]) -> None:
        self._lock = threading.Lock()  # guards all below
        self._jobs: dict[Hashable, Job] = {}
        self._waiting: dict[Hashable, deque[tuple[Hashable, Job]]] = {}  # by partition, while one of its jobs runs
        self._threads = Pool(threads, process="the broker", thread_name_prefix=name)
        self._stopped = False
        self._when_stopped = stopped

    def ask(self, partition: Hashable, key: Hashable, work: Callable[[], Any]) -> Job:
        """The waiting or running job of that key, or else a new one. Raises OutOfThreads; after `stop`, the error of
        `stopped`."""
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
                    self._threads.submit(self._run, partition)  # first, because it may raise; the thread needs the lock
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
                self._threads.submit(self._run, partition)  # after other partitions

    def stop(self) -> None:
        """Give up the waiting jobs. Running jobs end when their logs are closed. Safe to call twice."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            for jobs in self._waiting.values():
                for _, job in jobs:
                    job.give_up(self._when_stopped())
        self._threads.shutdown(wait=False)


class StagedJobs:
    """The jobs of staged writes: prepares that wait for their syncs, and applies and drops, for requests and for
    in-doubt recovery. Two sets are applied at a time, because a partition's log is hidden until all of a batch is
    there, and more in parallel would hide each for longer. Four prepares wait for syncs at a time."""

    def __init__(self, broker_id: int) -> None:
        stopping = partial(BrokerStopping, broker_id=broker_id)
        self.syncs = Jobs(4, "prepare", stopping)
        self.applies = Jobs(2, "apply", stopping)

    def stop(self) -> None:
        """Take no more jobs, and give up those that wait."""
        self.syncs.stop()
        self.applies.stop()
