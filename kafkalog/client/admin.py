"""Administration of a cluster: topics, offsets and groups. Each call waits for its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Self, TypeVar

from kafkalog.client import arguments
from kafkalog.client.cluster import (
    NO_LEADER,
    OUT_OF_DATE,
    BrokerInfo,
    Cluster,
    ClusterInfo,
    PartitionInfo,
    TopicInfo,
    broker_info,
    topic_info,
)
from kafkalog.client.following import FOLLOWED_SECONDS, brokers_behind
from kafkalog.client.groups import (
    GroupInfo,
    GroupSummary,
    commit_offsets,
    committed_offsets,
    delete_group,
    describe_group,
    list_groups,
    reset_offsets,
)
from kafkalog.client.reassignments import Reassignment, ReassignmentProgress, change, under_way
from kafkalog.client.verification import Verification, VerifiedPartition
from kafkalog.errors import (
    BrokerBusy,
    BrokerStopping,
    BrokerUnreachable,
    InvalidArgument,
    InvalidTopicName,
    KafkalogError,
    LeaderNotAvailable,
    OffsetNotAvailable,
    OffsetOutOfRange,
    PartitionLost,
    RequestTimedOut,
    UnknownTopic,
)
from kafkalog.records import TopicPartition
from kafkalog.retry import Retry
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.frames import error_from_wire

TopicDescription = TopicInfo
_STALE = (*OUT_OF_DATE, LeaderNotAvailable)
"""Failures after which the topics are asked for anew."""

_REPAIR_SECONDS = 60.0
_Answer = TypeVar("_Answer")


class AtTimestamp(NamedTuple):
    """The first record whose timestamp is at or after this one, in microseconds since the epoch; records before
    `from_offset` do not count."""

    timestamp_us: int
    from_offset: int = 0


class ShiftBy(NamedTuple):
    """This many records after a group's offset, before it if negative; within the log."""

    records: int


class AfterBytes(NamedTuple):
    """The offset about `max_bytes` after a given one, by the index: at least one index entry further, unless the log
    ends."""

    from_offset: int
    max_bytes: int


class ListedOffset(NamedTuple):
    """An offset that `list_offsets` found.

    For a request by timestamp, `timestamp_us` is the record's, and `offset` is None if there is no such record; for
    others `timestamp_us` is None. `size_bytes` is the size of the whole partition on disk, with AfterBytes that of the
    batches up to `offset`.
    """

    offset: int | None
    timestamp_us: int | None
    size_bytes: int


class ClusterUpgrade(NamedTuple):
    """A change of the cluster's format level, or what it would be.

    Attributes:
        level_before, level: the levels before and after.
        brokers: the registered ones, with the levels that they understand.
        absent: ids of brokers that have replicas and are not registered. If they do not understand the level, they
            cannot join any more.
    """

    level_before: int
    level: int
    brokers: tuple[BrokerInfo, ...]
    absent: tuple[int, ...]

    @property
    def behind(self) -> tuple[BrokerInfo, ...]:
        """The registered brokers that do not understand the newest level that one of them understands, or do not
        understand `level`."""
        wanted = max(self.level, *(broker.formats.newest for broker in self.brokers))
        return tuple(broker for broker in self.brokers if not broker.formats.includes(wanted))


class PartitionExtent(NamedTuple):
    """A partition's start and end offset, and its size on disk."""

    start_offset: int
    end_offset: int
    size_bytes: int


_LISTED_MAX = 20_000
"""Partitions of one request. A broker takes 50,000."""
_AT = {"earliest": pb.ListOffset.EARLIEST, "latest": pb.ListOffset.LATEST}


def list_offsets(
    cluster: Cluster,
    wanted: Mapping[TopicPartition, str | AtTimestamp | AfterBytes],
    failed: dict[TopicPartition, KafkalogError] | None = None,
    *,
    awaits_ends: bool = True,
) -> dict[TopicPartition, ListedOffset]:
    """The offsets at which partitions start or end now, or reach a timestamp or size. Sends one request to each leader,
    and one more for the batches in which a timestamp is searched for.

    Args:
        failed: filled with the errors of partitions that are not served, such as a lost one; the others are answered.
            None: the first error is raised.
        awaits_ends: whether a partition is asked for again while its leader does not know the end; if not, its
            OffsetNotAvailable is in `failed`.

    Raises:
        UnknownTopic, UnknownPartition: of the partitions asked for.
        PartitionLost, FileRefused, StorageFailed: a partition is not served.
        BrokerUnreachable, LeaderNotAvailable: a leader did not answer in time.
    """
    lookup = _OffsetLookup(cluster, wanted, failed, awaits_ends)
    return with_fresh_leaders(cluster, {partition.topic for partition in wanted}, lookup.attempt)


