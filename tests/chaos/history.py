"""What clients did to a cluster, as they wrote it themselves: operations as Jepsen's, with outcomes ok, fail and info.

Each client appends the lines of one file, a JSON array each, by one call to the system, so a process that is killed
leaves whole lines. Times are of the monotonic clock that all processes of a machine share, in nanoseconds. Values are
unique texts. Knows no cluster and no rule (`checker.py` has them).

| what   | outcomes       | means                                                                                 |
|--------|----------------|---------------------------------------------------------------------------------------|
| send   | invoke         | these values are sent to the partition, in this order                                 |
| send   | ok, fail, info | these are acknowledged, at these offsets; not written for certain; unknown            |
| stage  | invoke         | these values are staged for the partition, in the attempt `run` of the batch `number` |
| commit | ok, fail, info | the attempt `run` of the batch `number` is in the log, never will be, or unknown      |
| batch  | ok             | the batch `number` is in the log, by one of its attempts                              |
| assign | ok             | `run` reads the partition from offset `number` on                                     |
| poll   | ok             | `run` was handed these records                                                        |
| latest | ok             | the partition's end was `number` at some time after `since_ns`                        |
| read   | ok             | the partition has these records when all is over; several lines make one read         |

A send or a commit without an outcome, as of a client that was killed, is as one with info.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from kafkalog.records import TopicPartition

SUFFIX = ".operations"
NO_OFFSET = -1

Record = tuple[int, str]
"""(offset, value); NO_OFFSET where it is not known."""


class Operation(NamedTuple):
    """A line of a history. `time_ns` is when it was written; the rest is as in the module's table."""

    time_ns: int
    client: str
    what: str
    outcome: str
    partition: TopicPartition
    records: tuple[Record, ...] = ()
    number: int = 0
    run: str = ""
    since_ns: int = 0


NOWHERE = TopicPartition("", -1)


class Recorder:
    """Appends a client's operations to its file, from any thread."""

    def __init__(self, folder: Path, client: str) -> None:
        self.client = client
        self._fd = os.open(folder / (client + SUFFIX), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)

    def write(
        self,
        what: str,
        outcome: str,
        partition: TopicPartition = NOWHERE,
        records: Iterable[Record] = (),
        number: int = 0,
        run: str = "",
        since_ns: int = 0,
    ) -> None:
        """Write what has just happened, or is about to (`invoke`)."""
        line = [time.monotonic_ns(), what, outcome, *partition, list(records), number, run, since_ns]
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def read(folder: Path) -> list[Operation]:
    """All operations of a folder, in the order of time. A line that is not whole is left out."""
    clients = sorted(path.stem for path in folder.glob("*" + SUFFIX))
    found = [operation for client in clients for operation in read_client(folder, client)]
    return sorted(found, key=lambda operation: operation.time_ns)


def read_client(folder: Path, client: str) -> Iterator[Operation]:
    """What one client has written; nothing if it has no file."""
    path = folder / (client + SUFFIX)
    data = path.read_bytes() if path.exists() else b""
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        time_ns, what, outcome, topic, number_of, records, number, run, since_ns = json.loads(line)
        whole = tuple((offset, value) for offset, value in records)
        partition = TopicPartition(topic, number_of)
        yield Operation(time_ns, client, what, outcome, partition, whole, number, run, since_ns)
