"""Consumer groups: how soon all partitions have their owners when members join and leave, what that asks of ZooKeeper,
and how fast one, two and four members read, each a process of its own."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from queue import Empty, Queue
from threading import Condition, Thread
from typing import Any, NamedTuple, Self

import pyarrow as pa

from bench.group_member import Options
from bench.measure import by_turns, rate
from broker.local import LocalCluster
from broker.local.guard import python_command
from kafkalog import Admin, Producer

TOPICS, PARTITIONS = 3, 300
MEMBERS = 10
SETTLED_WITHIN_SECONDS = 60.0
READERS = (1, 2, 4)
READ_PARTITIONS = 8
BATCH = 10_000
RECORD_BYTES = 200


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    partitions = max(10, int(PARTITIONS * scale))
    with LocalCluster(brokers=1) as cluster, Admin(cluster.bootstrap_servers) as admin:
        for number in range(TOPICS):
            admin.create_topic(f"settled-{number}", partitions=partitions)
        is_small = scale < 0.1
        settling = Settling(cluster, TOPICS * partitions, 3 if is_small else MEMBERS)
        for _ in range(1 if is_small else 5):
            settling.run()
        yield from settling.figures()
        yield from throughput(cluster, admin, scale)


class Member:
    """A running member. What it says is read as it comes.

    Args:
        changed: is notified when it owns more or fewer partitions.
    """

    def __init__(self, options: Options, changed: Condition) -> None:
        self._changed = changed
        self._process = subprocess.Popen(
            python_command("bench.group_member", json.dumps(options)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.owned, self.changed_at = 0, 0.0
        self._said: Queue[dict[str, Any]] = Queue()
        self._reading = Thread(target=self._read, daemon=True)
        self._reading.start()
        self.next("is_ready")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fact = json.loads(line)
            if "owned" in fact:
                with self._changed:
                    self.owned, self.changed_at = fact["owned"], fact["at"]
                    self._changed.notify_all()
            else:
                self._said.put(fact)

    def next(self, name: str) -> Any:
        """The next fact that is not about what it owns."""
        try:
            return self._said.get(timeout=SETTLED_WITHIN_SECONDS)[name]
        except Empty:
            raise RuntimeError(f"a member did not say {name} within {SETTLED_WITHIN_SECONDS:.0f} s") from None

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def ended(self) -> None:
        self._process.wait(SETTLED_WITHIN_SECONDS)
        self._reading.join()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reading.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Members(list[Member]):
    """Members that run at the same time. A context manager: they end with its block."""

    def __init__(self, options: Sequence[Options]) -> None:
        self.changed = Condition()
        super().__init__()
        try:
            for each in options:
                self.append(Member(each, self.changed))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for member in self:
            member.close()


def tell(some: Sequence[Member], command: str) -> None:
    for member in some:
        member.tell(command)


def settled(changed: Condition, some: Sequence[Member], partitions: int, since: float) -> float:
    """Wait until these members own all partitions, and each its share; returns seconds from then to the last change."""

    def have_shares() -> bool:
        owned = [member.owned for member in some]
        return sum(owned) == partitions and max(owned) - min(owned) <= 1

    with changed:
        if not changed.wait_for(have_shares, SETTLED_WITHIN_SECONDS):
            owned = [member.owned for member in some]
            raise RuntimeError(f"partitions have no owners after {SETTLED_WITHIN_SECONDS:.0f} s: {owned}")
        return max(member.changed_at for member in some) - since


class Change(NamedTuple):
    """What a change of a group's members took, until all partitions had their owners.

    Attributes:
        writes, requests: transactions that ZooKeeper has written, requests that it has received.
    """

    seconds: float
    writes: int
    requests: int


class Settling:
    """Runs of a group: all members but one join at once, one more joins, one leaves.

    Attributes:
        found: by what was changed, in each run.
    """

    def __init__(self, cluster: LocalCluster, partitions: int, size: int) -> None:
        self._cluster = cluster
        self._partitions = partitions
        self._size = size
        self._runs = count()
        self.found: dict[str, list[Change]] = {}

    def run(self) -> None:
        options = Options(self._cluster.bootstrap_servers, f"settling-{next(self._runs)}", "settled-")
        with Members([options] * (self._size + 1)) as everybody:
            changed, first, more = everybody.changed, everybody[:-1], everybody[-1]
            self._timed(f"{self._size} join at once", changed, first, lambda: tell(first, "join"))
            self._timed("one more joins", changed, everybody, lambda: more.tell("join"))
            self._timed("one leaves", changed, first, lambda: more.tell("leave"))
            more.ended()
            tell(first, "leave")
            for member in first:
                member.ended()

    def _timed(self, name: str, changed: Condition, some: Sequence[Member], change: Callable[[], object]) -> None:
        writes, requests = self._zookeeper()
        begun = time.time()
        change()
        seconds = settled(changed, some, self._partitions, begun)
        writes_after, requests_after = self._zookeeper()
        took = Change(seconds, writes_after - writes, requests_after - requests)
        self.found.setdefault(name, []).append(took)

    def _zookeeper(self) -> tuple[int, int]:
        """How many transactions ZooKeeper has written, and how many requests it has received."""
        assert self._cluster.zookeeper is not None
        host, port = self._cluster.zookeeper.connect.split("/")[0].rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"srvr")
            text = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
        facts = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        return int(facts["Zxid"], 16) & 0xFFFFFFFF, int(facts["Received"])

    def figures(self) -> Iterator[dict[str, object]]:
        for name, found in self.found.items():
            yield {
                "name": name,
                "value": round(statistics.median(each.seconds for each in found), 3),
                "unit": "s",
                "partitions": self._partitions,
                "members": self._size,
                "seconds": [round(each.seconds, 3) for each in found],
                "zookeeper_writes": statistics.median(each.writes for each in found),
                "zookeeper_requests": statistics.median(each.requests for each in found),
            }


def throughput(cluster: LocalCluster, admin: Admin, scale: float) -> Iterator[dict[str, object]]:
    """Records a second of all members together; and how much of its equal share the slowest has read a second."""
    batches = max(1, int(50 * scale))  # in each partition
    records = batches * READ_PARTITIONS * BATCH
    admin.create_topic("read", partitions=READ_PARTITIONS)
    rows = pa.record_batch([pa.array([bytes(RECORD_BYTES)] * BATCH, pa.binary())], names=["value"])
    with Producer(cluster.bootstrap_servers, acks=1) as producer:
        for number in range(batches * READ_PARTITIONS):
            producer.send_arrow("read", rows, partition=number % READ_PARTITIONS)
        producer.flush()
    runs = count()
    shares: dict[int, list[float]] = {}

    def read(size: int) -> float:
        options = Options(cluster.bootstrap_servers, f"read-{next(runs)}", "read", records // size)
        with Members([options] * size) as some:
            begun = time.time()
            tell(some, "join")
            settled(some.changed, some, READ_PARTITIONS, begun)
            tell(some, "go")
            seconds: list[float] = [member.next("seconds") for member in some]
            tell(some, "leave")
            for member in some:
                member.ended()
        rates = [1 / each for each in seconds]
        shares.setdefault(size, []).append(min(rates) / statistics.mean(rates))
        return max(seconds)

    times = by_turns({str(size): partial(read, size) for size in READERS}, scale)
    for size in READERS:
        taken = times[str(size)]
        yield {
            "name": f"{size} of a group read",
            "value": round(rate(records, taken)),
            "unit": "records/s",
            "records": records,
            "record_bytes": RECORD_BYTES,
            "seconds": [round(each, 4) for each in taken],
            "slowest_of_its_share": round(statistics.median(shares[size][-len(taken) :]), 3),
        }
