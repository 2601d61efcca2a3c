"""A pool of threads that a machine without a thread left does not break.

`ThreadPoolExecutor.submit` puts its item into the queue and then starts a thread. Where none can be started (pids.max
of a container, ulimit -u, no memory) it raises, and the item stays queued for a thread that may never come.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kafkalog.errors import OutOfThreads
from kafkalog.events import get_logger

log = get_logger(__name__)


class Pool(ThreadPoolExecutor):
    """Threads, made as they are needed. What is submitted is done by those that are there, if no other can be started;
    if there is none, `submit` raises OutOfThreads, and nothing of it is left in the queue.

    Args:
        threads: at most.
        process: the process that the error names.
    """

    def __init__(
        self,
        threads: int,
        *,
        process: str,
        thread_name_prefix: str = "",
        initializer: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(threads, thread_name_prefix, initializer)
        self._process = process
        self._is_short = False

    def _adjust_thread_count(self) -> None:
        """Called by `submit`, under its lock, once the item is queued."""
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not self._is_short:  # once, however many are submitted
                log.warning("thread_not_started", pool=self._thread_name_prefix, reason=str(error))
            self._is_short = True
            if not self._threads:
                self._work_queue.get_nowait()  # the item: without a thread nobody else takes any
                raise OutOfThreads(process=self._process, reason=str(error)) from None
        else:
            self._is_short = False
