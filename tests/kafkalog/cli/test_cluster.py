"""`kafkalog cluster describe`, against clusters that are whole and that are not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Producer
from kafkalog.versions import FORMATS
from tests.kafkalog.cli.command_line import Ran
from tests.waiting import waited_for


def test_what_no_broker_serves_is_counted_apart(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(brokers=2, data=tmp_path) as cluster, Admin(cluster.bootstrap_servers) as admin:
        monkeypatch.setenv("KAFKALOG_BOOTSTRAP", cluster.bootstrap_servers)
        [described] = [admin.create_topic("t", partitions=4)]
        with Producer(cluster.bootstrap_servers) as producer:
            for number in range(12):
                producer.send("t", b"%d" % number, partition=number % 4)
        away = [each.partition for each in described.partitions if each.leader == 1]
        assert len(away) == 2
        whole = json.loads(Ran(capfdbinary, "cluster", "describe", "--json").out)
        assert [(each["broker"], each["leads"]) for each in whole["brokers"]] == [(0, 2), (1, 2)]
        assert (whole["topics"], whole["partitions"], whole["records"], whole["unserved"]) == (1, 4, 12, [])
        assert whole["uncounted_partitions"] == 0
        assert whole["client_version"] == whole["brokers"][0]["version"]
        assert (whole["cluster_id"], whole["zookeeper"]) == (
            admin.describe_cluster().cluster_id,
            f"{cluster.zookeeper_connect}/kafkalog",
        )
        text = Ran(capfdbinary, "cluster", "describe").out
        assert text.splitlines()[1].startswith("1 topic, 4 partitions, 12 records, ") and "not served" not in text

        cluster.brokers[1].stop()
        waited_for(lambda: len(admin.describe_cluster().brokers) == 1)
        lost = tmp_path / "broker-0" / f"{described.topic_id.hex()}-{next(n for n in range(4) if n not in away)}"
        cluster.brokers[0].stop()
        shutil.rmtree(lost)
        cluster.brokers[0].start()
        waited_for(lambda: len(admin.unserved(["t"])) == 1)
        [row] = json.loads(Ran(capfdbinary, "topics", "list", "--json").out)
        assert (row["partitions"], row["records"], row["unserved"]) == (4, 3, 3)
        assert re.search(r"^t +4 +3 +\d+ +3$", Ran(capfdbinary, "topics", "list").out, re.MULTILINE)
        found = json.loads(Ran(capfdbinary, "cluster", "describe", "--json").out)
        errors = {each["partition"]: each["error"] for each in found["unserved"]}
        assert {number: errors[number] for number in away} == dict.fromkeys(
            away, "its leader, broker 1, is not registered in the cluster"
        )
        assert (found["records"], found["uncounted_partitions"], len(errors)) == (3, 3, 3)
        assert any(each.startswith("partition t-") and "is lost" in each for each in errors.values())
        text = Ran(capfdbinary, "cluster", "describe").out
        least = f"1 topic, 4 partitions, at least 3 records, at least {found['size_bytes']} bytes"
        assert text.splitlines()[1] == least
        assert "\n3 partitions not served:\n  t-0: " in text


def test_an_upgrade_says_what_it_would_do_and_what_holds_it_back(
    cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKALOG_BOOTSTRAP", cluster.bootstrap_servers)
    newest, understood = FORMATS.newest, str(FORMATS)
    for given in ([], ["--dry-run"], ["--level", str(newest)]):
        assert Ran(capfdbinary, "cluster", "upgrade", *given).out == f"the format level stays {newest}\n"
    text = Ran(capfdbinary, "cluster", "upgrade", "--dry-run", "--level", str(newest + 1)).out
    assert re.fullmatch(
        rf"the format level would be {newest + 1}; it was {newest}\n"
        rf"broker 0 \(.*\) holds it back: it understands {understood}\n",
        text,
    )
    found = json.loads(Ran(capfdbinary, "cluster", "upgrade", "--dry-run", "--level", str(newest + 1), "--json").out)
    assert (found["level_before"], found["level"], found["dry_run"]) == (newest, newest + 1, True)
    assert (found["held_back_by"], found["absent"]) == ([0], [])
    Ran(capfdbinary, "cluster", "upgrade", "--level", str(newest + 1)).fails_with(
        f"the cluster's format level stays {newest}: broker 0 understands {understood}; upgrade it before"
    )
    described = json.loads(Ran(capfdbinary, "cluster", "describe", "--json").out)
    assert (described["format_level"], described["brokers"][0]["format_levels"]) == (newest, list(FORMATS))
