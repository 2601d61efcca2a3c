"""Readers called as Spark calls them, over a running cluster, without Spark: for rules to which Spark adds nothing."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructType

from kafkalog import Admin, Producer, TopicPartition
from pyspark_kafkalog.read.stream import NO_LIMIT
from pyspark_kafkalog.source import BatchReader, StreamReader

EVERYTHING = ReadMaxRows(NO_LIMIT)
SCHEMA = StructType.fromJson(
    {
        "type": "struct",
        "fields": [
            {"name": name, "type": kind, "nullable": True, "metadata": {}}
            for name, kind in (("partition", "integer"), ("offset", "long"), ("value", "binary"))
        ],
    }
)
Logged = dict[str, dict[str, int]]


class Live:
    """A cluster with a client, and readers of it.

    Args:
        new_topic: makes names that no other test uses.
    """

    def __init__(self, servers: str, admin: Admin, producer: Producer, new_topic: Callable[[], str]) -> None:
        self.servers = servers
        self.admin = admin
        self.producer = producer
        self.new_topic = new_topic

    def topic(self, *counts: int, **config: Any) -> str:
        """A topic with so many records in each partition; settings in snake_case."""
        name = self.new_topic()
        settings = {key.replace("_", "."): value for key, value in config.items()}
        self.admin.create_topic(name, partitions=len(counts), config=settings)
        for partition, count in enumerate(counts):
            self.append(name, count, partition)
        return name

    def append(self, topic: str, count: int, partition: int = 0, **record: Any) -> None:
        for _ in range(count):
            self.producer.send(topic, **{"value": b"v", "partition": partition, **record})
        self.producer.flush()

    def append_at(self, topic: str, *times_ms: int, partition: int = 0) -> None:
        """A record for each time, in milliseconds."""
        for time_ms in times_ms:
            self.append(topic, 1, partition, timestamp_us=time_ms * 1000)

    def delete_before(self, topic: str, offset: int, partition: int = 0) -> None:
        self.admin.delete_records({TopicPartition(topic, partition): offset})

    def options(self, **options: Any) -> dict[str, str]:
        """Options in connector's spelling, `__` for a dot; whatever is no text as JSON."""
        given = {key.replace("__", "."): value for key, value in options.items()}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
        return {"kafkalog.bootstrap.servers": self.servers, "fetchOffset.retryIntervalMs": "20", **texts}

    def batch(self, **options: Any) -> BatchReader:
        return BatchReader(SCHEMA, self.options(**options))

    def stream(self, **options: Any) -> StreamReader:
        return StreamReader(SCHEMA, self.options(**options))

    def read(self, **options: Any) -> list[list[int]]:
        """The offsets that a batch reads, by partition of the log."""
        reader = self.batch(**options)
        return by_partition(rows(reader, reader.partitions()))

    def start(self, **options: Any) -> Logged:
        """Where a stream starts."""
        return self.stream(**options).initialOffset()


def rows(reader: BatchReader | StreamReader, splits: Any) -> list[tuple[int, int]]:
    """(partition, offset) of the records of splits, read where there is only what was pickled."""
    task = pickle.loads(pickle.dumps(reader))
    return [
        (row["partition"], row["offset"])
        for one_split in splits
        for batch in task.read(pickle.loads(pickle.dumps(one_split)))
        for row in batch.to_pylist()
    ]


def by_partition(found: list[tuple[int, int]]) -> list[list[int]]:
    partitions = max((partition for partition, _ in found), default=-1) + 1
    return [[offset for partition, offset in found if partition == number] for number in range(partitions)]


def ranges(splits: Any) -> list[list[tuple[int, int, int]]]:
    """(partition, start, end) of the ranges of each split."""
    return [[(each.range.partition.partition, each.range.start, each.range.end) for each in s.value] for s in splits]


def read_between(stream: StreamReader, start: Logged, end: Logged) -> list[tuple[int, int]]:
    """What a micro-batch reads."""
    return rows(stream, stream.partitions(start, end))
