"""`kafkalog topics verify`: replicas that are the same, damaged, different or away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kafkalog import Admin, Producer
from kafkalog.client.verification import ReplicaFault, merged
from kafkalog.errors import UnknownPartition, UnknownTopic
from kafkalog.format.batch import HEADER, header_at, stamp
from kafkalog.records import TopicPartition
from tests.kafkalog.cli.command_line import Ran
from tests.kafkalog.replicated import Brokers, wait_in_sync
from tests.waiting import waited_for

RECORDS = 40
TP = TopicPartition("t", 0)


def fill(brokers: Brokers, admin: Admin) -> tuple[int, int, int]:
    """A topic with closed segments; its replicas, the leader first."""
    config = {"min.insync.replicas": "2", "segment.bytes": "4096", "index.interval.bytes": "512"}
    admin.create_topic("t", partitions=1, replication_factor=3, config=config)
    wait_in_sync(admin, "t")
    with Producer(brokers.bootstrap_servers, batch_size=600) as producer:
        for number in range(RECORDS):
            producer.send("t", b"%0500d" % number).result()
    leader = admin.describe_topics(["t"])[0].partition(0).leader
    first, second = (each for each in range(3) if each != leader)
    topic_id = admin.describe_topics(["t"])[0].topic_id
    for each in brokers.running.values():
        replica = each.broker.host.replica_of(topic_id, 0)
        waited_for(lambda replica=replica: replica.role.high_watermark == RECORDS)  # type: ignore[misc]
        replica.log.flush()
    return leader, first, second


def segment(brokers: Brokers, broker_id: int, number: int) -> Path:
    return sorted(Path(brokers.running[broker_id].broker.settings.log_dir).glob("*-0/*.log"))[number]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    with path.open("r+b") as file:
        file.write(data)


def falsify(path: Path) -> None:
    """Give the first batch another append time, with a checksum that matches."""
    data = bytearray(path.read_bytes())
    header = header_at(data)
    assert header is not None and HEADER.size <= header.length
    stamp(data, header.base_offset, header.leader_epoch, header.append_timestamp_us + 1)
    with path.open("r+b") as file:
        file.write(data)


def test_replicas_are_compared_and_damage_is_repaired(
    brokers: Brokers, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKALOG_BOOTSTRAP", brokers.bootstrap_servers)
    with Admin(brokers.bootstrap_servers) as admin:
        leader, follower, other = fill(brokers, admin)
        same = Ran(capfdbinary, "topics", "verify", "t")
        assert same.code == 0 and same.out.startswith("1 partition, 3 replicas, ") and same.out.endswith(": 0 faults\n")
        [row] = json.loads(Ran(capfdbinary, "topics", "verify", "--bytes-per-second", "20MB", "--json").out)
        assert (row["replicas"], row["end_offset"], row["batches"], row["faults"]) == (
            [leader, follower, other], RECORDS, RECORDS, [],
        )  # fmt: skip
        before = segment(brokers, follower, 1).read_bytes()
        flip(segment(brokers, follower, 1), 700)
        found = Ran(capfdbinary, "topics", "verify", "t", "--partition", "0")
        assert found.code == 1
        assert f"t-0 on broker {follower}: offsets " in found.out and " damaged\n" in found.out
        assert found.err == f"kafkalog: 1 fault, the first in t-0 on broker {follower}\n"
        assert len(admin.describe_brokers()[follower].damaged) == 1
        assert "damaged range" in Ran(capfdbinary, "cluster", "describe").out
        mended = Ran(capfdbinary, "topics", "verify", "t", "--repair")
        assert mended.code == 0, mended.out
        assert segment(brokers, follower, 1).read_bytes() == before
        assert "damaged" not in Ran(capfdbinary, "cluster", "describe").out
        with pytest.raises(UnknownTopic):
            admin.verify("nothing")  # at once: not when the iterator is used
        with pytest.raises(UnknownPartition):
            admin.verify("t", [0, 5])
        assert [(each.partition, each.faults) for each in admin.verify("t", repair=True)] == [(TP, [])]

        for broker_id in range(3):
            flip(segment(brokers, broker_id, 1), 700)
        left = Ran(capfdbinary, "topics", "verify", "t", "--repair", "--json")
        assert left.code == 1
        faults = json.loads(left.out)[0]["faults"]
        assert [each["broker"] for each in faults] == [0, 1, 2]
        assert all(each["what"] == "damaged" and "corrupt batch" in each["reason"] for each in faults)
        described = json.loads(Ran(capfdbinary, "cluster", "describe", "--json").out)
        assert len(described["damaged"]) == 3


def test_replicas_that_differ_or_are_away_are_faults(
    brokers: Brokers, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKALOG_BOOTSTRAP", brokers.bootstrap_servers)
    with Admin(brokers.bootstrap_servers) as admin:
        leader, follower, other = fill(brokers, admin)
        falsify(segment(brokers, follower, 1))
        found = json.loads(Ran(capfdbinary, "topics", "verify", "t", "--json").out)[0]["faults"]
        [fault] = found
        base = int(segment(brokers, follower, 1).name[:20])
        assert (fault["broker"], fault["what"], fault["reason"]) == (follower, "differs", f"from broker {leader}")
        assert fault["start_offset"] <= base < fault["end_offset"] <= base + 4
        brokers.kill(other)
        waited_for(lambda: len(admin.describe_cluster().brokers) == 2)
        found = json.loads(Ran(capfdbinary, "topics", "verify", "t", "--json").out)[0]["faults"]
        assert {each["broker"]: each["what"] for each in found} == {follower: "differs", other: "not checked"}
        Ran(capfdbinary, "topics", "verify", "t").fails_with(
            "1 fault, 1 replica not checked, the first in t-0 on broker"
        )
    usage = Ran(capfdbinary, "topics", "verify", "--partition", "0")
    assert usage.code == 2 and "--partition needs one TOPIC" in usage.err
    Ran(capfdbinary, "topics", "verify", "nothing").fails_with("there is no topic 'nothing'")
    Ran(capfdbinary, "topics", "verify", "t", "--partition", "5").fails_with("has no partition 5")


def test_faults_that_touch_are_one() -> None:
    def fault(start: int, end: int, broker_id: int = 0, what: str = "damaged") -> ReplicaFault:
        return ReplicaFault(TP, broker_id, what, start, end)

    found = [fault(10, 20), fault(0, 5), fault(5, 12), fault(10, 20), fault(30, 40), fault(5, 12, 1)]
    assert merged(found) == [fault(0, 20), fault(30, 40), fault(5, 12, 1)]
