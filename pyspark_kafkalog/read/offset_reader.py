"""Asks brokers for a read on the driver: which partitions exist, and where each starts, ends or reaches a time or a
size. Converts a `Bound` to offsets; only earliest and latest of a batch are looked up in its tasks.

On the driver a topic that is missing and records that are gone are asked for again (fetchOffset.numRetries) before it
is believed: a broker's view of a new topic may be older than that of the broker that listed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from kafkalog.errors import (
    DataLost,
    InvalidArgument,
    KafkalogError,
    LeaderNotAvailable,
    OffsetNotAvailable,
    UnknownPartition,
    UnknownTopic,
    UnknownTopicId,
)
from kafkalog.events import get_logger
from kafkalog.records import TopicPartition
from pyspark_kafkalog.connections import cluster_of
from pyspark_kafkalog.offsets import (
    COMMITTED,
    EARLIEST,
    LATEST,
    Bound,
    PartitionOffsets,
    partition_names,
    position_of_each,
    resolved,
    symbols_in,
)
from pyspark_kafkalog.read.admission import shares
from pyspark_kafkalog.read.data_loss import Losses
from pyspark_kafkalog.read.group_start import with_committed
from pyspark_kafkalog.read.options import SourceOptions
from pyspark_kafkalog.times import TIMESTAMP_US_MAX

if TYPE_CHECKING:
    from kafkalog.client.cluster import Cluster
    from kafkalog.client.consumer.range_fetch import LeaderHint
    from kafkalog.client.groups import GroupMember

log = get_logger(__name__)

GONE = (UnknownTopic, UnknownTopicId, UnknownPartition)
"""What a broker says of a partition that is not there (any more, or yet)."""

_DOUBTFUL = (*GONE, DataLost, LeaderNotAvailable)
_Answer = TypeVar("_Answer")


def connected(options: SourceOptions, settings: Mapping[str, str] | None = None) -> Cluster:
    """This process's connections to the cluster.

    Args:
        settings: of the client, by dotted name; those of the options if None.
    """
    from kafkalog.client.config import ConsumerSettings

    given = options.client if settings is None else settings
    return cluster_of(options.bootstrap_servers, ConsumerSettings.parse(given))


def offsets_at(cluster: Cluster, symbols: Mapping[TopicPartition, int]) -> PartitionOffsets:
    """The current offset of each partition's EARLIEST or LATEST."""
    from kafkalog.client.admin import list_offsets

    if not symbols:
        return {}
    words = {EARLIEST: "earliest", LATEST: "latest"}
    listed = list_offsets(cluster, {partition: words[symbol] for partition, symbol in symbols.items()})
    return {partition: each.offset for partition, each in listed.items() if each.offset is not None}


