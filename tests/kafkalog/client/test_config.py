"""Settings as callers write them."""

from __future__ import annotations

import pytest

from kafkalog.client.config import (
    CLIENT_SETTINGS,
    CONSUMER_SETTINGS,
    PRODUCER_SETTINGS,
    connection_settings,
    parse_bootstrap,
    parse_producer,
)
from kafkalog.errors import InvalidSetting, UnknownSetting


@pytest.mark.parametrize("acks, parsed", [(0, "0"), (1, "1"), (-1, "all"), ("-1", "all"), ("all", "all"), ("0", "0")])
def test_acks_may_be_a_number(acks: int | str, parsed: str) -> None:
    assert parse_producer({"acks": acks}).acks == parsed


def test_idempotence_can_not_be_demanded_of_acks_0() -> None:
    assert parse_producer({"acks": 0}).enable_idempotence
    with pytest.raises(InvalidSetting, match=r"enable\.idempotence=True is not valid: acks=0"):
        parse_producer({"acks": 0, "enable_idempotence": True})


def test_a_record_may_not_linger_beyond_its_delivery_timeout() -> None:
    with pytest.raises(InvalidSetting, match=r"at least linger\.ms \(500\)"):
        parse_producer({"linger_ms": 500, "delivery_timeout_ms": 100})


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(UnknownSetting, match=r"no producer setting 'linger_mss'; did you mean 'linger\.ms'\?"):
        parse_producer({"linger_mss": 5})


def test_connection_settings_go_on_to_the_cluster() -> None:
    values = parse_producer({"linger_ms": 7, "request_timeout_ms": 99})
    assert connection_settings(values).given() == {"request.timeout.ms": 99}
    for table in (PRODUCER_SETTINGS, CONSUMER_SETTINGS):
        for setting in CLIENT_SETTINGS:
            assert table[setting.name] == setting or table[setting.name].default == setting.default


def test_bootstrap_servers() -> None:
    assert parse_bootstrap("a:1, b:2") == [("a", 1), ("b", 2)]
    assert parse_bootstrap(["[::1]:9192"]) == [("::1", 9192)]


@pytest.mark.parametrize(
    "wrong", ["", "host", "host:", ":9", "host:x", "host:0", "host:70000", "a:1,,b:2", "a:1,", "http://a:1", "::1:9"]
)
def test_what_is_no_address_is_named(wrong: str) -> None:
    with pytest.raises(InvalidSetting, match=r"bootstrap\.servers=.* is not valid: it must be host:port"):
        parse_bootstrap(wrong)
    with pytest.raises(InvalidSetting, match="it must be host:port"):
        parse_bootstrap(None)  # type: ignore[arg-type]
