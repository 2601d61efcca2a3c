"""Spark's daemon for the Python workers of tasks (`spark.python.daemon.module`): PySpark's, but its workers end
silently when Spark releases them (`idle_workers.py`)."""

from __future__ import annotations

from pyspark import daemon

from pyspark_kafkalog.idle_workers import ending_silently

if __name__ == "__main__":
    daemon.worker = ending_silently(daemon.worker)  # type: ignore[assignment]
    daemon.manager()
