"""A leader is elected uncleanly, and lacks records that consumers have read: they find out (KIP-320)."""

from __future__ import annotations

import pytest

from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.errors import LogTruncated
from tests.kafkalog.replicated import Brokers, wait_in_sync
from tests.waiting import waited_for

T0 = TopicPartition("t", 0)
KEPT, LOST, NEW = 5, 5, 10


def send(brokers: Brokers, name: str, count: int) -> None:
    with Producer(brokers.bootstrap_servers) as producer:
        for number in range(count):
            producer.send("t", f"{name} {number}".encode(), partition=0)


def named(name: str, *numbers: int) -> list[bytes]:
    return [f"{name} {number}".encode() for number in numbers]


def values(consumer: Consumer, count: int) -> list[bytes | None]:
    return [message.value for message in consumer.messages(count, timeout=30)]


def assigned(brokers: Brokers, reset: str) -> Consumer:
    consumer = Consumer(brokers.bootstrap_servers, auto_offset_reset=reset)
    consumer.assign({T0: 0})
    return consumer


def by_hand(brokers: Brokers, start: int | str) -> Consumer:
    consumer = Consumer(brokers.bootstrap_servers, "by-hand")
    consumer.assign({T0: start})
    return consumer


def subscribed(brokers: Brokers, reset: str) -> Consumer:
    consumer = Consumer(brokers.bootstrap_servers, f"of-{reset}", auto_offset_reset=reset)
    consumer.subscribe(["t"])
    return consumer


@pytest.mark.timeout(120)
def test_consumers_find_out_that_what_they_have_read_is_gone(brokers: Brokers) -> None:
    with Admin(brokers.bootstrap_servers) as admin:
        unclean = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
        admin.create_topic("t", 1, 2, unclean)
        leader, follower = admin.describe_topics(["t"])[0].partition(0).replicas
        wait_in_sync(admin, "t", [leader, follower])
        send(brokers, "kept", KEPT)
        brokers.kill(follower)
        wait_in_sync(admin, "t", [leader])
        send(brokers, "lost", LOST)

        going_on = {reset: assigned(brokers, reset) for reset in ("earliest", "latest", "error")}
        for consumer in going_on.values():
            assert values(consumer, KEPT + LOST) == named("kept", *range(KEPT)) + named("lost", *range(LOST))
        with subscribed(brokers, "earliest") as consumer:
            assert len(values(consumer, KEPT + LOST)) == KEPT + LOST
            consumer.commit()

        with by_hand(brokers, 0) as consumer:
            values(consumer, KEPT + LOST)
            consumer.commit({T0: KEPT + LOST})
        listing = Consumer(brokers.bootstrap_servers, "listing", auto_offset_reset="earliest")
        listing.assign({T0: 0})
        before = listing.consume(KEPT + LOST, timeout=30)
        interrupted = assigned(brokers, "earliest")
        assert len(values(interrupted, KEPT + LOST)) == KEPT + LOST
        with interrupted._fetcher.lock:
            interrupted._fetcher._restart_all()  # as after Ctrl-C in a wait
        at_the_end = by_hand(brokers, "latest")
        waited_for(lambda: at_the_end.poll(0.1) is None and at_the_end._cursors.by_partition[T0].read_in() is not None)

        brokers.kill(leader)
        brokers.start(follower)
        wait_in_sync(admin, "t", [follower])
        send(brokers, "new", NEW)

        for consumer in (going_on["earliest"], going_on["latest"], interrupted):
            assert values(consumer, NEW) == named("new", *range(NEW)), "from where the logs part"
        since = listing.consume(2, timeout=30)
        listing.commit(before + since)
        assert listing.committed() == {T0: KEPT + 2}, "what was read later, although its offset is smaller"
        listing.commit(before)
        with Consumer(brokers.bootstrap_servers, "listing") as restarted:
            restarted.assign({T0: "committed"})
            with pytest.raises(LogTruncated):
                values(restarted, NEW)
        with subscribed(brokers, "earliest") as consumer:
            assert values(consumer, NEW) == named("new", *range(NEW)), "a committed offset has its epoch"
        for consumer in (going_on["error"], at_the_end, by_hand(brokers, "committed")):
            with consumer, pytest.raises(LogTruncated) as truncated:
                values(consumer, NEW)
            assert (truncated.value.facts["offset"], truncated.value.facts["end_offset"]) == (KEPT + LOST, KEPT)
        for consumer in (going_on["earliest"], going_on["latest"], interrupted, listing):
            consumer.close()
