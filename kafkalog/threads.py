"""A pool of threads that still works if the machine cannot start another thread.

`ThreadPoolExecutor.submit` puts its item into the queue and then starts a thread. If none can be started (pids.max of a
container, ulimit -u, no memory) it raises, and the item stays queued for a thread that may never come.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kafkalog.errors import OutOfThreads
from kafkalog.events import get_logger

log = get_logger(__name__)


class Pool(ThreadPoolExecutor):
    """Threads, created when needed. If no further thread can be started, the existing ones do the work. If there is
    none at all, `submit` raises OutOfThreads, and the item is not left in the queue.

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
            if not self._is_short:  # logged once, however many are submitted
                log.warning("thread_not_started", pool=self._thread_name_prefix, reason=str(error))
            self._is_short = True
            if not self._threads:
                self._work_queue.get_nowait()  # the item: without threads none other takes it
                raise OutOfThreads(process=self._process, reason=str(error)) from None
        else:
            self._is_short = False
