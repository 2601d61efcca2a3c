"""`kafkalog topics` and `offsets`: what they print and change, against a running cluster."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Producer, TopicPartition
from kafkalog.cli import extents, topics
from kafkalog.client.cluster import Cluster, PartitionInfo, TopicInfo
from tests.kafkalog.cli.command_line import Ran, feed, running
from tests.waiting import waited_for


@pytest.mark.parametrize(
    ("leaders", "said"),
    [([0, 1], "2 partitions"), ([0, -1, -1], "3 partitions (2 not open yet; clients ask again for a while)")],
)
def test_a_topic_that_was_made_says_which_part_of_it_cannot_be_used_yet(leaders: list[int], said: str) -> None:
    partitions = tuple(PartitionInfo(number, leader, 0, (0,), ()) for number, leader in enumerate(leaders))
    assert topics._partitions_of(TopicInfo("t", b"t" * 16, {}, {}, partitions, 0)) == said


def test_brokers_that_have_not_followed_a_change_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    topics._warn_of((), "the change")
    assert capsys.readouterr().err == ""
    topics._warn_of((1, 3), "the new topic")
    topics._warn_of((2,), "the change")
    assert capsys.readouterr().err == (
        "warning: brokers 1, 3 have not read the new topic from ZooKeeper yet: it takes effect there later\n"
        "warning: broker 2 has not read the change from ZooKeeper yet: it takes effect there later\n"
    )


def test_topics_are_made_listed_described_altered_and_deleted(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    name = f"{topic}-more"
    made = Ran(capfdbinary, "topics", "create", name, "--partitions", "3", "--config", "retention.ms=60000")
    assert (made.code, made.out) == (0, f"created topic {name} with 3 partitions\n")
    Ran(capfdbinary, "topics", "create", name).fails_with(f"topic '{name}' exists already")
    assert re.search(rf"^{name} +3 +0 +0$", Ran(capfdbinary, "topics", "list").out, re.MULTILINE)
    assert {topic, name} <= {each["topic"] for each in json.loads(Ran(capfdbinary, "topics", "list", "--json").out)}

    [described] = json.loads(Ran(capfdbinary, "topics", "describe", name, "--json").out)
    assert described["topic"] == name and len(described["partitions"]) == 3
    assert described["config"] == {"retention.ms": "60000"}
    assert described["effective"]["segment.bytes"] == str(1 << 30)
    text = Ran(capfdbinary, "topics", "describe", name).out
    assert text.splitlines()[0].startswith(name) and "PARTITION" in text
    assert re.search(r"^retention.ms +60000 +the topic$", text, re.MULTILINE)
    assert re.search(r"^segment.bytes +1073741824 +the default$", text, re.MULTILINE)

    altered = Ran(
        capfdbinary, "topics", "alter", name, "--set", "segment.bytes=65536", "--unset", "retention.ms",
        "--partitions", "4",
    )  # fmt: skip
    assert altered.out == f"topic {name} has 4 partitions, segment.bytes=65536\n"
    Ran(capfdbinary, "topics", "alter", name, "--set", "segment.byte=1").fails_with("did you mean 'segment.bytes'?")
    Ran(capfdbinary, "topics", "alter", name, "--set", "replication.factor=2").fails_with(
        f"`kafkalog topics reassign {name} --replication-factor N` changes the number of copies"
    )
    Ran(capfdbinary, "topics", "create", "other", "--config", "replication.factor=2").fails_with(
        "give it as --replication-factor"
    )
    assert Ran(capfdbinary, "topics", "delete", name, "--yes").out == f"deleted topic {name}\n"
    Ran(capfdbinary, "topics", "describe", name).fails_with(f"there is no topic '{name}'")


def test_making_and_deleting_can_be_repeated(topic: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    name = f"{topic}-again"
    said = [
        Ran(capfdbinary, "topics", *arguments).out
        for arguments in [("create", name, "--if-not-exists")] * 2 + [("delete", name, "--if-exists", "--yes")] * 2
    ]
    assert said == [
        f"created topic {name} with 1 partition\n",
        f"topic {name} exists already\n",
        f"deleted topic {name}\n",
        f"there is no topic {name}\n",
    ]
    Ran(capfdbinary, "topics", "delete", name, "--yes").fails_with(f"there is no topic '{name}'")


def test_what_was_made_and_altered_is_printed_for_programs(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    name = f"{topic}-json"
    create = ["topics", "create", name, "--config", "retention.ms=60000", "--if-not-exists", "--json"]
    made, again = (json.loads(Ran(capfdbinary, *create).out) for _ in range(2))
    assert (made["topic"], made["created"], made["config"]) == (name, True, {"retention.ms": "60000"})
    assert (again["topic_id"], again["created"]) == (made["topic_id"], False)
    altered = json.loads(Ran(capfdbinary, "topics", "alter", name, "--partitions", "2", "--json").out)
    assert (altered["topic_id"], altered["behind"]) == (made["topic_id"], [])
    assert [(each["partition"], each["replicas"]) for each in altered["partitions"]] == [(0, [0]), (1, [0])]
    [described] = json.loads(Ran(capfdbinary, "topics", "describe", name, "--json").out)
    assert altered.keys() - described.keys() == {"behind"} and altered["effective"] == described["effective"]
    Ran(capfdbinary, "topics", "delete", name, "--yes")


@pytest.mark.parametrize("answer", [b"", b"n\n", b"y\n"], ids=["nothing", "no", "yes"])
def test_without_a_terminal_and_without_yes_no_topic_is_deleted(
    answer: bytes, topic: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, answer)
    ran = Ran(capfdbinary, "topics", "delete", topic)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith(
        f"Error: delete topic {topic} and all its records? "
        "Standard input is no terminal, so nobody can be asked: give --yes\n"
    )
    assert topic in Ran(capfdbinary, "topics", "list").out.split()


def test_a_lost_partition_is_described_and_recovered(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(data=tmp_path) as running:
        monkeypatch.setenv("KAFKALOG_BOOTSTRAP", running.bootstrap_servers)
        with Admin(running.bootstrap_servers) as admin:
            topic_id = admin.create_topic("t", partitions=2).topic_id
            admin.commit("readers", {TopicPartition("t", 1): 4})
        assert Ran(capfdbinary, "topics", "recover", "t").err == "no partition of t is lost\n"
        assert Ran(capfdbinary, "topics", "recover", "t", "--accept-loss").err == "no partition of t is lost\n"
        [broker] = running.brokers
        broker.stop()
        shutil.rmtree(broker.data_directory / f"{topic_id.hex()}-1")
        broker.start()

        sentence = f"partition t-1 is lost: its folder {topic_id.hex()}-1 is missing from data directory"
        assert sentence in Ran(capfdbinary, "topics", "describe", "t").out
        [described] = json.loads(Ran(capfdbinary, "topics", "describe", "--json").out)
        assert described["partitions"][0]["error"] is None
        assert described["partitions"][1]["error"].startswith(sentence)
        findings = {each["check"]: each for each in json.loads(Ran(capfdbinary, "doctor", "--json").out)}
        assert findings["partition t-1"]["state"] == "failed"
        assert findings["partition t-1"]["found"].startswith(sentence)
        assert sentence in Ran(capfdbinary, "topics", "recover", "t").out
        assert sentence not in Ran(capfdbinary, "topics", "recover", "t", "--partition", "0").out
        Ran(capfdbinary, "topics", "recover", "t", "--partition", "0", "--accept-loss").fails_with("t-0 is not lost")
        Ran(capfdbinary, "topics", "recover", "nope").fails_with("there is no topic 'nope'")
        for accepts in ((), ("--accept-loss",)):
            ran = Ran(capfdbinary, "topics", "recover", "t", "--partition", "9", *accepts)
            ran.fails_with("topic 't' has no partition 9; it has 2")
        recovered = Ran(capfdbinary, "topics", "recover", "t", "--accept-loss")
        assert recovered.out == "t-1 begins anew at offset 10000004; what it held is lost\n"
        table = json.loads(Ran(capfdbinary, "offsets", "t", "--json").out)
        assert [row["start_offset"] for row in table] == [0, 10000004]

        broker.stop()
        for number in (0, 1):
            shutil.rmtree(broker.data_directory / f"{topic_id.hex()}-{number}")
        broker.start()
        recover = ["topics", "recover", "t", "--accept-loss"]
        recovered = Ran(capfdbinary, *recover, "--partition", "0", "--start-offset", "7")
        assert recovered.out == "t-0 begins anew at offset 7; what it held is lost\n"
        assert Ran(capfdbinary, *recover).out.startswith("t-1 begins anew at offset ")


def test_commands_show_the_other_partitions_of_a_topic_and_say_which_is_lost(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"log.retention.check.interval.ms": 50}
    with LocalCluster(data=tmp_path, settings=settings) as cluster, Admin(cluster.bootstrap_servers) as admin:
        monkeypatch.setenv("KAFKALOG_BOOTSTRAP", cluster.bootstrap_servers)
        topic_id = admin.create_topic("t", partitions=3).topic_id
        with Producer(cluster.bootstrap_servers) as producer:
            for number in range(9):
                producer.send("t", b"%d" % number, partition=number // 3)
        admin.commit("readers", {TopicPartition("t", number): 1 for number in range(3)})
        sentence = f"partition t-1 is lost: its folder {topic_id.hex()}-1 is missing from data directory"

        def lost() -> bool:
            return TopicPartition("t", 1) in admin.unserved(["t"])

        # While it is read: the others go on.
        with running("consume", "t", "--from-beginning") as consumer:
            assert consumer.stdout is not None and consumer.stderr is not None
            assert sorted(consumer.stdout.readline() for _ in range(9)) == [f"{number}\n" for number in range(9)]
            shutil.rmtree(cluster.brokers[0].data_directory / f"{topic_id.hex()}-1")
            waited_for(lost)
            assert consumer.stderr.readline().startswith(f"kafkalog: {sentence}")
            with Producer(cluster.bootstrap_servers) as producer:
                for partition in (0, 2):
                    producer.send("t", b"more", partition=partition).result(60)
            assert [consumer.stdout.readline() for _ in range(2)] == ["more\n"] * 2
            consumer.send_signal(signal.SIGINT)
            assert consumer.wait(60) == 1
            assert consumer.stderr.read() == ""

        # Before it is read.
        ran = Ran(capfdbinary, "offsets", "t", "--group", "readers")
        ran.fails_with(sentence)
        assert ran.out.splitlines()[2].split() == ["1", "-", "-", "-", "1", "-"]
        rows = json.loads(Ran(capfdbinary, "offsets", "t", "--group", "readers", "--json").out)
        assert [row["end_offset"] for row in rows] == [4, None, 4]
        assert [row["lag"] for row in rows] == [3, None, 3]
        assert rows[0]["error"] is None and rows[1]["error"].startswith(sentence)
        ran = Ran(capfdbinary, "groups", "describe", "readers")
        ran.fails_with(sentence)
        assert "\nlag 6 records, " in ran.out
        rows = json.loads(Ran(capfdbinary, "groups", "describe", "readers", "--json").out)["partitions"]
        assert [row["lag"] for row in rows] == [3, None, 3]
        assert rows[1]["error"].startswith(sentence) and rows[1]["committed"] == 1
        ran = Ran(capfdbinary, "consume", "t", "--from-beginning", "--max-messages", "8")
        ran.fails_with(sentence)
        assert sorted(ran.out.split()) == ["0", "1", "2", "6", "7", "8", "more", "more"]
        ran = Ran(capfdbinary, "consume", "t", "--group", "readers", "--max-messages", "6")
        ran.fails_with(sentence)
        assert sorted(ran.out.split()) == ["1", "2", "7", "8", "more", "more"]
        assert admin.committed("readers") == {TopicPartition("t", n): offset for n, offset in enumerate((4, 1, 4))}

        for number in (0, 2):
            shutil.rmtree(cluster.brokers[0].data_directory / f"{topic_id.hex()}-{number}")
        waited_for(lambda: len(admin.unserved(["t"])) == 3)
        ran = Ran(capfdbinary, "consume", "t")
        assert (ran.code, ran.out, ran.err.count("is lost")) == (1, "", 3)


def test_a_broker_that_is_away_hides_no_other_ones_offsets(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "_OPENING_SECONDS", 0.5)
    with LocalCluster(2) as own, Admin(own.bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=2)
        admin.commit("readers", {TopicPartition(topic, number): 0 for number in range(2)})
        leaders = [partition.leader for partition in admin.describe_topics([topic])[0].partitions]
        own.brokers[leaders[0]].kill()
        other = own.brokers[leaders[1]].address
        for command in (["offsets", topic], ["groups", "describe", "readers"]):
            ran = Ran(capfdbinary, *command, "--json", "--bootstrap", other)
            told = json.loads(ran.out)
            rows = told if isinstance(told, list) else told["partitions"]
            assert [row["end_offset"] for row in rows] == [None, 0]
            assert rows[1]["error"] is None and f"broker {leaders[0]}" in rows[0]["error"]
            assert ran.code == 1 and ran.err.count("\n") == 1


def test_offsets_tell_start_end_and_a_groups_lag(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(10):
            producer.send(topic, b"%d" % number, partition=0)
    with Admin(cluster.bootstrap_servers) as admin:
        admin.delete_records({TopicPartition(topic, 0): 3})
        admin.commit("watchers", {TopicPartition(topic, 0): 7})
    rows = json.loads(Ran(capfdbinary, "offsets", topic, "--group", "watchers", "--json").out)
    assert [(row["partition"], row["start_offset"], row["end_offset"]) for row in rows] == [(0, 3, 10), (1, 0, 0)]
    assert [(row["committed"], row["lag"]) for row in rows] == [(7, 3), (None, 0)]
    assert rows[0]["size_bytes"] > 0
    Ran(capfdbinary, "offsets", topic, "--group", "watcher").fails_with("there is no group 'watcher'")
    table = Ran(capfdbinary, "offsets", topic).out.splitlines()
    assert table[0].split() == ["PARTITION", "START", "OFFSET", "END", "OFFSET", "SIZE", "BYTES"]
    assert table[1].split()[:3] == ["0", "3", "10"]


def test_topics_are_listed_and_described_with_how_much_is_in_them(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(10):
            producer.send(topic, b"%d" % number, partition=number % 2)
    with Admin(cluster.bootstrap_servers) as admin:
        admin.delete_records({TopicPartition(topic, 0): 2})
        listed = admin.list_offsets({TopicPartition(topic, number): "latest" for number in (0, 1)})
        asked: list[str] = []
        call = Cluster.call

        def noted(own: Cluster, method: str, request: Any, **how: Any) -> Any:
            asked.append(method)
            return call(own, method, request, **how)

        with monkeypatch.context() as patched:
            patched.setattr(Cluster, "call", noted)
            rows = {row["topic"]: row for row in json.loads(Ran(capfdbinary, "topics", "list", "--json").out)}
    assert len(asked) <= 4, asked  # twice for the cluster, for the topics, and one request to the only broker
    sizes = [found.size_bytes for found in listed.values()]
    assert rows[topic] == {"topic": topic, "partitions": 2, "records": 8, "size_bytes": sum(sizes), "unserved": 0}
    [described] = json.loads(Ran(capfdbinary, "topics", "describe", topic, "--json").out)
    found = [(each["start_offset"], each["end_offset"], each["size_bytes"]) for each in described["partitions"]]
    assert found == [(2, 5, sizes[0]), (0, 5, sizes[1])]
