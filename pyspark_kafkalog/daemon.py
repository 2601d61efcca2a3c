"""Spark's daemon for Python workers (`spark.python.daemon.module`), without what it prints when Spark has ended one.

A worker that waits for its next task reads the end of its socket when Spark lets it go, a minute after its last use or
with the application. PySpark's takes that for a failure and tells it to the socket, which nobody reads any more. Over
TCP that goes unnoticed; over a Unix socket it is a BrokenPipeError, whose traceback follows the output of a run in
which nothing went wrong. A worker whose reader has enough, as of a `limit`, ends in the same way.
"""

from __future__ import annotations

import socket

from pyspark import daemon

_worker = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """One task, as PySpark's; nothing at all if Spark has let go of the worker."""
    try:
        if not sock.recv(1, socket.MSG_PEEK):
            return 1  # no further task
        return _worker(sock, authenticated)
    except (BrokenPipeError, ConnectionResetError):
        return 1


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
