"""The options of a read as one value, and the rules between them. Text to typed values; pure.

The options themselves are rows of the table in `options.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kafkalog.errors import InvalidArgument
from kafkalog.records import TopicPartition
from pyspark_kafkalog.offsets import LATEST, Bound
from pyspark_kafkalog.options import (
    BATCH_READ,
    OPTIONS,
    READ,
    SELECTIONS,
    STREAM_READ,
    bootstrap_servers,
    client_settings,
    default_of,
    defaults,
    option_values,
)
from pyspark_kafkalog.read.group_start import default_group


@dataclass(frozen=True)
class Selection:
    """The selection of partitions to read: the option's name and its parsed value."""

    option: str
    value: Any

    def matches(self, topic: str) -> bool:
        """Whether subscribePattern is found in a topic's name, as in Spark's Kafka connector."""
        assert self.option == "subscribePattern"
        return re.search(self.value, topic) is not None

    def topics(self) -> tuple[str, ...]:
        """The topics that subscribe or assign name."""
        assert self.option != "subscribePattern"
        if self.option == "subscribe":
            names: tuple[str, ...] = self.value
            return names
        return tuple(sorted({partition.topic for partition in self.value}))

    def words(self, between: str = " ") -> str:
        """What is read, for a person's eyes."""
        value = self.value if isinstance(self.value, str) else ", ".join(str(each) for each in self.value)
        return f"{self.option}{between}{value}"

    def takes(self, partition: TopicPartition) -> bool:
        """Whether a partition is read, if it is there."""
        if self.option == "subscribePattern":
            return self.matches(partition.topic)
        return (partition.topic if self.option == "subscribe" else partition) in self._named

    @cached_property
    def _named(self) -> frozenset[Any]:
        """The topics of subscribe, or the partitions of assign."""
        return frozenset(self.value)


@dataclass(frozen=True)
class SourceOptions:
    """What a read was asked for. `start` and `end` are None where nothing was given: the default depends on batch or
    stream. Limits and numbers of splits are None where there are none."""

    bootstrap_servers: str
    client: dict[str, str]
    selection: Selection
    start: Bound | None
    end: Bound | None
    include_headers: bool
    columns: tuple[str, ...] | None
    max_offsets_per_trigger: int | None
    group: str
    committed_fallback: str
    max_bytes_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_s: float
    min_partitions: int | None
    max_records_per_partition: int | None
    max_input_partitions: int | None
    min_records_per_partition: int | None
    fail_on_data_loss: bool
    poll_timeout_ms: int | None
    fetch_attempts: int
    fetch_retry_interval_ms: int
    given: frozenset[str]
    """The names of all options that were given, as documented."""

    def batch_bounds(self) -> tuple[Bound, Bound]:
        """Start and end of a batch read."""
        start = self.start or _default_bound("startingOffsets", BATCH_READ)
        return start, self.end or _default_bound("endingOffsets", BATCH_READ)

    def stream_start(self) -> Bound:
        """Start of a stream whose checkpoint is new."""
        return self.start or _default_bound("startingOffsets", STREAM_READ)

    def only_for_streams(self) -> list[str]:
        """The options given that a batch read ignores."""
        return sorted(
            option.name for option in OPTIONS if option.used_by == (STREAM_READ,) and option.name in self.given
        )

    def only_for_batches(self) -> list[str]:
        """The options given that mean nothing to a stream, which has no end."""
        return sorted(
            option.name for option in OPTIONS if option.used_by == (BATCH_READ,) and option.name in self.given
        )


def parse_source(options: Mapping[str, str]) -> SourceOptions:
    """The options of a read, those of batch and stream alike. Raises InvalidArgument."""
    from kafkalog.client.config import ConsumerSettings

    given = option_values(options, READ)
    values = defaults(READ) | given
    client = client_settings(options, ConsumerSettings)
    ConsumerSettings.parse(client)
    chosen = [name for name in SELECTIONS if name in given]
    if len(chosen) != 1:
        number = "only one" if chosen else "one"
        raise InvalidArgument(reason=f"a read needs {number} of the options {', '.join(chosen or SELECTIONS)}")
    no_match = LATEST if values["startingOffsetsByTimestampStrategy"] == "latest" else None
    _check_combinations(given)
    return SourceOptions(
        bootstrap_servers=bootstrap_servers(given),
        client=client,
        selection=Selection(chosen[0], given[chosen[0]]),
        start=_bound(given, "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets", no_match),
        end=_bound(given, "endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets", LATEST),
        include_headers=values["includeHeaders"],
        columns=values["columns"],
        max_offsets_per_trigger=values["maxOffsetsPerTrigger"],
        max_bytes_per_trigger=values["maxBytesPerTrigger"],
        min_offsets_per_trigger=values["minOffsetsPerTrigger"],
        max_trigger_delay_s=values["maxTriggerDelay"],
        min_partitions=values["minPartitions"],
        max_records_per_partition=values["maxRecordsPerPartition"],
        max_input_partitions=values["maxInputPartitions"],
        min_records_per_partition=values["minRecordsPerPartition"],
        fail_on_data_loss=values["failOnDataLoss"],
        poll_timeout_ms=values["kafkaConsumer.pollTimeoutMs"],
        fetch_attempts=values["fetchOffset.numRetries"],
        fetch_retry_interval_ms=values["fetchOffset.retryIntervalMs"],
        given=frozenset(given),
        group=values["kafkalog.group.id"] or default_group(chosen[0], given[chosen[0]], values["groupIdPrefix"]),
        committed_fallback=values["committed.fallback"],
    )


def _default_bound(option: str, use: str) -> Bound:
    return Bound(option, default_of(option, use))


def _bound(
    values: Mapping[str, Any], by_time: str, by_times: str, by_offsets: str, no_match: int | None
) -> Bound | None:
    """Where a read starts or ends: one time comes before times by partition, and those before offsets."""
    for name in (by_time, by_times):
        if name in values:
            return Bound(name, values[name], by_time=True, no_match=no_match)
    return Bound(by_offsets, values[by_offsets]) if by_offsets in values else None


def _check_combinations(values: Mapping[str, Any]) -> None:
    """Raises InvalidArgument for options that contradict each other."""
    for low, high in (("minOffsetsPerTrigger", "maxOffsetsPerTrigger"), ("minPartitions", "maxInputPartitions")):
        if low in values and high in values and values[low] > values[high]:
            raise InvalidArgument(reason=f"{low} ({values[low]}) is greater than {high} ({values[high]})")
    for fewer in ("maxInputPartitions", "minRecordsPerPartition"):
        if "maxRecordsPerPartition" in values and fewer in values:
            raise InvalidArgument(
                reason=f"maxRecordsPerPartition and {fewer} contradict each other: a bounded number of splits cannot "
                "each have a bounded number of records; give one of them"
            )
