"""`kafkalog topics` and `cluster describe` of topics with several replicas, some of which are away."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest

from broker.replica.metadata import Metadata
from kafkalog import Admin
from kafkalog.client.admin import TopicDescription
from tests.kafkalog.cli.command_line import Ran
from tests.kafkalog.replicated import Brokers
from tests.waiting import waited_for


def test_replicas_are_shown_and_those_that_lack_are_found(
    brokers: Brokers, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKALOG_BOOTSTRAP", brokers.bootstrap_servers)
    made = Ran(capfdbinary, "topics", "create", "t", "--replication-factor", "2", "--config", "min.insync.replicas=2")
    assert (made.code, made.out) == (0, "created topic t with 1 partition, 2 copies of each\n")
    Ran(capfdbinary, "topics", "create", "u", "--replication-factor", "4").fails_with(
        "replication factor 4 is larger than the number of live brokers, 3: start more, or create the topic with at "
        "most 3"
    )
    Ran(capfdbinary, "topics", "create", "u", "--config", "min.insync.replicas=2").fails_with(
        "min.insync.replicas=2 is not valid: the topic has 1 replica"
    )
    [described] = json.loads(Ran(capfdbinary, "topics", "describe", "t", "--json").out)
    [partition] = described["partitions"]
    leader, follower = partition["replicas"]
    assert (partition["leader"], sorted(partition["isr"])) == (leader, sorted((leader, follower)))
    text = Ran(capfdbinary, "topics", "describe", "t").out
    assert re.search(rf"^ +0 +{leader} +0 +{leader}, {follower} +\d, \d +0 +0 +\d+$", text, re.MULTILINE), text
    for state in ("under-replicated", "offline"):
        listed = Ran(capfdbinary, "topics", "list", f"--{state}")
        assert (listed.code, listed.out, listed.err) == (0, "", f"no partition is {state}\n")
    assert Ran(capfdbinary, "topics", "list", "--under-replicated", "--offline").code == 2

    with Admin(brokers.bootstrap_servers) as admin:
        brokers.kill(follower)
        waited_for(lambda: admin.describe_topics(["t"])[0].partition(0).is_under_replicated)
        listed = Ran(capfdbinary, "topics", "list", "--under-replicated")
        assert re.search(rf"^t +0 +{leader} +{leader}, {follower} +{follower} +{leader} +{follower}$", listed.out, re.M)
        listed.fails_with("kafkalog: 1 partition is under-replicated\n")
        assert Ran(capfdbinary, "topics", "list", "--offline").out == ""
        brokers.kill(leader)
        waited_for(lambda: {broker.broker_id for broker in admin.describe_cluster().brokers} == set(brokers.running))
        waited_for(lambda: admin.describe_topics(["t"])[0].partition(0).is_offline(brokers.running))
        waited_for(lambda: admin.describe_controller() in brokers.running)
    listed = Ran(capfdbinary, "topics", "list", "--offline", "--json")
    listed.fails_with("kafkalog: 1 partition is offline\n")
    [row] = json.loads(listed.out)
    assert (row["topic"], row["partition"], row["replicas"]) == ("t", 0, [leader, follower])
    [left] = brokers.running
    found = json.loads(Ran(capfdbinary, "cluster", "describe", "--json").out)
    assert (found["controller"], found["under_replicated"], found["offline"]) == (left, 1, 1)
    said = Ran(capfdbinary, "cluster", "describe").out.splitlines()
    assert said[2] == f"controller: broker {left}; 1 under-replicated partition, 1 without a leader"


def test_a_replica_is_missing_while_its_broker_is_not_registered_whatever_the_in_sync_set_says(
    brokers: Brokers, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKALOG_BOOTSTRAP", brokers.bootstrap_servers)
    with Admin(brokers.bootstrap_servers) as admin:
        made = admin.create_topic("t", partitions=3, replication_factor=1)
        [away] = [each.partition for each in made.partitions if each.replicas == (2,)]
        assert Ran(capfdbinary, "topics", "list", "--under-replicated").code == 0
        brokers.kill(2)
        waited_for(lambda: len(admin.describe_cluster().brokers) == 2)
        listed = Ran(capfdbinary, "topics", "list", "--under-replicated", "--json")
        listed.fails_with("kafkalog: 1 partition is under-replicated\n")
        [row] = json.loads(listed.out)
        assert (row["partition"], row["replicas"], row["isr"], row["not_live"]) == (away, [2], [2], [2])
        assert "1 under-replicated partition, 1 without a leader" in Ran(capfdbinary, "cluster", "describe").out


def test_no_partition_is_called_well_while_nobody_who_answers_has_a_connection_to_zookeeper(
    brokers: Brokers, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKALOG_BOOTSTRAP", brokers.bootstrap_servers)
    is_certain = True
    topics = Admin.topics

    def cut_off(admin: Admin) -> list[TopicDescription]:
        nonlocal is_certain
        is_certain = False
        return topics(admin)

    monkeypatch.setattr(Metadata, "is_certain", lambda metadata: is_certain)
    monkeypatch.setattr(Admin, "topics", cut_off)
    for state in ("under-replicated", "offline"):
        for was_certain, form in product((False, True), ([], ["--json"])):
            is_certain = was_certain  # True: it is cut off between the questions
            listed = Ran(capfdbinary, "topics", "list", f"--{state}", *form)
            assert listed.out == ""
            listed.fails_with(f"kafkalog: which partitions are {state} is not known: no broker that answers has a conn")
