"""Where a member begins to read partitions of which its group has no offset, by `auto.offset.reset`. Brokers are asked
for it in the background: one that is away holds up neither what others lead nor the member."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from kafkalog.client.admin import ListedOffset, list_offsets
from kafkalog.client.background import BackgroundCall, in_background
from kafkalog.client.cluster import NO_LEADER, Cluster
from kafkalog.errors import KafkalogError, RetriableError, UnknownPartition, UnknownTopic, UnknownTopicId
from kafkalog.events import get_logger
from kafkalog.net.main_thread import Signal
from kafkalog.records import TopicPartition

log = get_logger(__name__)

_PAUSE_SECONDS = 2.0
_DELETED = (UnknownTopic, UnknownTopicId, UnknownPartition)
"""Of a topic that was deleted. The group will take its partitions away, so who reads is not told."""


class _Asked(NamedTuple):
    """Of one partition.

    Attributes:
        topic_ids: of its topic and others, when it was asked for.
    """

    future: BackgroundCall[dict[TopicPartition, ListedOffset]]
    topic_ids: Mapping[str, bytes]


class Found(NamedTuple):
    """Starts, and the ids of their topics when they were asked for."""

    offsets: dict[TopicPartition, int]
    topic_ids: Mapping[str, bytes]


class Starts:
    """What is being looked up.

    Args:
        reset: `earliest` or `latest`.
        changed: notified when something was found; its lock guards all here.
        closing: set at the end.
    """

    def __init__(self, cluster: Cluster, group: str, reset: str, changed: threading.Condition, closing: Signal) -> None:
        self._cluster = cluster
        self._group = group
        self._reset = reset
        self._changed = changed
        self._closing = closing
        self._asked: dict[TopicPartition, _Asked] = {}

    def look_up(
        self, partitions: Iterable[TopicPartition], topic_ids: Mapping[str, bytes], pause_seconds: float = 0.0
    ) -> None:
        """Begin to look up some, after a pause."""
        partitions = list(partitions)
        with suppress(KafkalogError):
            self._cluster.look_up({partition.topic for partition in partitions}, patient=False)
        by_leader: dict[int, list[TopicPartition]] = {}  # so a broker that is away holds up no other one's
        for partition in partitions:
            topic = self._cluster.known_topic(partition.topic)
            known = () if topic is None else topic.partitions
            leader = known[partition.partition].leader if partition.partition < len(known) else NO_LEADER
            by_leader.setdefault(leader, []).append(partition)
        for some in by_leader.values():
            asked = _Asked(in_background(partial(self._listed, some, pause_seconds), self._notify), topic_ids)
            with self._changed:
                self._asked.update(dict.fromkeys(some, asked))

    def found(self) -> list[Found]:
        """What was found since the last call. What could not be had is looked up again after a pause. Raises
        KafkalogError: nothing was found, because of an error for good."""
        with self._changed:
            done = {partition: asked for partition, asked in self._asked.items() if asked.future.has_ended}
            for partition in done:
                del self._asked[partition]
        by_call: dict[int, list[TopicPartition]] = {}
        for partition, asked in done.items():
            by_call.setdefault(id(asked.future), []).append(partition)
        found: list[Found] = []
        failure: BaseException | None = None
        for partitions in by_call.values():
            future, topic_ids = done[partitions[0]]
            error = future.exception()
            listed = future.result() if error is None else {}
            offsets = {
                partition: offset
                for partition in partitions
                if partition in listed and (offset := listed[partition].offset) is not None
            }
            if offsets:
                found.append(Found(offsets, topic_ids))
            if len(offsets) < len(partitions):
                self.look_up(set(partitions) - offsets.keys(), topic_ids, _PAUSE_SECONDS)
            if error is not None and not isinstance(error, RetriableError):
                failure = error
        if failure is not None and not found:
            raise failure
        return found

    def forget(self, partitions: Iterable[TopicPartition] | None = None) -> None:
        """Some, or all, are not to be begun any more."""
        with self._changed:
            for partition in list(self._asked) if partitions is None else partitions:
                self._asked.pop(partition, None)

    def _listed(self, partitions: list[TopicPartition], pause_seconds: float) -> dict[TopicPartition, ListedOffset]:
        """The starts of those partitions that are served."""
        if self._closing.wait(pause_seconds):
            return {}
        failed: dict[TopicPartition, KafkalogError] = {}
        try:
            found = list_offsets(self._cluster, dict.fromkeys(partitions, self._reset), failed)
        except _DELETED:  # of one topic, for all partitions
            found = self._listed_by_topic(partitions, failed)
        for partition, error in failed.items():
            log.warning("group_partition_not_begun", group=self._group, partition=str(partition), reason=str(error))
        return found

    def _listed_by_topic(
        self, partitions: list[TopicPartition], failed: dict[TopicPartition, KafkalogError]
    ) -> dict[TopicPartition, ListedOffset]:
        """The starts of those partitions that are served, of topics that exist; the others are added to `failed`."""
        found: dict[TopicPartition, ListedOffset] = {}
        for _, some in groupby(sorted(partitions), key=attrgetter("topic")):
            of_topic = dict.fromkeys(some, self._reset)
            try:
                found |= list_offsets(self._cluster, of_topic, failed)
            except _DELETED as error:
                failed |= dict.fromkeys(of_topic, error)
        return found

    def _notify(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()