class _OffsetLookup:
    """`list_offsets`, once the leaders are known."""

    def __init__(
        self,
        cluster: Cluster,
        wanted: Mapping[TopicPartition, str | AtTimestamp | AfterBytes],
        failed: dict[TopicPartition, KafkalogError] | None,
        awaits_ends: bool,
    ) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._failed = failed
        self._awaits_ends = awaits_ends
        self._found: dict[TopicPartition, ListedOffset] = {}

    def attempt(self) -> dict[TopicPartition, ListedOffset]:
        """Ask until everything is found, or failed for good."""
        settings, wanted, failed = self._cluster.settings, self._wanted, self._failed
        found = self._found = {}
        from_offsets = {
            partition: spec.from_offset if isinstance(spec, AtTimestamp) else 0
            for partition, spec in wanted.items()
            if not failed or partition not in failed
        }
        retry = Retry(settings.backoff(), settings.retry_timeout_ms / 1000)
        while from_offsets:
            batches = {}
            for partition, topic_id, listed in _ask(self._cluster, wanted, from_offsets):
                spec = wanted[partition]
                if listed.HasField("error"):
                    self._refused(partition, error_from_wire(listed.error))
                elif isinstance(spec, AtTimestamp) and listed.in_batch:
                    batches[partition] = topic_id, spec.timestamp_us, listed
                else:
                    timestamp_us = listed.timestamp_us if isinstance(spec, AtTimestamp) and listed.found else None
                    offset = listed.offset if listed.found else None
                    found[partition] = ListedOffset(offset, timestamp_us, listed.size_bytes)
            from_offsets = self._look_into(batches, from_offsets, retry) if batches else {}
        return {partition: found[partition] for partition in wanted if partition in found}

    def _refused(self, partition: TopicPartition, error: KafkalogError) -> None:
        is_passing = error.retriable and (self._awaits_ends or not isinstance(error, OffsetNotAvailable))
        if self._failed is None or is_passing:
            raise error
        self._failed[partition] = error

    def _look_into(
        self,
        batches: Mapping[TopicPartition, tuple[bytes, int, pb.ListedOffset]],
        from_offsets: Mapping[TopicPartition, int],
        retry: Retry,
    ) -> dict[TopicPartition, int]:
        """Find the records in their batches. Returns the partitions to ask for again, because the batch has no such
        record or is gone, with the offset to search from."""
        # Imported here because it loads Arrow, which most callers do not need.
        from kafkalog.client.timestamps import BatchAt, RecordAt, first_records

        places = {
            partition: BatchAt(topic_id, listed.offset, timestamp_us)
            for partition, (topic_id, timestamp_us, listed) in batches.items()
        }
        again: dict[TopicPartition, int] = {}
        gone: OffsetOutOfRange | None = None
        for partition, outcome in first_records(self._cluster, places).items():
            if isinstance(outcome, RecordAt):
                self._found[partition] = ListedOffset(*outcome, batches[partition][2].size_bytes)
            elif isinstance(outcome, int):
                again[partition] = outcome
            elif isinstance(outcome, OffsetOutOfRange):
                again[partition] = from_offsets[partition]
                gone = outcome
            else:
                self._refused(partition, outcome)
        if gone is not None:
            pause = retry.failed(time.monotonic())
            if pause is None:
                raise gone
            self._cluster.pause(pause)
        return again


def _ask(
    cluster: Cluster,
    wanted: Mapping[TopicPartition, str | AtTimestamp | AfterBytes],
    from_offsets: Mapping[TopicPartition, int],
) -> Iterator[tuple[TopicPartition, bytes, pb.ListedOffset]]:
    """The leaders' answers for some partitions: (partition, topic's id, answer)."""
    by_leader: dict[int, list[tuple[TopicPartition, bytes]]] = {}
    for partition in from_offsets:
        topic, leader = cluster.leader_of(partition)
        by_leader.setdefault(leader.broker_id, []).append((partition, topic.topic_id))
    for broker_id, partitions in by_leader.items():
        for start in range(0, len(partitions), _LISTED_MAX):
            some = partitions[start : start + _LISTED_MAX]
            request = pb.ListOffsetsRequest()
            for partition, topic_id in some:
                each = request.partitions.add(
                    topic_id=topic_id, partition=partition.partition, from_offset=from_offsets[partition]
                )
                _say_where(each, wanted[partition])
            reply: pb.ListOffsetsReply = cluster.call("ListOffsets", request, broker_id=broker_id, patient=False)
            for (partition, topic_id), listed in zip(some, reply.partitions, strict=True):
                yield partition, topic_id, listed