class Lookup:
    """The requests of a read on the driver to brokers."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._warned = False

    def asked_again(self, attempt: Callable[[Losses], _Answer], losses: Losses) -> _Answer:
        """The result of an attempt, which is repeated while it finds something missing or lost.

        Args:
            attempt: called with the handling of losses: they fail every try except the last, which gets `losses`. What
                the look before went over is no longer in doubt, until a look does not find it.
        """
        before, losses.gone_over = losses.gone_over, set()
        for _ in range(self.options.fetch_attempts - 1):
            doubted = Losses(fail=True, accepted=before)
            try:
                answer = attempt(doubted)
                losses.gone_over = doubted.gone_over
                return answer
            except _DOUBTFUL as error:
                log.warning("asking_again", reason=str(error))
                # fetchOffset.retryIntervalMs, set by the user. No event can end the pause early: ZooKeeper notifies
                # brokers of topics and leaders, but brokers do not notify clients. To stop the query, Spark ends this
                # process.
                time.sleep(self.options.fetch_retry_interval_ms / 1000)
        return attempt(losses)

    def partitions(
        self, missing: Callable[[UnknownTopic], None] | None = None, *, may_lack_new: bool = False
    ) -> dict[TopicPartition, bytes]:
        """The id of its topic, by selected partition, in order.

        Args:
            may_lack_new: of subscribePattern: topics may be left out that are new since all were listed once. For who
                looks again.
            missing: called with the error for a topic of subscribe or assign that does not exist; it may raise. None:
                UnknownTopic is raised.
        """
        cluster = connected(self.options)
        selection = self.options.selection
        if selection.option == "subscribePattern":
            listed = cluster.describe_topics(is_complete=True, may_lack_new=may_lack_new)
            topics = [topic for topic in listed if selection.matches(topic.name)]
        else:
            names = list(selection.topics())
            topics = []
            while names:
                try:
                    topics = cluster.describe_topics(names)
                    break
                except UnknownTopic as error:
                    if missing is None:
                        raise
                    missing(error)
                    names.remove(error.facts["topic"])
        found = {
            TopicPartition(topic.name, partition.partition): topic.topic_id
            for topic in topics
            for partition in topic.partitions
        }
        if selection.option == "assign" and not self._warned and (not_there := set(selection.value) - found.keys()):
            self._warned = True
            log.warning("assigned_partitions_not_there", partitions=partition_names(not_there))
        return {partition: found[partition] for partition in sorted(found) if selection.takes(partition)}

    def leader(self, partition: TopicPartition, topic_id: bytes) -> LeaderHint | None:
        """The cached leader of a partition; None if it is not known. Makes no request."""
        from kafkalog.client.consumer.range_fetch import LeaderHint

        cluster = connected(self.options)
        topic = cluster.known_topic(partition.topic)
        try:
            if topic is not None and topic.topic_id == topic_id:
                return LeaderHint(topic_id, cluster.leader(topic, partition.partition))
        except (LeaderNotAvailable, UnknownPartition):
            pass
        return None

    def unopened(self, partitions: Iterable[TopicPartition]) -> set[TopicPartition]:
        """The partitions whose logs no broker had open, by the cached metadata. Makes no request."""
        known_topic = connected(self.options).known_topic
        without_leader = {
            TopicPartition(name, each.partition)
            for name in {partition.topic for partition in partitions}
            if (topic := known_topic(name)) is not None
            for each in topic.partitions
            if not each.has_leader
        }
        return without_leader.intersection(partitions)

    def at(self, symbol: int, partitions: Iterable[TopicPartition]) -> PartitionOffsets:
        """The offset at which each partition starts (EARLIEST) or ends (LATEST) now."""
        return offsets_at(connected(self.options), dict.fromkeys(partitions, symbol))

    def known_ends(self, partitions: Iterable[TopicPartition]) -> PartitionOffsets:
        """The offset at which each partition ends now, without those whose new leader does not know it yet."""
        from kafkalog.client.admin import list_offsets

        unknown: dict[TopicPartition, KafkalogError] = {}
        latest = dict.fromkeys(partitions, "latest")
        listed = list_offsets(connected(self.options), latest, unknown, awaits_ends=False) if latest else {}
        for error in unknown.values():
            if not isinstance(error, OffsetNotAvailable):
                raise error
        return {partition: each.offset for partition, each in listed.items() if each.offset is not None}

    def earliest_of_those_there(self, partitions: Sequence[TopicPartition]) -> PartitionOffsets:
        """The current start offsets of partitions; those that do not exist are left out."""
        try:
            return self.at(EARLIEST, partitions)
        except GONE:
            found: PartitionOffsets = {}
            for partition in partitions:
                try:
                    found.update(self.at(EARLIEST, [partition]))
                except GONE:
                    continue
            return found

    def start(self, bound: Bound, partitions: Iterable[TopicPartition]) -> PartitionOffsets:
        """The start of each partition: an offset or, if the option names one, a symbol.

        Raises:
            InvalidArgument: the option lists other partitions, or a partition has no record as late as its timestamp.
            NoCommittedOffset, CommittedOffsetGone: for a partition that starts where the group has committed.
        """
        position = position_of_each(bound, partitions)
        if not bound.by_time:
            options = self.options
            return with_committed(connected(options), options.group, options.committed_fallback, position)
        found, ends = self._start_by_time(bound, position)
        return {**found, **ends}

    def _start_by_time(self, bound: Bound, times: PartitionOffsets) -> tuple[PartitionOffsets, PartitionOffsets]:
        """The first offsets as late as their times, and the ends of partitions without a record so late."""
        # The end before the times: a record that comes in between is read, whichever way its partition starts.
        ends = self.at(LATEST, times) if bound.no_match == LATEST else {}
        found = self._by_time(times)
        for partition in sorted(times.keys() - found.keys() - ends.keys()):
            raise InvalidArgument(
                reason=f"{partition} has no record at or after timestamp {times[partition]} us "
                f"({bound.option}); set startingOffsetsByTimestampStrategy=latest to start such partitions at their end"
            )
        return found, {partition: ends[partition] for partition in times if partition not in found}

    def end(self, bound: Bound, partitions: Iterable[TopicPartition]) -> PartitionOffsets:
        """The end of each partition, looked up after its start, so that it is never before the start."""
        position = position_of_each(bound, partitions)
        if not bound.by_time:
            return position
        # The ends before the times: a record that comes in between may be as late as its partition's time.
        ends = self.at(LATEST, position)
        return {**ends, **self._by_time(position)}

    def stream_start(
        self, bound: Bound, partitions: Iterable[TopicPartition]
    ) -> tuple[PartitionOffsets, set[TopicPartition], bool]:
        """A stream's start, in numbers; the partitions that start at their end, which moves; and whether a later look
        could give a later start."""
        position = position_of_each(bound, partitions)
        if bound.by_time:
            found, ends = self._start_by_time(bound, position)
            return {**found, **ends}, set(ends), bound.no_match == LATEST
        start = self.start(bound, position)
        moving = symbols_in([start], LATEST)
        numbers = resolved(start, self.at(EARLIEST, symbols_in([start], EARLIEST)), self.at(LATEST, moving))
        if bound.position == COMMITTED:
            ends = self.at(LATEST, numbers) if self.options.committed_fallback == "latest" else {}
            return numbers, {partition for partition in ends if numbers[partition] == ends[partition]}, True
        return numbers, set(moving), bool(moving)

    def group_offsets(self, topics: Iterable[str], *, patient: bool = True) -> dict[TopicPartition, tuple[int, bytes]]:
        """The group's offsets in topics of these names, with the topics' ids. The topics may be deleted."""
        from kafkalog.client.groups import offsets_with_topic_ids

        return offsets_with_topic_ids(connected(self.options), self.options.group, sorted(topics), patient=patient)

    def forget_group_offsets(self, topic_ids: Mapping[TopicPartition, bytes], *, patient: bool = True) -> None:
        """Make the group forget its offsets in topics with these ids."""
        from kafkalog.client.groups import forget_offsets

        if topic_ids:
            forget_offsets(connected(self.options), self.options.group, topic_ids, patient=patient)

    def live_consumer(self) -> GroupMember | None:
        """The first of the group's live consumers; None if it has none, or that cannot be seen now."""
        from kafkalog.client.groups import describe_group

        try:
            group = describe_group(connected(self.options), self.options.group, patient=False)
        except KafkalogError:
            return None
        return next(iter(group.members), None) if group.kind == "consumer" else None

    def _by_time(self, times: PartitionOffsets) -> PartitionOffsets:
        """The first offset as late as its timestamp, of partitions that have one."""
        from kafkalog.client.admin import AtTimestamp, list_offsets

        wanted = {each: AtTimestamp(when) for each, when in times.items() if when <= TIMESTAMP_US_MAX}
        if not wanted:
            return {}
        listed = list_offsets(connected(self.options), wanted)
        return {partition: each.offset for partition, each in listed.items() if each.offset is not None}

    def limited_by_bytes(self, start: PartitionOffsets, end: PartitionOffsets, max_bytes: int) -> PartitionOffsets:
        """The end offsets of a micro-batch of about `max_bytes`, shared out in proportion to what each has left."""
        whole = self._after_bytes({p: (start[p], _EVERYTHING) for p, offset in end.items() if offset > start[p]})
        sizes = {partition: size for partition, (_, size) in whole.items()}
        if sum(sizes.values()) <= max_bytes:
            return end
        reached = self._after_bytes({p: (start[p], share) for p, share in shares(sizes, max_bytes).items()})
        return {p: min(offset, reached[p][0]) if p in reached else offset for p, offset in end.items()}

    def _after_bytes(self, wanted: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, tuple[int, int]]:
        """(offset reached, bytes up to it) of (offset, bytes at most)."""
        from kafkalog.client.admin import AfterBytes, list_offsets

        if not wanted:
            return {}
        listed = list_offsets(connected(self.options), {each: AfterBytes(*what) for each, what in wanted.items()})
        return {partition: (each.offset or 0, each.size_bytes) for partition, each in listed.items()}

    def wait(self, ends: PartitionOffsets, seconds: float) -> None:
        """Wait, at a broker, until the end of a partition moves; for at most so many seconds, and less if no broker
        accepts another wait."""
        from kafkalog.client.admin import wait_for_records

        if ends:
            wait_for_records(connected(self.options), ends, max(1, int(seconds * 1000)))


_EVERYTHING = (1 << 63) - 1
