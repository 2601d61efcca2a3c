"""A query goes on where a group of consumers has stopped, and the consumers where the query has; never both at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from kafkalog import Consumer, TopicPartition
from kafkalog.client.cluster import Cluster
from kafkalog.client.consumer import membership
from kafkalog.client.groups import GroupMember, keep_member, leave_group
from kafkalog.errors import GroupKindDiffers
from kafkalog.records import Message
from kafkalog.wire import broker_pb2 as pb
from pyspark_kafkalog.read import group_publisher
from pyspark_kafkalog.read.group_publisher import Progress
from tests.pyspark_kafkalog.live import EVERYTHING, Live
from tests.waiting import waited_for

EACH = 30


def consumed(live: Live, group: str, topic: str, count: int) -> list[tuple[int, int]]:
    """(partition, offset) of the records that a subscribed consumer reads, and commits."""
    with Consumer(live.servers, group=group, auto_offset_reset="earliest") as consumer:
        consumer.subscribe(topic)
        found = [(each.partition, each.offset) for each in consumer.consume(count, timeout=60)]
        assert consumer.poll(0) is None, "and so what was read is handed back"
    return found


def queried(spark: SparkSession, live: Live, group: str, topic: str, folder: Path) -> list[tuple[int, int]]:
    """(partition, offset) of the records that a query reads until the log's end, as a new query of the group."""
    stream = (
        spark.readStream.format("kafkalog")
        .options(**live.options(subscribe=topic, startingOffsets="committed", kafkalog__group__id=group))
        .load()
    )
    found: list[tuple[int, int]] = []
    query = (
        stream.select("partition", "offset")
        .writeStream.foreachBatch(lambda rows, _: found.extend((row[0], row[1]) for row in rows.collect()))
        .option("checkpointLocation", str(folder))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    waited_for(lambda: not live.admin.describe_group(group).members)
    return found


def test_a_query_and_a_group_of_consumers_go_on_where_the_other_has_stopped(
    spark: SparkSession, live: Live, tmp_path: Path
) -> None:
    topic = live.topic(EACH, EACH)
    group = f"handed-{topic}"
    rounds = []
    for number in range(4):
        read = (
            consumed(live, group, topic, 2 * EACH)
            if number % 2 == 0
            else queried(spark, live, group, topic, tmp_path / str(number))
        )
        rounds.append(sorted(read))
        for partition in range(2):
            live.append(topic, EACH, partition)
    assert rounds == [
        sorted((partition, offset) for partition in range(2) for offset in range(number * EACH, (number + 1) * EACH))
        for number in range(4)
    ]


def test_a_consumer_waits_for_a_stream_that_has_just_ended(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    topic = live.topic(5)
    group = f"ended-{topic}"
    with (
        closing(Cluster(live.servers)) as cluster,
        Consumer(live.servers, group=group, auto_offset_reset="earliest") as consumer,
    ):
        keep_member(cluster, group, GroupMember("ended", topic, "here", ""), {TopicPartition(topic, 0): 2})
        consumer.subscribe(topic)
        assert consumer.poll(0.1) is None
        waited_for(lambda: "group_awaits_end_of_streams" in caplog.text)
        leave_group(cluster, group, "ended")
        polled = consumer.poll(60)
        assert polled is not None
        assert polled.offset == 2


def test_a_group_has_members_of_one_kind_at_a_time(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_STREAMS_END_SECONDS", 0.0)
    topic = live.topic(5)
    group = f"both-{topic}"
    stream = live.stream(subscribe=topic, startingOffsets="earliest", kafkalog__group__id=group)
    stream.latestOffset(stream.initialOffset(), EVERYTHING)
    waited_for(lambda: group in {each.name for each in live.admin.groups()})
    with Consumer(live.servers, group=group, auto_offset_reset="earliest") as consumer:
        consumer.subscribe(topic)
        with pytest.raises(GroupKindDiffers, match=f"group '{group}' has members of the kind stream"):
            consumer.poll(60)
        stream.stop()
        waited_for(lambda: not live.admin.describe_group(group).members)
        polled: list[Message] = []
        waited_for(lambda: bool(polled.extend(_polled(consumer)) or polled))
        assert polled[0].offset == 0
        late = live.stream(subscribe=topic, startingOffsets="earliest", kafkalog__group__id=group)
        end = late.latestOffset(late.initialOffset(), EVERYTHING)  # it reads all the same, and publishes nothing
        assert json.loads(json.dumps(end)) == {topic: {"0": 5}}
        assert len(live.admin.describe_group(group).members) == 1
        late.stop()


@pytest.fixture
def told(live: Live, new_topic: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Progress]:
    """A stream's progress, published every moment, in a group of its own."""
    monkeypatch.setattr(group_publisher, "_PUBLISH_EVERY_S", 0.01)
    monkeypatch.setattr(group_publisher, "RENEW_S", 0.05)
    with closing(Cluster(live.servers)) as cluster:
        told = Progress(cluster, f"met-{new_topic()}", "here")
        yield told
        told.finish()


def joined(told: Progress, name: str, topic: str, session_timeout_ms: int) -> None:
    """Join a consumer that never renews its lease, because it was killed."""
    member = pb.GroupMember(member=name, topics=[topic], session_timeout_ms=session_timeout_ms)
    told._cluster.call("JoinGroup", pb.JoinGroupRequest(group=told._group, member=member, assignor="range"))


def test_a_query_that_meets_killed_consumers_in_its_group_publishes_once_their_sessions_are_over(
    live: Live, told: Progress, caplog: pytest.LogCaptureFixture
) -> None:
    partition = TopicPartition(live.topic(20), 0)
    joined(told, "killed", partition.topic, 500)
    told.at({partition: 20})
    waited_for(lambda: live.admin.committed(told._group) == {partition: 20})
    assert "group_progress_not_published" in caplog.text
    assert "group_is_read_by_consumers" not in caplog.text
    assert "group_last_position_not_published" not in caplog.text


def test_a_query_that_ends_while_killed_consumers_are_members_says_that_its_position_is_not_published(
    live: Live, told: Progress, caplog: pytest.LogCaptureFixture
) -> None:
    partition = TopicPartition(live.topic(20), 0)
    joined(told, "killed", partition.topic, 600_000)
    told.at({partition: 20})
    waited_for(lambda: told._answered == told._asked)
    told.finish()
    assert "group_last_position_not_published" in caplog.text
    assert live.admin.committed(told._group) == {}


def test_a_query_that_meets_live_consumers_in_its_group_leaves_it_to_them_also_while_they_restart(
    live: Live, told: Progress, caplog: pytest.LogCaptureFixture
) -> None:
    partition, group = TopicPartition(live.topic(20), 0), told._group
    with Consumer(live.servers, group=group, auto_offset_reset="earliest", heartbeat_interval_ms=100) as consumer:
        consumer.subscribe(partition.topic)
        assert len(consumer.consume(5, timeout=60)) == 5
        consumer.commit({partition: 5})
        told.at({partition: 20})
        waited_for(lambda: "group_is_read_by_consumers" in caplog.text)
    for number in range(3):
        told.at({partition: 10 + number})
        waited_for(lambda: told._answered == told._asked)
    told.finish()
    assert live.admin.committed(group) == {partition: 5}
    assert live.admin.describe_group(group).kind == "consumer"
    assert caplog.text.count("group_is_read_by_consumers") == 1


def test_a_consumer_that_comes_to_killed_ones_shows_a_query_that_the_group_is_in_use(
    live: Live, told: Progress, caplog: pytest.LogCaptureFixture
) -> None:
    topic = live.topic(5)
    joined(told, "killed", topic, 60_000)
    told.at({TopicPartition(topic, 0): 5})
    waited_for(lambda: bool(told._leases_end_s))
    joined(told, "other", topic, 60_000)
    waited_for(lambda: "group_is_read_by_consumers" in caplog.text)


def test_a_query_that_starts_where_live_consumers_have_committed_warns_once_that_both_read(
    live: Live, told: Progress, caplog: pytest.LogCaptureFixture
) -> None:
    topic = live.topic(5)
    options = {"subscribe": topic, "startingOffsets": "committed", "kafkalog__group__id": told._group}
    live.admin.commit(told._group, {TopicPartition(topic, 0): 2})
    alone = live.stream(**options)
    assert alone.initialOffset() == {topic: {"0": 2}}
    assert "group_has_live_consumers" not in caplog.text
    joined(told, "reads", topic, 60_000)
    beside = live.stream(**options)
    assert beside.initialOffset() == beside.initialOffset() == {topic: {"0": 2}}
    assert caplog.text.count(f"group_has_live_consumers group={told._group} first=reads ") == 1


def _polled(consumer: Consumer) -> list[Message]:
    try:
        return list(consumer.consume(1, timeout=0.1))
    except GroupKindDiffers:
        return []
