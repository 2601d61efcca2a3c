"""A member of a group as a process of its own, for `bench/groups.py`. It does what lines on its standard input say, and
prints a line of JSON whenever it owns more or fewer partitions, and when it has read what it was to read.

Commands, each once and in this order: `join`; `go`, if it is to read so many records; `leave`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any, NamedTuple

from kafkalog import Consumer, TopicPartition


class Options(NamedTuple):
    """What a member reads.

    Attributes:
        records: to be read after `go`, and timed; 0: whatever there is, until `leave`.
    """

    bootstrap_servers: str
    group: str
    pattern: str
    records: int = 0


def say(**facts: object) -> None:
    print(json.dumps({"at": time.time(), **facts}), flush=True)


class Owned:
    """The callbacks that say what a member owns. What it is to read only after `go` is paused."""

    def __init__(self, pauses: bool) -> None:
        self._pauses = pauses
        self._partitions: set[TopicPartition] = set()

    def assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._pauses:
            consumer.pause(partitions)
        self._partitions.update(partitions)
        say(owned=len(self._partitions))

    def revoked(self, _: Any, partitions: list[TopicPartition]) -> None:
        self._partitions.difference_update(partitions)
        say(owned=len(self._partitions))


def main() -> int:
    options = Options(*json.loads(sys.argv[1]))
    commands = sys.stdin
    owned = Owned(pauses=bool(options.records))
    told = threading.Event()  # to read, or to leave

    def follow() -> None:
        commands.readline()
        told.set()

    with Consumer(options.bootstrap_servers, group=options.group, auto_offset_reset="earliest") as consumer:
        say(is_ready=True)
        commands.readline()
        consumer.subscribe("^" + options.pattern, on_assigned=owned.assigned, on_revoked=owned.revoked)
        threading.Thread(target=follow, daemon=True).start()
        while not told.is_set():
            consumer.consume(1000, 0.1)
        if options.records:
            consumer.resume(consumer.paused())
            begun, left = time.perf_counter(), options.records
            while left:
                left -= len(consumer.consume(min(left, 10_000), 10.0))
            say(seconds=time.perf_counter() - begun)
            commands.readline()
    return 0
