"""The supervisor's decisions, over processes that are only told of; `commands/test_servers.py` kills real ones."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from broker.local.cluster import Health, LocalBroker, LocalCluster, LocalZooKeeper
from broker.local.supervisor import Supervisor, how_it_ended
from kafkalog.clock import Clock
from kafkalog.errors import AddressInUse, BrokerUnreachable, KafkalogError, StorageFailed


class Hands(Clock):
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Startable:
    starts = 0
    fails = False
    error: KafkalogError = AddressInUse(address="here:1", what="port")

    def start(self) -> None:
        self.starts += 1
        if self.fails:
            raise self.error


class Member(Startable, LocalBroker):
    def __init__(self, number: int) -> None:
        self.broker_id, self.pid, self.log_file = number, 7, Path(f"/logs/{number}")


class Keeper(Startable, LocalZooKeeper):
    def __init__(self) -> None:
        self.pid, self.log_file = 8, Path("/logs/zookeeper")


class Told:
    """A cluster of which a test says what happened."""

    bootstrap_servers = "here:1,here:3"

    def __init__(self) -> None:
        self.brokers = [Member(0), Member(1)]
        self.zookeeper = Keeper()
        self.health = Health({}, [])

    def look(self) -> Health:
        health, self.health = self.health, Health({}, [])
        return health


@pytest.fixture
def cluster() -> Told:
    return Told()


def supervisor(cluster: Told, said: list[str], clock: Clock, restart: bool = True) -> Supervisor:
    return Supervisor(cast(LocalCluster, cluster), said.append, restart=restart, clock=clock)


def test_what_ran_for_a_minute_starts_at_once_and_what_keeps_ending_ever_later(cluster: Told) -> None:
    said: list[str] = []
    clock = Hands()
    looking = supervisor(cluster, said, clock)
    one = cluster.brokers[1]
    clock.now += 60
    cluster.health = Health({"broker 1": -9}, [])
    looking.look()
    assert said == [
        "broker 1 was ended by signal 9 (SIGKILL); its log is /logs/1; it is started again now",
        "broker 1 serves again",
    ]
    assert one.starts == 1 and cluster.brokers[0].starts == 0
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        said.clear()
        cluster.health = Health({"broker 1": 1}, [])
        looking.look()
        assert said == [f"broker 1 ended with code 1; its log is /logs/1; it is started again in {pause} s"]
        clock.now += pause - 0.5
        starts = one.starts
        looking.look()
        assert one.starts == starts
        clock.now += 0.5
        looking.look()
        assert one.starts == starts + 1 and said[1:] == ["broker 1 serves again"]
    clock.now += 60
    cluster.health = Health({"broker 1": -11}, [])
    looking.look()
    assert said[-2].endswith("(SIGSEGV); its log is /logs/1; it is started again now")


def test_a_failed_start_is_retried(cluster: Told) -> None:
    said: list[str] = []
    clock = Hands()
    looking = supervisor(cluster, said, clock)
    cluster.zookeeper.fails = True
    clock.now += 60
    cluster.health = Health({"ZooKeeper": -15}, [])
    looking.look()
    assert said[1].startswith("ZooKeeper does not start: ") and said[1].endswith("; it is tried again in 1 s")
    assert cluster.zookeeper.pid is None  # it may be another process's by now
    clock.now += 1
    looking.look()
    assert said[2].endswith("tried again in 2 s")
    cluster.zookeeper.fails = False
    clock.now += 2
    looking.look()
    assert said[3] == "ZooKeeper serves again"


def test_a_broker_whose_disk_failed_is_not_started_again_however_it_ended(cluster: Told) -> None:
    said: list[str] = []
    clock = Hands()
    looking = supervisor(cluster, said, clock)
    zero, one = cluster.brokers
    clock.now += 60
    failed = {"level": "error", "event": "log_directory_failed directory=/data reason=fdatasync"}
    cluster.health = Health({}, [(0, failed)])
    looking.look()
    cluster.health = Health({"broker 0": -9}, [])
    looking.look()
    look_first = "look at its disk, mount it again, then start the cluster anew"
    assert said[1:] == [
        "broker 0 was ended by signal 9 (SIGKILL); its log is /logs/0; it is not started again: " + look_first
    ]
    said.clear()
    one.fails, one.error = True, StorageFailed(directory="/data", reason="fdatasync")
    cluster.health = Health({"broker 0": -9, "broker 1": -9}, [])
    with pytest.raises(BrokerUnreachable, match="every broker has ended"):
        looking.look()
    assert said[1:] == [
        "broker 1 does not start: log directory /data is out of service: fdatasync; it is not tried again: "
        + look_first
    ]
    clock.now += 600
    cluster.health = Health({"broker 0": -9, "broker 1": 1}, [])
    with pytest.raises(BrokerUnreachable):
        looking.look()
    assert (zero.starts, one.starts) == (0, 1)


def test_without_restarts_the_others_continue_until_none_is_left(cluster: Told) -> None:
    said: list[str] = []
    looking = supervisor(cluster, said, Hands(), restart=False)
    cluster.health = Health({"broker 0": -9}, [])
    looking.look()
    cluster.health = Health({"broker 0": -9}, [])
    looking.look()
    assert said == ["broker 0 was ended by signal 9 (SIGKILL); its log is /logs/0; it is not started again"]
    cluster.health = Health({"broker 0": -9, "broker 1": 0}, [])
    with pytest.raises(BrokerUnreachable, match="every broker has ended"):
        looking.look()
    assert cluster.brokers[0].starts == cluster.brokers[1].starts == 0


def test_what_brokers_log_is_said_with_the_broker(cluster: Told) -> None:
    said: list[str] = []
    cluster.health = Health({}, [(1, {"level": "warning", "event": "disk_full partition=t-0"})])
    supervisor(cluster, said, Hands()).look()
    assert said == ["broker 1: warning: disk_full partition=t-0"]


def test_ends_are_named() -> None:
    assert how_it_ended(0) == "ended with code 0"
    assert how_it_ended(-15) == "was ended by signal 15 (SIGTERM)"
    assert how_it_ended(-200) == "was ended by signal 200"


def test_a_word_in_what_a_broker_logs_of_others_is_no_failure_of_its_disk(cluster: Told) -> None:
    said: list[str] = []
    looking = supervisor(cluster, said, clock := Hands())
    clock.now += 60
    told = {"level": "warning", "event": "retried reason=log_directory_failed"}
    cluster.health = Health({"broker 0": 1}, [(0, told)])
    looking.look()
    assert cluster.brokers[0].starts == 1


def test_what_has_ended_has_no_pid_and_what_runs_anew_is_not_steady_yet(cluster: Told) -> None:
    said: list[str] = []
    looking = supervisor(cluster, said, clock := Hands())
    clock.now += 60
    cluster.health = Health({"broker 0": 1}, [])
    looking.look()
    assert [broker.pid for broker in cluster.brokers] == [None, 7]  # these members get none as they start
    assert cluster.brokers[0].starts == 1
    clock.now += 59
    cluster.health = Health({"broker 0": 1}, [])
    looking.look()
    assert cluster.brokers[0].starts == 1
    assert said[-1].endswith("it is started again in 1 s")
