"""Partitions of a group's members as messages have them, by topic."""

from __future__ import annotations

from collections.abc import Iterable

from kafkalog.records import TopicPartition, by_topic
from kafkalog.wire import broker_pb2 as pb


def shares_of(partitions: Iterable[TopicPartition]) -> list[pb.GroupShare]:
    """Sorted by topic and number."""
    return [pb.GroupShare(topic=topic, partitions=numbers) for topic, numbers in by_topic(partitions).items()]


def partitions_of(shares: Iterable[pb.GroupShare]) -> list[TopicPartition]:
    """The inverse of `shares_of`."""
    return [TopicPartition(share.topic, number) for share in shares for number in share.partitions]
