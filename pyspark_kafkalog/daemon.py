"""Spark's daemon for the Python workers of tasks (`spark.python.daemon.module`): PySpark's, but its workers end
silently when Spark releases them (`idle_workers.py`), and have imported what a task needs when they are forked.

A worker ends whenever Spark has enough rows of its task, as with `limit` and `show`, and PySpark's next one imports
everything again, in 0.6 to 1 s. What is imported here starts threads (numpy's of OpenBLAS, pyarrow's of its allocator),
but both libraries provide for a fork; nothing of gRPC's runs before a channel is opened.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from contextlib import suppress
from zipimport import zipimporter

from pyspark import daemon

from pyspark_kafkalog.idle_workers import ending_silently

AHEAD = (
    "pyspark.worker",
    "pyarrow.compute",
    "pyspark_kafkalog.source",
    "pyspark_kafkalog.sink",
    "kafkalog.client.cluster",
    "kafkalog.client.consumer.range_fetch",
    "kafkalog.client.producer.producer",
    "kafkalog.client.producer.tables",
    "kafkalog.client.transaction.coordinator",
    "kafkalog.client.transaction.stager",
)
"""Modules that tasks import; with those that these import."""


def import_ahead() -> None:
    """Import what tasks need, and set it aside: the workers share its memory, and their garbage collector leaves it
    alone. What cannot be imported, for whatever reason, is a task's error, if it needs it; what is printed meanwhile
    goes to stderr, because stdout is where Spark reads the daemon's port.

    Finders of zip files are forgotten: PySpark has each worker refresh all finders, and these read all of PySpark's
    own archive again, five times, in 0.2 s. They are made again when something is imported that is not found before.
    """
    stdout = os.dup(1)
    os.dup2(2, 1)
    for name in AHEAD:
        with suppress(Exception):
            importlib.import_module(name)
    sys.stdout.flush()
    os.dup2(stdout, 1)
    os.close(stdout)
    os.register_at_fork(after_in_child=_reseed)
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[path]
    gc.collect()
    gc.freeze()


def _reseed() -> None:
    """In a worker: random numbers of its own, should numpy's global generator exist before the fork."""
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        numbers.seed()


if __name__ == "__main__":
    import_ahead()
    daemon.worker = ending_silently(daemon.worker)  # type: ignore[assignment]
    daemon.manager()