def _say_where(each: pb.ListOffset, spec: str | AtTimestamp | AfterBytes) -> None:
    if isinstance(spec, AtTimestamp):
        each.at, each.timestamp_us = pb.ListOffset.TIMESTAMP, spec.timestamp_us
    elif isinstance(spec, AfterBytes):
        each.at, each.from_offset, each.max_bytes = pb.ListOffset.AFTER_BYTES, spec.from_offset, spec.max_bytes
    elif spec in _AT:
        each.at = _AT[spec]
    else:
        raise InvalidArgument(
            reason=f"{spec!r} is not a position in a partition: give 'earliest', 'latest', AtTimestamp(us) or "
            "AfterBytes(from_offset, max_bytes)"
        )


def wait_for_records(cluster: Cluster, known: Mapping[TopicPartition, int], max_wait_ms: int) -> bool:
    """Wait until the end of a partition differs from its known offset. Returns early if no broker accepts another wait.

    All leaders wait at the same time.

    Returns:
        Whether the end of some partition may differ.
    """
    by_leader: dict[int, pb.ListOffsetsRequest] = {}
    is_cut = False  # some are not waited for
    try:
        for partition, offset in known.items():
            topic, leader = cluster.leader_of(partition)
            request = by_leader.setdefault(leader.broker_id, pb.ListOffsetsRequest())
            if len(request.partitions) == _LISTED_MAX:
                is_cut = True
                continue
            request.partitions.add(topic_id=topic.topic_id, partition=partition.partition, known_offset=offset)
        for request in by_leader.values():
            request.max_wait_ms = max_wait_ms

        def has_news(broker_id: int, reply: pb.ListOffsetsReply) -> bool:
            return any(
                listed.HasField("error") or listed.offset != wanted.known_offset
                for wanted, listed in zip(by_leader[broker_id].partitions, reply.partitions, strict=True)
            )

        return cluster.first_of("ListOffsets", by_leader, has_news) or is_cut
    except KafkalogError:  # raised by the next call
        return True


def with_fresh_leaders(cluster: Cluster, topics: Iterable[str], attempt: Callable[[], _Answer]) -> _Answer:
    """Call `attempt` with retries; if an error shows that the topics' metadata is out of date, refresh it first."""
    names = list(topics)

    def attempt_and_refresh() -> _Answer:
        try:
            return attempt()
        except _STALE as error:
            cluster.refresh(names)
            raise LeaderNotAvailable(
                partition=error.facts.get("partition", error.facts.get("topic_id", "asked for")),
                broker_id=error.facts.get("broker_id", NO_LEADER),
            ) from None
        except (BrokerUnreachable, RequestTimedOut, OffsetNotAvailable):  # another replica may lead by now
            with suppress(KafkalogError):
                cluster.refresh(names, patient=False)
            raise

    return cluster.retrying(attempt_and_refresh, finds_leaders=True)


