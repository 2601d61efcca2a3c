"""A seed always stands for the same plan; the probes see what brokers log and clients write."""

from __future__ import annotations

from collections import Counter

import pytest

from kafkalog.client.config import ConsumerSettings, parse_producer
from kafkalog.records import TopicPartition
from tests.chaos import coverage
from tests.chaos.__main__ import parsed
from tests.chaos.history import Operation
from tests.chaos.plan import KINDS, plan


def test_a_seed_stands_for_one_plan() -> None:
    assert plan(7, 60) == plan(7, 60)
    assert plan(7, 60) != plan(8, 60)
    assert plan(7, 60).text() == plan(7, 60).text()


def test_seeds_together_have_all_faults_alone_and_together() -> None:
    steps = [step for seed in range(20) for step in plan(seed, 60).steps]
    assert {fault.kind for step in steps for fault in step.faults} == set(KINDS)
    assert {len(step.faults) for step in steps} == {1, 2, 3}


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_lasts_as_long_as_it_is_to_and_its_settings_are_valid(seed: int) -> None:
    made = plan(seed, 60)
    assert sum(step.pause_s + step.hold_s for step in made.steps) >= 60
    for settings in made.producers:
        given = {name: value for name, value in settings.items() if name != "given_up"}
        assert parse_producer(given).max_in_flight_requests <= made.broker_settings["producer.batches.remembered"]
    for reader in made.readers:
        ConsumerSettings.parse({name: value for name, value in reader.items() if name.startswith("fetch")})


def test_a_plan_with_replicas_demands_acks_of_all() -> None:
    made = plan(1, 10, replication_factor=3)
    assert made.brokers == 3
    assert made.topic_settings["min.insync.replicas"] == "2"
    assert {settings["acks"] for settings in made.producers} == {"all"}


def test_probes_see_what_brokers_log() -> None:
    lines = [
        "2026-01-01 INFO broker.storage.loader log_recovered partition=t-0 bytes=1 end_offset=5",
        "2026-01-01 WARNING kafkalog.zk.session zookeeper_disconnected address=x session_lost=false",
        "2026-01-01 WARNING kafkalog.zk.session zookeeper_disconnected address=x session_lost=true",
        "2026-01-01 INFO broker.replica.in_doubt transaction_resolved partition=t-0 done=applied",
    ]
    expected = {"log recovered after a kill": 1, "session lost": 1, "batch applied by its leader": 1}
    assert coverage.of_logs(lines) == expected


def test_probes_see_what_clients_write() -> None:
    def operation(what: str, outcome: str, run: str = "") -> Operation:
        return Operation(0, "x", what, outcome, TopicPartition("t", 0), run=run)

    written = [operation("send", "info"), operation("commit", "fail", "x1"), operation("batch", "ok", "x1")]
    written += [operation("commit", "ok", "x2"), operation("commit", "info", "x3"), operation("batch", "ok", "x3")]
    assert coverage.of_history(written) == dict.fromkeys(coverage.OF_HISTORIES, 1)


def test_a_situation_that_no_seed_reached_is_missing() -> None:
    reached = Counter({"segment rolled": 3})
    assert coverage.missing(reached, ["segment rolled", "leader changed"]) == ["leader changed"]
    with pytest.raises(ValueError, match="leader lost"):
        coverage.missing(reached, ["leader lost"])


def test_the_command_line_stands_for_plans() -> None:
    plans, required = parsed(["--seeds", "3,5-6", "--seconds", "9"])
    assert plans == [plan(seed, 9) for seed in (3, 5, 6)]
    assert required == coverage.REQUIRED
    given = ["--seeds", "3", "--replication-factor", "3", "--acks", "1", "--kinds", "kill all, lose power"]
    [replicated], required = parsed(given)
    assert replicated == plan(3, 60, 3, ("kill all", "lose power"), "1")
    assert required == coverage.REQUIRED_REPLICATED
    assert parsed(["--require", ""]).required == ()


@pytest.mark.parametrize("given", [["--seeds", "x"], ["--kinds", "kill nobody"], ["--require", "leader lost"]])
def test_a_wrong_command_line_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(given)
    assert "error:" in capsys.readouterr().err
