"""Makes Python workers end without a traceback when Spark releases them. A worker also sets aside what it has imported
after its first task, so that PySpark's `gc.collect()` after each task is short.

A worker that waits for its next task reads the end of its socket when Spark releases it, a minute after its last use or
with the application. PySpark treats that as a failure and writes it to the socket, which is no longer read. Over TCP
this has no effect; over a Unix socket it is a BrokenPipeError, whose traceback follows the output of a run without any
error. A worker whose reader has enough rows, as with a `limit`, ends in the same way.

PySpark's daemon calls `gc.collect()` after each task. With what PySpark, pyarrow and kafkalog import, it looks at
54,000 objects in 10 ms of processor time, and a micro-batch has at least two workers a task: they are set aside once.

Spark starts the workers of tasks with the module that `spark.python.daemon.module` names (`daemon.py`). Those that look
for data sources, plan and commit it starts with PySpark's own, whatever that says; they import this package, and are
changed from within. Imports nothing heavy: see `__init__.py`.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Callable
from typing import Any

Worker = Callable[[socket.socket, bool], int]
_PYSPARKS_DAEMON = "pyspark.daemon"


def ending_silently(worker: Worker) -> Worker:
    """PySpark's function for one task, changed to do nothing if Spark has released the worker, and to set aside, after
    the first task, what is there for good."""
    is_set_aside = False

    def work(sock: socket.socket, authenticated: bool) -> int:
        nonlocal is_set_aside
        try:
            if not sock.recv(1, socket.MSG_PEEK):
                return 1  # no further task
            code = worker(sock, authenticated)
        except (BrokenPipeError, ConnectionResetError):
            return 1
        if not is_set_aside:
            gc.collect()  # what is garbage by now would never be collected
            gc.freeze()
            is_set_aside = True
        return code

    return work


def end_silently() -> None:
    """Make this process, if it is a worker of PySpark's own daemon, end silently after its current task.

    Its loop looks `worker` up in the main module before each task.
    """
    main: Any = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) == _PYSPARKS_DAEMON and hasattr(main, "worker"):
        main.worker = ending_silently(main.worker)
