"""Settings as callers write them."""

from __future__ import annotations

import pytest

from kafkalog.client.config import (
    INT_MAX,
    LONG_MAX,
    ClientSettings,
    ConsumerSettings,
    ProducerSettings,
    connection_settings,
    parse_bootstrap,
    parse_producer,
)
from kafkalog.config import Settings
from kafkalog.errors import InvalidSetting, UnknownSetting
from kafkalog.wire import dataport_pb2 as pb


@pytest.mark.parametrize("acks, parsed", [(0, "0"), (1, "1"), (-1, "all"), ("-1", "all"), ("all", "all"), ("0", "0")])
def test_acks_may_be_a_number(acks: int | str, parsed: str) -> None:
    assert parse_producer({"acks": acks}).acks == parsed


def test_idempotence_can_not_be_demanded_of_acks_0() -> None:
    assert parse_producer({"acks": 0}).enable_idempotence
    with pytest.raises(InvalidSetting, match=r"enable\.idempotence=True is not valid: with acks=0"):
        parse_producer({"acks": 0, "enable_idempotence": True})


def test_a_record_may_not_linger_beyond_its_delivery_timeout() -> None:
    with pytest.raises(InvalidSetting, match=r"at least linger\.ms \(500\)"):
        parse_producer({"linger_ms": 500, "delivery_timeout_ms": 100})


def test_only_a_heartbeat_that_is_given_has_to_be_shorter_than_the_session() -> None:
    assert ConsumerSettings.parse({"session_timeout_ms": 1000}).session_timeout_ms == 1000
    with pytest.raises(InvalidSetting, match=r"less than session\.timeout\.ms \(1000\)"):
        ConsumerSettings.parse({"session_timeout_ms": 1000, "heartbeat_interval_ms": 1000})


def test_a_consumers_group_is_no_setting_but_an_argument() -> None:
    with pytest.raises(UnknownSetting, match=r"no consumer setting 'group_id': it is the argument group"):
        ConsumerSettings.parse({"group_id": "g"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_poll_records", r"give consume\(\) a number"),
        ("consumer_timeout_ms", r"give poll\(\) or messages\(\) a timeout"),
        ("enable.auto.offset.store", "a message counts as processed when the next one is asked for"),
    ],
)
def test_kafkas_settings_that_are_calls_here_say_which(name: str, hint: str) -> None:
    with pytest.raises(UnknownSetting, match=f"no consumer setting '{name}': {hint}"):
        ConsumerSettings.parse({name: 1})


def test_a_static_name_that_brokers_refuse_is_refused_at_once() -> None:
    with pytest.raises(InvalidSetting, match=r"group\.instance\.id='a b' is not valid: use 1 to 249 of"):
        ConsumerSettings.parse({"group.instance.id": "a b"})


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(UnknownSetting, match=r"no producer setting 'linger_mss'; did you mean 'linger\.ms'\?"):
        parse_producer({"linger_mss": 5})


def test_connection_settings_continue_to_the_cluster() -> None:
    values = parse_producer({"linger_ms": 7, "request_timeout_ms": 99})
    assert connection_settings(values).given() == {"request.timeout.ms": 99}
    for table in (ProducerSettings, ConsumerSettings):
        for name, setting in ClientSettings.rows.items():
            assert table.rows[name] is setting
            assert ClientSettings.parse(table.parse({name: 77}).given()).given() == {name: 77}


@pytest.mark.parametrize("table", [ClientSettings, ProducerSettings, ConsumerSettings], ids=lambda table: table.what)
def test_a_number_that_nothing_could_be_done_with_is_refused(table: type[Settings]) -> None:
    for setting in table.rows.values():
        if setting.type is int:
            for too_much in (1 << 64, 10**400):  # more than fits in a float, too
                with pytest.raises(InvalidSetting, match=r"it must be from \d+ to \d+"):
                    table.parse({setting.name: too_much})


def test_what_goes_over_the_wire_fits_into_its_field() -> None:
    producer = {"request.timeout.ms": INT_MAX, "max.request.size": INT_MAX}
    consumer = {"fetch.min.bytes", "fetch.max.wait.ms", "fetch.max.bytes", "max.partition.fetch.bytes"}
    for table, names in ((ProducerSettings, producer), (ConsumerSettings, {"request.timeout.ms", *consumer})):
        for name in names:
            table.parse({name: INT_MAX})
            with pytest.raises(InvalidSetting):
                table.parse({name: INT_MAX + 1})
    pb.AppendRequest(timeout_ms=INT_MAX)
    pb.FetchRequest(min_bytes=INT_MAX, max_wait_ms=INT_MAX, max_bytes=INT_MAX)


@pytest.mark.parametrize("name", ["max.block.ms", "delivery.timeout.ms", "metadata.max.age.ms"])
def test_for_ever_as_kafkas_users_write_it_is_taken(name: str) -> None:
    assert dict(parse_producer({name: str((1 << 63) - 1)}).items())[name] == LONG_MAX


def test_bootstrap_servers() -> None:
    assert parse_bootstrap("a:1, b:2") == [("a", 1), ("b", 2)]
    assert parse_bootstrap(["[::1]:9192"]) == [("::1", 9192)]


@pytest.mark.parametrize(
    "wrong", ["", "host", "host:", ":9", "host:x", "host:0", "host:70000", "a:1,,b:2", "a:1,", "http://a:1", "::1:9"]
)
def test_an_invalid_address_is_named(wrong: str) -> None:
    with pytest.raises(InvalidSetting, match=r"bootstrap\.servers=.* is not valid: it must be host:port"):
        parse_bootstrap(wrong)
    with pytest.raises(InvalidSetting, match="it must be host:port"):
        parse_bootstrap(None)  # type: ignore[arg-type]