class Admin:
    """Administers a cluster, as Kafka's Admin client (KIP-117). Thread-safe; a context manager.

    Args:
        bootstrap_servers: `host:port` of one broker's gRPC port or more, with commas between; or a `Cluster`, which is
            then shared and not closed.
        **settings: of `ClientSettings`.
    """

    def __init__(self, bootstrap_servers: str | Iterable[str] | Cluster, **settings: Any) -> None:
        self._owns_cluster = not isinstance(bootstrap_servers, Cluster)
        self._cluster = (
            bootstrap_servers if isinstance(bootstrap_servers, Cluster) else Cluster(bootstrap_servers, **settings)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._owns_cluster:
            self._cluster.close()

    def describe_cluster(self) -> ClusterInfo:
        """The cluster's id, live brokers and ZooKeeper."""
        return self._cluster.describe()

    def upgrade_cluster(self, level: int | None = None, *, dry_run: bool = False) -> ClusterUpgrade:
        """Raise the cluster's format level: from then on brokers write the formats of that level, and brokers of older
        versions that do not understand it cannot join any more. It cannot be lowered.

        Args:
            level: None: the highest that all registered brokers understand.
            dry_run: change nothing.

        Raises:
            FormatLevelNotRaised: it would be lowered, or a registered broker does not understand it.
        """
        request = pb.UpgradeClusterRequest(level=level or 0, dry_run=dry_run)
        reply: pb.UpgradeClusterReply = self._cluster.call("UpgradeCluster", request)
        return ClusterUpgrade(
            reply.level_before, reply.level, tuple(map(broker_info, reply.brokers)), tuple(reply.absent)
        )

    def describe_controller(self) -> int | None:
        """The id of the broker that is the controller, which elects the leaders of partitions; None: nobody is elected
        now. Raises ZooKeeperUnreachable, without retries."""
        described: pb.ControllerDescription
        described = self._cluster.call("DescribeController", pb.DescribeControllerRequest(), patient=False)
        return None if described.broker_id < 0 else described.broker_id

    def describe_broker(self, broker_id: int | None = None) -> pb.BrokerStatus:
        """A broker's own status: pid, version, counters, why it is out of service.

        Args:
            broker_id: None: the broker that answers first, even if it is not registered.

        Raises:
            BrokerUnreachable: at once if it is unknown.
        """
        status: pb.BrokerStatus
        if broker_id is None:
            status = self._cluster.call("DescribeBroker", pb.DescribeBrokerRequest())
            return status
        if all(broker.broker_id != broker_id for broker in self._cluster.describe().brokers):
            raise BrokerUnreachable(address=f"broker {broker_id}", reason="it is not registered in the cluster")
        status = self._cluster.call("DescribeBroker", pb.DescribeBrokerRequest(), broker_id=broker_id)
        return status

    def describe_brokers(self) -> dict[int, pb.BrokerStatus]:
        """The status of each live broker that answers at once, by id; see `describe_broker`."""
        live = [broker.broker_id for broker in self._cluster.describe().brokers]
        answers = self._cluster.call_each("DescribeBroker", pb.DescribeBrokerRequest(), live)
        return {each: status for each, status in answers.items() if not isinstance(status, Exception)}

    def topics(self) -> list[TopicInfo]:
        """Every topic, by name."""
        return self._cluster.describe_topics()

    def describe_topics(self, names: Iterable[str] | None = None) -> list[TopicInfo]:
        """Some topics, in the order asked; every one if `names` is None. Raises UnknownTopic."""
        if names is None:
            return self.topics()
        names = arguments.texts("names", names)
        return self._cluster.describe_topics(names) if names else []

    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        replication_factor: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> TopicInfo:
        """Create a topic.

        Args:
            partitions: the broker's num.partitions if None.
            replication_factor: copies of each partition, each on another broker; the broker's
                default.replication.factor if None.
            config: topic settings by dotted name.

        Returns:
            the topic, as soon as its logs are open, or after 10 s. The topic exists then in any case. `behind` has the
            brokers that have not followed. Partitions whose logs are not open yet have the leader -1; clients retry
            them for retry.timeout.ms, a producer for delivery.timeout.ms.

        Raises:
            TopicExists: there is a topic of that name.
            InvalidTopicName, InvalidPartitions: the name or the number of partitions is not allowed.
            InvalidReplicationFactor: there are not so many live brokers.
            UnknownSetting, InvalidSetting: of `config`, such as a min.insync.replicas above the replication factor.
        """
        arguments.text("name", name)
        request = pb.CreateTopicRequest(
            name=name,
            partitions=_positive("partitions", partitions),
            replicas=_positive("replication_factor", replication_factor),
            config=_texts("config", config),
        )
        until = time.monotonic() + FOLLOWED_SECONDS
        created: pb.TopicDescription = self._cluster.call("CreateTopic", request, repeatable=False)
        topic = topic_info(created)
        return topic._replace(behind=self._behind(created, until))

    def alter_topic(
        self,
        name: str,
        set: Mapping[str, Any] | None = None,
        unset: Iterable[str] = (),
        partitions: int | None = None,
    ) -> TopicInfo:
        """Change a topic's settings, or give it more partitions.

        Returns:
            the topic, once its brokers use the settings and have opened new partitions, or after 10 s. `behind` has the
            brokers that have not followed; they do once they can.

        Raises:
            UnknownTopic: it does not exist.
            UnknownSetting, InvalidSetting: of `set` or `unset`.
            InvalidPartitions: fewer than the topic has.
        """
        arguments.text("name", name)
        request = pb.AlterTopicRequest(
            name=name,
            set=_texts("set", set),
            unset=arguments.texts("unset", unset),
            partitions=_positive("partitions", partitions),
        )
        until = time.monotonic() + FOLLOWED_SECONDS
        altered: pb.TopicDescription = self._cluster.call("AlterTopic", request, repeatable=False)
        topic = topic_info(altered)
        self._cluster.remember(topic)  # before the wait, in which others may learn of a later change
        return topic._replace(behind=self._behind(altered, until))

    def _behind(self, changed: pb.TopicDescription, until: float) -> tuple[int, ...]:
        """The brokers of a topic's partitions that have not followed its change by a time."""
        brokers = {broker for partition in changed.partitions for broker in partition.replicas}

        def has_followed(seen: pb.TopicDescription) -> bool:
            return not seen.HasField("error") and seen.version >= changed.version and not seen.behind

        return brokers_behind(
            self._cluster, changed.topic_id, brokers, has_followed, until, was_seen=not changed.behind
        )

    def unserved(self, names: Iterable[str]) -> dict[TopicPartition, KafkalogError]:
        """The partitions of some topics that their live brokers do not serve, and why; see `extents`."""
        names = arguments.texts("names", names)
        found = self.extents(names) if names else {}
        return {partition: error for partition, error in found.items() if isinstance(error, KafkalogError)}

    def extents(
        self, names: Iterable[str] | None = None, brokers: Iterable[int] | None = None
    ) -> dict[TopicPartition, PartitionExtent | KafkalogError]:
        """The start and end offset of the partitions of some topics (None: all), or why they are not served.

        Sends one request to each live broker, whatever the number of partitions, to all at the same time. Only a
        partition's broker knows its offsets: partitions of a broker that is not live, or does not answer at once, are
        left out.

        Args:
            brokers: ids of those to be asked, if not all; only their partitions are found.
        """
        wanted = [] if names is None else arguments.texts("names", names)
        if names is not None and not wanted:
            return {}
        request = pb.DescribeTopicsRequest(names=wanted, extents=True)
        found: dict[TopicPartition, PartitionExtent | KafkalogError] = {}
        live = {broker.broker_id for broker in self._cluster.describe().brokers}
        asked = live if brokers is None else live.intersection(brokers)
        for reply in self._cluster.call_each("DescribeTopics", request, asked).values():
            if isinstance(reply, (BrokerBusy, BrokerUnreachable, BrokerStopping, RequestTimedOut)):
                continue
            if isinstance(reply, Exception):
                raise reply
            for topic in reply.topics:
                for partition in topic.partitions:
                    where = TopicPartition(topic.name, partition.partition)
                    if partition.HasField("extent"):
                        extent = partition.extent
                        found[where] = PartitionExtent(extent.start_offset, extent.end_offset, extent.size_bytes)
                    elif partition.HasField("error"):
                        found[where] = error_from_wire(partition.error)
        return dict(sorted(found.items()))

    def recover_partitions(
        self, name: str, partitions: Iterable[int] | None = None, start_offset: int | None = None
    ) -> dict[TopicPartition, int]:
        """Accept the loss of records in lost partitions of a topic, and begin them again with empty logs.

        Args:
            partitions: None: all that are lost.
            start_offset: of the first record of each. None: ten million after the highest offset that any group has
                committed, so that a reader that continues from the lost log gets OffsetOutOfRange.

        Returns:
            Where each begins.

        Raises:
            NotLost: a partition is served.
            UnknownTopic, UnknownPartition: it does not exist.
            LeaderNotAvailable: the broker of a partition is not live.
        """
        [topic] = self._cluster.describe_topics([name])
        if partitions is None:
            unserved = self.unserved([name])
            numbers = [each.partition for each, error in unserved.items() if isinstance(error, PartitionLost)]
        else:
            numbers = sorted(set(partitions))
        by_leader: dict[int, list[int]] = {}
        for number in numbers:
            by_leader.setdefault(self._cluster.leader(topic, number).broker_id, []).append(number)
        found = {}
        for broker_id, theirs in by_leader.items():
            request = pb.RecoverPartitionsRequest(topic_id=topic.topic_id, partitions=theirs, start_offset=start_offset)
            reply: pb.RecoverPartitionsReply
            reply = self._cluster.call("RecoverPartitions", request, broker_id=broker_id, repeatable=False)
            for each in reply.partitions:
                found[TopicPartition(name, each.partition)] = each.start_offset
        return dict(sorted(found.items()))

    def reassign(
        self,
        topic: str | None = None,
        partitions: Iterable[int] = (),
        *,
        to_brokers: Iterable[int] = (),
        from_broker: int | None = None,
        replication_factor: int | None = None,
        throttled_rate: int | None = None,
        dry_run: bool = False,
    ) -> list[Reassignment]:
        """Move partitions to other brokers, or change their number of copies (KIP-455). This only begins it;
        `reassignments` shows how far it is. Producers and consumers go on meanwhile.

        Args:
            topic: None: every topic, which needs `from_broker`.
            partitions: of the topic; none: all.
            to_brokers: over which the replicas are spread, as evenly as that goes, by rack too. None: a replica stays
                where it is if it can, and others go to the brokers that have least.
            from_broker: move only partitions that are on this broker, which may be lost, and all of these off it.
            replication_factor: copies of each partition; None: as many as there are.
            throttled_rate: bytes a second that each added broker copies; 0: no limit; None: no limit, or that of the
                same move if it is under way already. Replicas that are in sync are never slowed down.
            dry_run: change nothing.

        Returns:
            the partitions that move, or why one does not: ReassignmentInProgress, LeaderNotAvailable. Those that are
            on the wanted brokers already are left out, so it may be empty. A move that is under way already, and does
            what is asked for, is among them, and goes on.

        Raises:
            UnknownTopic, UnknownPartition, UnknownBroker: it does not exist, or is not live.
            TooFewBrokers: a partition needs more brokers than there are; nothing is moved.
            InvalidSetting: min.insync.replicas is larger than the new number of copies.
        """
        if topic is None and from_broker is None:
            raise InvalidArgument(reason="name a topic, or the broker that all topics leave (from_broker)")
        request = pb.ReassignPartitionsRequest(
            action=pb.ReassignPartitionsRequest.BEGIN,
            topic="" if topic is None else arguments.text("topic", topic),
            partitions=[_number("one of partitions", each) for each in partitions],
            to_brokers=[_number("one of to_brokers", each) for each in to_brokers],
            from_broker=None if from_broker is None else _number("from_broker", from_broker),
            replication_factor=_positive("replication_factor", replication_factor),
            throttled_rate=None if throttled_rate is None else _number("throttled_rate", throttled_rate, 1 << 63),
            dry_run=dry_run,
        )
        return change(self._cluster, request)

    def reassignments(self, topic: str | None = None, partitions: Iterable[int] = ()) -> list[ReassignmentProgress]:
        """The partitions that are being moved, and how far they are.

        Args:
            topic: None: every topic.
            partitions: of the topic; none: all.

        Raises:
            UnknownTopic: it does not exist.
        """
        return under_way(self._cluster, topic, [_number("one of partitions", each) for each in partitions])

    def throttle_reassignments(
        self, throttled_rate: int, topic: str | None = None, partitions: Iterable[int] = (), *, dry_run: bool = False
    ) -> list[Reassignment]:
        """Change the rate of moves.

        Args:
            throttled_rate: bytes a second that each added broker copies; 0: no limit.
            topic: None: every topic.
            partitions: of the topic; none: all.
            dry_run: change nothing.

        Returns:
            the partitions that are being moved.
        """
        return self._change_moves(pb.ReassignPartitionsRequest.THROTTLE, topic, partitions, throttled_rate, dry_run)

    def cancel_reassignments(
        self, topic: str | None = None, partitions: Iterable[int] = (), *, dry_run: bool = False
    ) -> list[Reassignment]:
        """End moves that are not over: the partitions are where they were before.

        Args:
            topic: None: every topic.
            partitions: of the topic; none: all.
            dry_run: change nothing.

        Returns:
            the partitions that were being moved. ReassignmentNotCancelled is the error of one of which no replica from
            before is in sync: its acknowledged records would be lost.
        """
        return self._change_moves(pb.ReassignPartitionsRequest.CANCEL, topic, partitions, 0, dry_run)

    def _change_moves(
        self,
        action: pb.ReassignPartitionsRequest.Action,
        topic: str | None,
        partitions: Iterable[int],
        throttled_rate: int,
        dry_run: bool,
    ) -> list[Reassignment]:
        request = pb.ReassignPartitionsRequest(
            action=action,
            topic="" if topic is None else arguments.text("topic", topic),
            partitions=[_number("one of partitions", each) for each in partitions],
            throttled_rate=_number("throttled_rate", throttled_rate, 1 << 63),
            dry_run=dry_run,
        )
        return change(self._cluster, request)

    def verify(
        self,
        name: str,
        partitions: Iterable[int] | None = None,
        *,
        repair: bool = False,
        bytes_per_second: float | None = None,
        advance: Callable[[int], object] = lambda count: None,
    ) -> Iterator[VerifiedPartition]:
        """Compare the replicas of a topic's partitions with each other: each broker reads them from its disk and checks
        them, up to the high watermark.

            for each in admin.verify("flights"):
                print(each.partition, each.faults)

        Args:
            partitions: None: all.
            repair: have damaged replicas repaired from the others, for at most a minute each; only what is left is
                returned.
            bytes_per_second: bounds how fast each broker reads; None: it is not bounded.
            advance: called with the number of bytes that were compared since the last call.

        Returns:
            An iterator over the partitions, in order. Each is compared, and repaired, when the iterator reaches it.
            Brokers that do not answer are among its faults.

        Raises:
            UnknownTopic, UnknownPartition: it does not exist.
        """
        [topic] = self._cluster.describe_topics([arguments.text("name", name)])
        numbers = range(len(topic.partitions)) if partitions is None else sorted(set(partitions))
        chosen = [topic.partition(number) for number in numbers]

        def verified(partition: PartitionInfo) -> VerifiedPartition:
            verification = Verification(self._cluster, topic, partition, bytes_per_second, advance)
            verification.run()
            if repair:
                verification.repair(_REPAIR_SECONDS)
            return verification.found

        return map(verified, chosen)

    def delete_topic(self, name: str) -> tuple[int, ...]:
        """Delete a topic and its records.

        Returns:
            the brokers of its partitions that have not followed after 10 s; they do once they can.

        Raises:
            UnknownTopic: it does not exist.
        """
        arguments.text("name", name)
        until = time.monotonic() + FOLLOWED_SECONDS
        known: list[TopicInfo] = []
        with suppress(InvalidTopicName, UnknownTopic):  # DeleteTopic says what is wrong
            known = self._cluster.describe_topics([name])
        deleted: pb.DeleteTopicReply
        deleted = self._cluster.call("DeleteTopic", pb.DeleteTopicRequest(name=name), repeatable=False)
        self._cluster.forget(name)
        brokers = {
            broker
            for topic in known
            if topic.topic_id == deleted.topic_id  # else it was created again meanwhile, on brokers that are not known
            for partition in topic.partitions
            for broker in partition.replicas
        }
        return brokers_behind(
            self._cluster, deleted.topic_id, brokers, lambda seen: seen.HasField("error"), until, was_seen=True
        )

    def delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records before an offset of each partition (KIP-107); -1 deletes all readable records.

        Returns:
            Where each partition starts now.

        Raises:
            UnknownTopic, UnknownPartition: it does not exist.
            OffsetOutOfRange: an offset is past the end.
        """
        wanted = arguments.offsets("before", before)
        # A request may be made twice: "all readable" would then take along what came in between.
        ends = self.list_offsets({partition: "latest" for partition, offset in wanted.items() if offset == -1})
        wanted = {**wanted, **{partition: found.offset or 0 for partition, found in ends.items()}}
        return {partition: self._delete_before(partition, offset) for partition, offset in wanted.items()}

    def _delete_before(self, partition: TopicPartition, offset: int) -> int:
        def attempt() -> int:
            topic, leader = self._cluster.leader_of(partition)
            request = pb.DeleteRecordsRequest(
                topic_id=topic.topic_id, partition=partition.partition, before_offset=offset
            )
            reply: pb.DeleteRecordsReply = self._cluster.call(
                "DeleteRecords", request, broker_id=leader.broker_id, patient=False
            )
            return reply.log_start_offset

        return with_fresh_leaders(self._cluster, [partition.topic], attempt)

    def list_offsets(
        self,
        wanted: Mapping[TopicPartition, str | AtTimestamp | AfterBytes],
        failed: dict[TopicPartition, KafkalogError] | None = None,
    ) -> dict[TopicPartition, ListedOffset]:
        """The offsets at which partitions start ("earliest") or end ("latest") now, or reach a timestamp (KIP-79).

        Args:
            failed: filled with the errors of partitions that are not served, as a lost one; the others are answered.
                None: the first error is raised.

        Raises:
            UnknownTopic, UnknownPartition: it does not exist.
            LeaderNotAvailable, PartitionLost: it is not served.
        """
        return list_offsets(self._cluster, arguments.by_partition("wanted", wanted), failed)

    def committed(self, group: str, topics: Iterable[str] = ()) -> dict[TopicPartition, int]:
        """A group's offsets, of every topic if none is named; partitions without one are left out."""
        arguments.text("group", group)
        return committed_offsets(self._cluster, group, arguments.texts("topics", topics))

    def commit(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Write a group's offsets, each the next to be consumed. Raises UnknownTopic, UnknownPartition."""
        arguments.text("group", group)
        commit_offsets(self._cluster, group, arguments.offsets("offsets", offsets))

    def groups(self) -> list[GroupSummary]:
        """Every group that has offsets or live members, by name."""
        return list_groups(self._cluster)

    def describe_group(self, group: str) -> GroupInfo:
        """A group's offsets and live members. Raises UnknownGroup."""
        return describe_group(self._cluster, arguments.text("group", group))

    def reset_offsets(
        self,
        group: str,
        to: Mapping[TopicPartition, str | int | AtTimestamp | ShiftBy],
        force: bool = False,
        create: bool = False,
        dry_run: bool = False,
    ) -> dict[TopicPartition, int]:
        """Set a group's offsets (KIP-122): to "earliest", "latest", an offset, a timestamp (the end if no record is as
        late), or `ShiftBy(records)` from its offset.

        Args:
            force: also if a Spark stream is live, which overwrites the offsets when it continues.
            create: also if the group does not exist yet.
            dry_run: write nothing.

        Returns:
            What was written, or would have been.

        Raises:
            GroupIsLive: a consumer is live that subscribed, or a stream, and `force` is not set. If it came meanwhile,
                some of more than 498 offsets may be written; the error says how many are as wanted.
            OffsetOutOfRange: an offset is not in the log; nothing was written.
            InvalidArgument: there is no offset to shift from; nothing was written.
            UnknownTopicId: a topic was created again meanwhile; nothing was written.
            UnknownGroup, UnknownTopic, UnknownPartition: it does not exist.
        """
        arguments.text("group", group)
        to = arguments.by_partition("to", to)
        topics = self._cluster.describe_topics(sorted({partition.topic for partition in to}))
        ends = self.list_offsets(dict.fromkeys(to, "latest"))
        starts = self.list_offsets(dict.fromkeys(to, "earliest"))
        listed = self.list_offsets({each: at for each, at in to.items() if not isinstance(at, int | ShiftBy)})
        is_shifted = any(isinstance(at, ShiftBy) for at in to.values())
        committed = self.committed(group, [topic.name for topic in topics]) if is_shifted else {}
        offsets = {}
        for partition, at in to.items():
            start, end = starts[partition].offset, ends[partition].offset
            assert start is not None and end is not None  # only an offset by timestamp may be None
            if isinstance(at, ShiftBy):
                if partition not in committed:
                    raise InvalidArgument(reason=f"group '{group}' has no offset in {partition} to shift from")
                offset: int | None = min(max(committed[partition] + at.records, start), end)
            else:
                offset = at if isinstance(at, int) else listed[partition].offset
            if offset is None:
                offset = end
            if not start <= offset <= end:
                raise OffsetOutOfRange(offset=offset, partition=str(partition), start_offset=start, end_offset=end)
            offsets[partition] = offset
        if not dry_run:
            topic_ids = {topic.name: topic.topic_id for topic in topics}
            reset_offsets(self._cluster, group, offsets, force, create, topic_ids)
        return offsets

    def delete_group(self, group: str) -> None:
        """Delete a group and its offsets. Raises GroupIsLive, UnknownGroup."""
        delete_group(self._cluster, arguments.text("group", group))


def _positive(what: str, number: int | None) -> int:
    """A number for the wire, where 0 means that the broker chooses."""
    if number is None:
        return 0
    if not 1 <= arguments.whole_number(what, number) < 1 << 31:
        raise InvalidArgument(reason=f"{what} must be from 1 to 2147483647, not {number}")
    return number


def _number(what: str, number: int, limit: int = 1 << 31) -> int:
    """A number for the wire, from 0 on."""
    if not 0 <= arguments.whole_number(what, number) < limit:
        raise InvalidArgument(reason=f"{what} must be from 0 to {limit - 1}, not {number}")
    return number


def _texts(what: str, config: Mapping[str, Any] | None) -> dict[str, str]:
    """Settings as text for the wire: booleans in lower case, others by `str`."""
    given = {} if config is None else arguments.settings(what, config)
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}
